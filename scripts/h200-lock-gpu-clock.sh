#!/usr/bin/env bash
# H200: a clock at which even a matrix product stays below the 700 W cap, so that the cap never moves it. --dry-run prints
# what would be done.
#
# The sustained product of conf/devices.json, 725 TFLOP/s, takes 132 SMs x 4096 FLOP per cycle at least 1341 MHz.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/gpu-clock.sh"
lock_clocks 1350 3201
