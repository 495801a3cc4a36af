#!/usr/bin/env bash
# The checks that only a GPU can make, on a machine with nothing but its driver and Python: scripts/pack_gpu_checks.sh
# packs the rest elsewhere. From a checkout of the same commit in which gpu_checks.tar.xz was unpacked:
#
#   scripts/gpu_checks.sh                            # all steps but sanitize
#   scripts/gpu_checks.sh --out=/tmp/out unit runs   # some; logs and records go to /tmp/out, else to out/gpu_checks
#   scripts/gpu_checks.sh --list                     # what each step would do
#
#   unit      the unit tests that are skipped without a GPU
#   verify    `hypermla verify` of the kernels whose records do not match; verified.json in the output folder has all
#   python    the tests and examples of the Python package on a GPU; they need PyTorch
#   runs      tests/attack/decode_runs.py, 10000 runs; it needs PyTorch
#   sanitize  compute-sanitizer's memcheck and synccheck over unit tests of attention; only where it is asked for
#
# What is timed runs alone, the rest side by side, everything with a limit. A table comes last; the exit status is 1
# when something failed. See docs/gpu-checks.md.
set -euo pipefail
file=$(readlink -f "${BASH_SOURCE[0]}")
root=${file%/*/*}
cd "$root"
die() {
  echo "gpu_checks: $*" >&2
  exit 2
}
tests='?*OnAGpu.*:*OnHopper.*:SparseDecode.AGpu*'  # that only work on a GPU
timed='Counters.*:Sampling.*:Timeline.*:Metrics.*'
concurrent='ConcurrentOnAGpu.*'  # timed, too; a process that has read counters gets no green contexts
large='*Beyond32Bits'
tile='*OnHopper.Portable*'  # of which memcheck reports what the driver keeps: docs/gpu-checks.md
attention='DecodeOnHopper.*:*LatentOnHopper.*:MlaPrefillOnHopper.*:SharedPrefixOnHopper.*:SparseDecode.AGpu*'
shards=6 lanes=3

out=$root/out/gpu_checks list='' steps=()
for word in "$@"; do
  case $word in
    -h | --help) exec sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$file" ;;
    --out=?*) out=${word#*=} ;;
    --list) list=1 ;;
    unit | verify | python | runs | sanitize) steps+=("$word") ;;
    *) die "there is no step '$word'; choose among unit, verify, python, runs and sanitize, or see --help" ;;
  esac
done
((${#steps[@]})) || steps=(unit verify python runs)
wanted() { [[ " ${steps[*]} " == *" $1 "* ]]; }

# The build directory: the tests may name another.
build=${HYPERMLA_TEST_BUILD:-$root/build}
program=$build/bin/hypermla
[[ -x $program ]] || die "$program is missing; unpack gpu_checks.tar.xz in $root, or run ./hypermla"
kernels=()
if wanted verify; then
  records=$("$program" verify --records_only) || (($? == 1)) || die "the records cannot be read"
  mapfile -t kernels < <(awk '/ NOT RECORDED| awaits a GPU / { print $1 }' <<<"$records")
fi
if [[ $list ]]; then
  if wanted unit; then echo "unit    $timed:$concurrent:$tests"; fi
  for kernel in "${kernels[@]}"; do echo "verify  $kernel"; done
  if wanted verify && ((!${#kernels[@]})); then echo "# verify: all records match"; fi
  if wanted python; then
    printf 'python  %s\n' tests/package/{compat,torch}_test.py examples/python/{sparse,mla}_layer.py
  fi
  if wanted runs; then echo "runs    tests/attack/decode_runs.py"; fi
  if wanted sanitize; then echo "sanitize $attention"; fi
  exit
fi
if wanted sanitize; then
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) ||
    die "compute-sanitizer is not found; install the CUDA toolkit, or add the folder of that program to PATH"
fi

# Unit tests look for the checkout where they were compiled.
if [[ -e $build/gpu_checks/packed_at ]]; then
  packed_at=$(<"$build/gpu_checks/packed_at")
  if [[ ! $packed_at -ef $root ]]; then
    { mkdir -p "${packed_at%/*}" && ln -s -T "$root" "$packed_at"; } ||
      die "$packed_at, where the tests were compiled, cannot be made a link to this checkout; move what is there"
  fi
  export HYPERMLA_CACHE_DIR=$build/gpu_checks/cache
fi
mkdir -p "$out"
out=$(readlink -f "$out") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
table=$out/table.txt
: >"$table"
export HYPERMLA_TEST_BUILD=$build HYPERMLA_TEST_BINARY=$program PYTHONPATH=$build/python
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 GTEST_TOTAL_SHARDS=1 GTEST_SHARD_INDEX=0

# check STEP NAME SECONDS COMMAND...: with a limit, a log and a line of the table.
check() {
  local name="$1 $2" limit=$3 log="$work/$1.$2.log" begin=$EPOCHREALTIME status=0
  shift 3
  printf '##### %s\n' "$*" >"$log"
  timeout -k 5 "$limit" "$@" </dev/null >>"$log" 2>&1 || status=$?
  awk -v name="$name" -v status=$status -v begin="$begin" -v end="$EPOCHREALTIME" 'BEGIN {
    said = !status ? "passed" : status == 124 || status == 137 ? "STOPPED" : "FAILED"
    printf "%-44s %-8s %6.1f s\n", name, said, end - begin }' | tee -a "$table"
}
# unit_tests STEP NAME SECONDS FILTER [COMMAND...]: under that command, if there is one.
unit_tests() {
  (cd "$build" && check "$1" "$2" "$3" "${@:5}" tests/unit_tests --gtest_filter="$4")
}
# The same side by side, a share of the tests each; NAME-0 and so on are their names.
sharded() {
  local shard
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard unit_tests "$1" "$2-$shard" "${@:3}" &
  done
  wait
}
# Each kernel with records of its own: two that end at once would overwrite each other's.
verify() {
  local kernel running=0
  for kernel in "${kernels[@]}"; do
    if ((running == lanes)); then wait -n; else ((++running)); fi
    cp results/verified.json "$work/$kernel.json"
    check verify "$kernel" 170 "$program" verify "$kernel" --record="$work/$kernel.json" &
  done
  wait
}

if wanted unit; then
  unit_tests unit timed 150 "$timed"
  unit_tests unit concurrent 60 "$concurrent"
  sharded unit others 150 "$tests-$timed:$concurrent:$large"
  unit_tests unit large 60 "$large"
fi
verify &
if wanted python; then
  check python compat_test 60 python3 tests/package/compat_test.py -v -k OnAGpu
  check python torch_test 120 python3 tests/package/torch_test.py -v -k OnAGpu
  check python prefixes_test 60 python3 tests/package/prefixes_test.py -v -k OnAGpu
  check python sparse_layer 60 python3 examples/python/sparse_layer.py
  check python mla_layer 60 python3 examples/python/mla_layer.py
fi
wait
if wanted sanitize; then
  tool() { sharded sanitize "$1" 300 "$2" "$sanitizer" --tool "$1" --error-exitcode 1 --print-limit 20; }
  tool memcheck "$attention-$large:$tile"
  tool synccheck "$attention-$large"
fi
if wanted runs; then check runs decode_runs 120 python3 tests/attack/decode_runs.py --runs=10000; fi

# Every kernel's record from the file that its own run wrote.
if wanted verify; then
  python3 - results/verified.json "$out/verified.json" "$work" "${kernels[@]}" <<'P'
import json, pathlib, sys
before, after, work, *kernels = sys.argv[1:]
records = json.loads(pathlib.Path(before).read_text())
for kernel in kernels:
    written = json.loads((pathlib.Path(work) / f"{kernel}.json").read_text())
    records |= {kernel: written[kernel]} if kernel in written else {}
pathlib.Path(after).write_text(json.dumps(dict(sorted(records.items())), indent=2) + "\n")
P
fi
for step in "${steps[@]}"; do
  if compgen -G "$work/$step.*.log" >/dev/null; then cat "$work/$step".*.log >"$out/$step.log"; fi
done
echo
sort "$table" | tee "$work/table"
mv "$work/table" "$table"
if wanted unit; then
  awk '/^\[ +OK +\]/ { ++passed } /^\[ +SKIPPED +\] .*\)$/ { ++skipped } END {
    printf "unit tests: %d passed, %d skipped\n", passed, skipped }' "$out/unit.log" | tee -a "$table"
  awk '/^\[ +FAILED +\] [^ ]+\.[^ ]/ { sub(",", "", $4); print "  FAILED " $4 }' "$out/unit.log" | sort -u |
    tee -a "$table"
fi
if wanted verify && [[ -e $out/verify.log ]]; then  # the seed by which it can be repeated, and the case
  awk '/, seed [0-9]/ { seed = $0 } /^FAILED / { print "  " seed; lines = 4 } lines-- > 0 { print "  " $0 }' \
    "$out/verify.log" | tee -a "$table"
fi
if grep -qE ' (FAILED|STOPPED) ' "$table"; then
  echo "something failed; $out has the logs"
  exit 1
fi
