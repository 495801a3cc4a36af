#!/usr/bin/env bash
# RTX 5090: the clocks to which its peaks in conf/devices.json refer. --dry-run prints what would be done.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/gpu-clock.sh"
lock_clocks 2407 14001
