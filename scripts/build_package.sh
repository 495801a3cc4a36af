#!/usr/bin/env bash
# Builds the Python package into build/python, as ./hypermla builds the command line: the benchmarks call it on first
# use. PYTHONPATH=build/python then finds it.
set -euo pipefail
file=$(readlink -f "${BASH_SOURCE[0]}")
root=${file%/*/*}
. "$root/scripts/setup.sh"
lock
install_all python3-dev
configure -DHYPERMLA_BUILD_PYTHON=ON
build "about five minutes" hypermla_cli hypermla_python
unlock
