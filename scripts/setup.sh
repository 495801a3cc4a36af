# Functions that ./hypermla and ./test share: set up the machine and build. To be sourced by bash, with `root` set to
# the checkout.
#
# Every step marks its end by a file, so an interrupted step is repeated and a finished one is skipped. Progress goes to
# standard error, logs go to build/. A failure prints the last lines of the log, then one sentence.

packages=(g++ cmake ninja-build python3-venv libfmt-dev nlohmann-json3-dev libcli11-dev)
# The last two draw pictures of profiles, and show them in a browser.
test_packages=(libgtest-dev python3-dev python3-matplotlib chromium)
venv=$root/.venv

note() { echo "hypermla: $*" >&2; }
die() {
  note "$*"
  exit 1
}

# As CMake notes it, without a slash at its end; with one it would be another directory at every call.
if [[ -n ${HYPERMLA_KERNELS:-} ]]; then
  [[ $HYPERMLA_KERNELS == /* ]] ||
    die "HYPERMLA_KERNELS=$HYPERMLA_KERNELS is not an absolute path; set it to one, or unset it"
  while [[ $HYPERMLA_KERNELS == ?*/ ]]; do HYPERMLA_KERNELS=${HYPERMLA_KERNELS%/}; done
fi

# The end of a log, without addresses.
show_log() { tail -n "${2:-5}" "$1" | sed -E 's#[a-z]+://[^ ]+#<address>#g' >&2; }

# Processes started here inherit the lock: when a launcher is killed, its ninja still holds it, and no second build
# starts beside it. apt-get does not inherit it, since it may start services.
lock() {
  { mkdir -p "$root/build" && : >>"$root/build/lock"; } 2>/dev/null ||
    die "$root cannot be written; copy the checkout to a place of your own"
  exec 9>"$root/build/lock"
  wait_for_others 9 "./hypermla that is building"
}
unlock() { exec 9>&-; }
# Tests have places of their own below build/, which a second run would share.
lock_tests() {
  exec 8>"$root/build/tests.lock"
  wait_for_others 8 ./test
}
# Arguments: the descriptor of a lock, and who may hold it.
wait_for_others() { flock -n "$1" || { note "waiting for another $2"; flock "$1"; }; }

can_build() { command -v "${CXX:-g++}" && command -v cmake && command -v ninja; } >/dev/null

# As environment.cpp has it, which starts the same compiler.
require_cxx() {
  [[ -z ${CXX:-} ]] || command -v "$CXX" >/dev/null ||
    die "CXX=$CXX is no program that can be run; set it to the path of a C++20 compiler, without flags, or unset it"
}

# The system's Python: one from elsewhere may lack its headers.
find_python() {
  python=/usr/bin/python3
  [[ -x $python ]] || python=$(command -v python3 || true)
}

has_header() { echo "#include <$1>" | "${CXX:-g++}" -E -x c++ -std=c++20 - >/dev/null 2>&1; }

# Whether the content of a Debian package is installed, from any source.
has_package() {
  case $1 in
    g++) command -v "${CXX:-g++}" >/dev/null ;;
    cmake) command -v cmake >/dev/null ;;
    ninja-build) command -v ninja >/dev/null ;;
    python3-venv) [[ -n $python ]] && "$python" -c 'import ensurepip, venv' 2>/dev/null ;;
    python3-dev)
      "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ;;
    libfmt-dev) has_header fmt/format.h ;;
    nlohmann-json3-dev) has_header nlohmann/json.hpp ;;
    libcli11-dev) has_header CLI/CLI.hpp ;;
    libgtest-dev) has_header gtest/gtest.h ;;
    python3-matplotlib) "$python" -c 'import matplotlib' 2>/dev/null ;;
    chromium) { command -v chromium || command -v google-chrome || command -v chrome; } >/dev/null ;;
  esac
}

