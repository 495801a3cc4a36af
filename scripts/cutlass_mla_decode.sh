#!/bin/bash
# CUTLASS' own MLA decoding kernel for Blackwell, its example 77: built for sm_100a from the package and by the compiler
# that requirements.txt pins, and run where such a GPU is there. What was read in it: docs/learning/cutlass-mla.md
#
#   scripts/cutlass_mla_decode.sh fp16                         # or fp8: e4m3 queries and cache
#   scripts/cutlass_mla_decode.sh fp8 --b=128 --k=8192 --verify    # flags of CUTLASS' program
#
# The program lands in build/cutlass/, what the assembler says of its kernels beside it.
set -euo pipefail
shopt -s nullglob
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
die() {
  echo "cutlass_mla_decode: $*" >&2
  exit 1
}

type=${1:-}
[[ $type == fp16 || $type == fp8 ]] || die "say which elements: fp16 or fp8, then flags of CUTLASS' program"
shift
packages=("$root"/.venv/lib/python3*/site-packages)
((${#packages[@]})) || die "there is no .venv; run ./hypermla once, which installs the pinned compilers and CUTLASS"
cuda=${packages[0]}/nvidia/cu13 cutlass=${packages[0]}/cutlass_library/source
example=$cutlass/examples/77_blackwell_fmha
[[ -x $cuda/bin/nvcc && -f $example/77_blackwell_mla.cu ]] ||
  die "nvcc or CUTLASS' example 77 is missing in .venv; remove .venv/installed.txt and run ./hypermla again"

program=$root/build/cutlass/mla_decode_$type
mkdir -p "${program%/*}"
if [[ ! $program -nt $root/requirements.txt ]]; then
  echo "building $program, a minute or two" >&2
  "$cuda/bin/nvcc" -std=c++17 -O2 -arch=sm_100a --expt-relaxed-constexpr "-D${type^^}" -Xptxas=-v \
    -I"$cutlass/include" -I"$example" -I"$cutlass/examples/common" -I"$cutlass/tools/util/include" \
    -isystem "$cuda/include/cccl" -L"$cuda/lib" -o "$program.part" "$example/77_blackwell_mla.cu" \
    >"$program.log" 2>&1 ||
    { tail -n 5 "$program.log" >&2; die "nvcc failed; $program.log says more"; }
  mv "$program.part" "$program"
fi

# What the assembler says of the attention kernels: the name of one, then its frame, then its registers.
awk '/Function properties for/ { tiles = "" }
     /Function properties for .*MlaKernel.*Individual/ { tiles = "individual" }
     /Function properties for .*MlaKernel.*Persistent/ { tiles = "persistent" }
     tiles && /bytes stack frame/ { spills = $5 + $9 }
     tiles && /Used [0-9]+ registers/ { printf "%s tiles: %d registers, %d bytes of spills\n", tiles, $5, spills }' \
  "$program.log"
case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) in
  10.*) exec "$program" "${@:---verify}" ;;
  *) echo "compiled only: it runs on GPUs of compute capability 10.0 (B200)" ;;
esac
