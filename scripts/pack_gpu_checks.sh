#!/usr/bin/env bash
# Packs what scripts/gpu_checks.sh needs on a machine that has a GPU but neither our compilers nor a network: the
# program, the unit tests, the Python package, and every kernel that the checks run, compiled for an H200 (sm_90). This
# machine needs no GPU. What was compiled stays in build/gpu_checks/cache, so that the next pack takes less; remove it
# when the pack grows with kernels of texts that are gone.
#
#   scripts/pack_gpu_checks.sh out/       # writes out/gpu_checks.tar.xz; see docs/gpu-checks.md
#   scripts/pack_gpu_checks.sh --list     # the steps of the checks, and the kernels that `verify` runs
set -euo pipefail
file=$(readlink -f "${BASH_SOURCE[0]}")
root=${file%/*/*}
case ${1:-} in
  -h | --help) exec sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$file" ;;
  --list) exec "$root/scripts/gpu_checks.sh" --list ;;
esac
unset HYPERMLA_KERNELS  # the checks are about this repository's kernels
. "$root/scripts/setup.sh"
[[ $# == 1 && $1 != -* ]] || die "say the folder that gpu_checks.tar.xz is written to, or --help"
mkdir -p "$1" || die "$1 cannot be made"
to=$(readlink -f "$1")
lock
install_all "${test_packages[@]}"
configure -DHYPERMLA_BUILD_TESTS=ON -DHYPERMLA_BUILD_PYTHON=ON
build "about three minutes" hypermla_cli hypermla hypermla_python unit_tests stub_cuda
unlock

build=$root/build here=$root/build/gpu_checks log=$root/build/gpu_checks/compile.log
mkdir -p "$here/cache/kernels" "$here/unit"
exec 8>"$here/lock"
flock -n 8 || die "another pack is being made in build/gpu_checks"
export HYPERMLA_CACHE_DIR=$here/cache
: >"$log"
compiled() { find "$here/cache/kernels" -maxdepth 1 -name '*-sm_90*' ! -name '*.tmp*'; }
ahead() {
  "$build/bin/hypermla" compile "$@" --arch=sm_90 >>"$log" 2>&1 ||
    { show_log "$log"; die "\`hypermla compile $*\` failed; build/gpu_checks/compile.log says more"; }
  note "compiled $*: $(compiled | wc -l) kernels are ready"
}
steps=$("$root/scripts/gpu_checks.sh" --list)
while read -r step kernel; do
  if [[ $step == verify ]]; then ahead "$kernel" --cases; fi
done <<<"$steps"
# What Python's tests take: MlaDecode and MlaCacheOps, MlaPrefill. For benchmarks what bench_engine.py --compare runs.
ahead all --decode
ahead cute.mla.flash_mla v0 --fused --tokens_first --causal --candidates
ahead cute.mla.flash_mla v0 --s=4 --fused --tokens_first --causal
ahead cute.mla.flash_mla_v1 --h=16 --fused --tokens_first --causal --candidates
ahead cute.mla.flash_attention v0 --candidates
ahead cute.mla.flash_attention v1 --candidates

# On a driver that says it is an H200 a test asks for its kernels, then fails. Each runs alone: it may also crash.
export LD_LIBRARY_PATH=$build/tests/stub_cuda
[[ $("$build/bin/hypermla" device 2>&1) == *"NVIDIA H200"* ]] || die "the stub of a driver is not found as a GPU"
filter=$(awk '$1 == "unit" { print $2 }' <<<"$steps")
tests=$(cd "$build" && tests/unit_tests --gtest_list_tests --gtest_filter="$filter" |
  awk '/^[^ ].*\.$/ { suite = $1 } /^ / && !/Beyond32Bits/ { print suite $1 }')  # that one needs a GPU's memory
# shellcheck disable=SC2016  # the shell that xargs starts expands them
(cd "$build" && xargs -P "$(nproc)" -I{} bash -c 'name=${1//\//_}
  timeout 900 tests/unit_tests --gtest_filter="$1" >"gpu_checks/unit/$name.log" 2>&1' _ {} <<<"$tests") || true
if grep -l 'compiler process .* died' "$here"/unit/*.log >&2; then
  die "on the stub of a driver a compiler died; the logs above say more"
fi
note "ran $(wc -w <<<"$tests") unit tests on the stub: $(compiled | wc -l) kernels are ready"
"$python" "$root/tests/attack/decode_runs.py" --compile >>"$log" 2>&1 ||
  { show_log "$log"; die "decode_runs.py could not compile its kernels; build/gpu_checks/compile.log says more"; }
unset LD_LIBRARY_PATH
note "compiled what decode_runs.py takes: $(compiled | wc -l) kernels are ready"

# Laid out as they lie below the root of a checkout.
staged=$here/staged
rm -rf "$staged"
mkdir -p "$staged"/build/{bin,tests,python,gpu_checks/cache/kernels}
cp "$build/bin/hypermla" "$staged/build/bin/"
cp "$build/tests/unit_tests" "$staged/build/tests/"
cp -a "$build"/libhypermla.so* "$staged/build/"
cp -a "$build/python/hypermla" "$staged/build/python/"
find "$staged" -name __pycache__ -prune -exec rm -rf {} +
find "$staged" -type f \( -path '*/bin/*' -o -path '*/tests/*' -o -name '*.so*' \) -exec strip -g {} +
compiled | xargs -r cp -a -t "$staged/build/gpu_checks/cache/kernels"
echo "$root" >"$staged/build/gpu_checks/packed_at"
git -C "$root" describe --always --dirty >"$staged/build/gpu_checks/commit" 2>/dev/null || true
tar -C "$staged" --sort=name --owner=0 --group=0 -cf - build | xz -T0 -6 >"$to/gpu_checks.tar.xz.part"
mv "$to/gpu_checks.tar.xz.part" "$to/gpu_checks.tar.xz"
note "wrote $to/gpu_checks.tar.xz: $(du -h "$to/gpu_checks.tar.xz" | cut -f1), $(compiled | wc -l) kernels"