install_packages() {
  local missing=() name log=$root/build/apt.log
  find_python
  for name in "$@"; do has_package "$name" || missing+=("$name"); done
  ((${#missing[@]})) || return 0
  local line="apt-get install -y ${missing[*]}"
  command -v apt-get >/dev/null ||
    die "missing: ${missing[*]} (Debian's names); install them with this system's package manager, then run this again"
  ((EUID == 0)) || die "missing packages; run \`sudo $line\`, then run this again"
  note "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  local get=(apt-get install -y --no-install-recommends "${missing[@]}")
  # Package lists are updated only if the installation fails: on a fresh machine they are empty or old.
  "${get[@]}" >"$log" 2>&1 9>&- || { apt-get update >"$log" 2>&1 9>&- && "${get[@]}" >>"$log" 2>&1 9>&-; } ||
    { show_log "$log"
      die "apt-get failed; run \`apt-get update && $line\` where there is a network, then run this again"; }
  find_python
}

# The compilers of kernels for GPUs: the wheels that requirements.txt pins, in the environment .venv of this checkout.
has_wheels() {
  [[ -n ${HYPERMLA_CUDA_ROOT:-} && -e $HYPERMLA_CUDA_ROOT/include/cuda.h ]] ||
    cmp -s "$root/requirements.txt" "$venv/installed.txt"
}
install_wheels() {
  has_wheels && return 0
  local log=$root/build/pip.log
  note "installing the CUDA Tile compilers into .venv (300 MB to download)"
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv" >"$log" 2>&1 ||
    { show_log "$log"; die "python could not make the environment .venv; see build/pip.log"; }
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar off --no-deps \
    -r "$root/requirements.txt" >"$log" 2>&1 ||
    { show_log "$log" 2
      die "the wheels of requirements.txt could not be installed; run this again where there is a network, or set" \
        "HYPERMLA_CUDA_ROOT to a CUDA toolkit 13.3 or newer"; }
  cp "$root/requirements.txt" "$venv/installed.tmp"
  mv "$venv/installed.tmp" "$venv/installed.txt"
}

# Whether build/ is configured for the kernels of one's own that HYPERMLA_KERNELS names now, if any.
knows_own_kernels() {
  [[ ${HYPERMLA_KERNELS:-} == "$(sed -n 's/^HYPERMLA_KERNELS:PATH=//p' "$root/build/CMakeCache.txt" 2>/dev/null)" ]]
}

install_all() {
  require_cxx
  install_packages "${packages[@]}" "$@"
  install_wheels
}

# Arguments: CMake settings to change. A build directory that was copied from another place, or whose configuration was
# interrupted, is configured from scratch.
configure() {
  [[ $root != *'${'* ]] || die "CMake takes \${ in a path for a variable of its own; rename a directory of $root"
  local cache=$root/build/CMakeCache.txt log=$root/build/cmake.log begin=()
  if [[ ! -e $root/build/build.ninja ]] || ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$cache" 2>/dev/null; then
    begin=(--fresh --preset default -DHYPERMLA_BUILD_TESTS=OFF "-DPython_EXECUTABLE=$python")
  elif (($# == 0)) && knows_own_kernels; then
    return 0  # ninja itself runs cmake again when a CMakeLists.txt or the set of sources has changed
  fi
  knows_own_kernels || begin+=("-DHYPERMLA_KERNELS=${HYPERMLA_KERNELS:-}")
  cmake -S "$root" -B "$root/build" "${begin[@]}" "$@" >"$log" 2>&1 ||
    { show_log "$log" 20; die "cmake failed; the lines above say why, build/cmake.log says more"; }
}

# Arguments: how long it takes from scratch, and the targets. On a terminal ninja shows its progress; elsewhere a line
# is printed for every quarter.
build() {
  local log=$root/build/build.log begin=$SECONDS takes=$1
  shift
  touch "$root/build/building"  # what changes from now on is newer than this build
  note "building ($takes on two cores when everything is new)"
  if [[ -t 2 ]]; then
    cmake --build "$root/build" --target "$@" >&2 || die "the build failed; the lines above say why"
  else
    NINJA_STATUS='[%p] ' cmake --build "$root/build" --target "$@" 2>&1 | tee "$log" | show_quarters >&2 ||
      { grep -A 12 -E 'FAILED|[Ee]rror' "$log" | head -60 >&2 || true
        die "the build failed; the lines above say why"; }
  fi
  mv "$root/build/building" "$root/build/built"
  note "built in $((SECONDS - begin)) s"
}
show_quarters() {
  local line percent next=25
  while IFS= read -r line; do
    [[ $line =~ ^\[\ *([0-9]+)%\] ]] || continue
    percent=${BASH_REMATCH[1]}
    ((percent < next)) || { echo "hypermla: built $percent %"; next=$((percent / 25 * 25 + 25)); }
  done
}

# Serving engines, each in an environment of its own: tests/engines/<engine>.txt is what pip installs there, and
# tests/engines/<engine>_test.py runs with it. So do the tests of the package that want PyTorch, which comes with every
# engine. None needs a GPU.
test_engines() {
  local wanted engine place log one failed=0
  for wanted in "$root"/tests/engines/*.txt; do
    engine=$(basename "$wanted" .txt) place=$root/build/engines/$engine log=$root/build/engines/$engine.log
    mkdir -p "$root/build/engines"
    if ! cmp -s "$wanted" "$place/installed.txt"; then
      note "installing $engine into build/engines"
      "$python" -m venv --clear "$place" >"$log" 2>&1 &&
        "$place/bin/pip" install --quiet --disable-pip-version-check --progress-bar off -r "$wanted" >>"$log" 2>&1 ||
        { show_log "$log"; die "$engine could not be installed; run this again where there is a network and room"; }
      cp "$wanted" "$place/installed.tmp"
      mv "$place/installed.tmp" "$place/installed.txt"
    fi
    for one in engines/"$engine" package/torch package/compat package/fp8 package/prefixes; do
      HYPERMLA_TEST_BUILD=$root/build "$place/bin/python" "$root/tests/${one}_test.py" ||
        failed=1
    done
  done
  ((!failed)) || die "a test failed in an engine's environment; the lines above say why"
}
