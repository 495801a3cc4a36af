# Functions of the scripts that lock and reset clocks; to be sourced by bash. --dry-run prints what would be done.
#
# While clocks are locked, a file in the cache says so, and profiles repeat it.

file=$(readlink -f "${BASH_SOURCE[0]}")
root=${file%/scripts/*}
note_file=${HYPERMLA_CACHE_DIR:-$root/.cache}/locked-clocks.json
dry_run=
die() {
  echo "${0##*/}: $*" >&2
  exit 2
}
[[ $note_file == /* ]] || die "HYPERMLA_CACHE_DIR=$HYPERMLA_CACHE_DIR is not an absolute path"
for word; do
  case $word in
    --dry-run) dry_run=--dry-run ;;
    --help) echo "Usage: ${0##*/} [--dry-run]"; exit ;;
    *) die "unknown option '$word'; the only one is --dry-run" ;;
  esac
done
require_smi() {
  command -v nvidia-smi >/dev/null || die "there is no nvidia-smi here; run this on the machine of the GPU"
}
gpu_name() {
  require_smi
  nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1
}
smi() {
  if [[ $dry_run ]]; then
    echo "nvidia-smi $*"
  else
    require_smi
    ((EUID == 0)) ||
      die "clocks belong to root; run \`sudo ${HYPERMLA_CACHE_DIR:+HYPERMLA_CACHE_DIR='$HYPERMLA_CACHE_DIR' }$0\`"
    nvidia-smi "$@" >/dev/null || die "nvidia-smi $* failed; does this board allow it?"
  fi
}
# Arguments: clocks of the SMs and of the memory, in MHz.
lock_clocks() {
  smi --persistence-mode=1
  smi "--lock-gpu-clocks=$1,$1"
  smi "--lock-memory-clocks=$2,$2"
  local note="{\"sm_MHz\": $1, \"memory_MHz\": $2}"
  if [[ $dry_run ]]; then
    echo "write $note to $note_file"
  else
    # The cache is its user's, who has lent this script root's rights.
    [[ -e ${note_file%/*} ]] || { mkdir -p "${note_file%/*}" && chown "${SUDO_UID:-0}" "${note_file%/*}"; }
    echo "$note" >"$note_file"
    echo "locked at $1 MHz (SM) and $2 MHz (memory); scripts/reset-gpu-clock.sh undoes it"
  fi
}
