#!/usr/bin/env bash
# H200: a clock at which even a matrix product stays below the 700 W cap, so that the cap never changes the
# clock. --dry-run prints what would be done.
#
# The sustained product of conf/devices.json, 725 TFLOP/s, needs 132 SMs x 4096 FLOP per cycle at 1341 MHz or more.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/gpu-clock.sh"
lock_clocks 1350 3201
