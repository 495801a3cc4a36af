#!/usr/bin/env bash
# Locks the clocks of the first GPU so that times can be compared. --dry-run prints what would be done.
set -euo pipefail
scripts=$(dirname "$(readlink -f "$0")")
. "$scripts/gpu-clock.sh"
name=$(gpu_name)
case $name in
  *"RTX 5090"*) exec "$scripts/rtx5090-lock-gpu-clock.sh" $dry_run ;;
  *H200*) exec "$scripts/h200-lock-gpu-clock.sh" $dry_run ;;
  *) die "no clocks are known for '$name'; write scripts/<device>-lock-gpu-clock.sh after the one of the H200" ;;
esac
