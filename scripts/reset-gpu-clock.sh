#!/usr/bin/env bash
# Undoes lock-gpu-clock.sh. --dry-run prints what would be done.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/gpu-clock.sh"
smi --reset-gpu-clocks
smi --reset-memory-clocks
if [[ $dry_run ]]; then echo "remove $note_file"; else rm -f "$note_file"; fi
