"""The CMAKE_CXX_COMPILER_LAUNCHER of builds that tests make. Where the present build has compiled the same files with
the same command, its object is copied; otherwise the compiler runs."""

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD

LAUNCHER = f"{sys.executable};{pathlib.Path(__file__).resolve()};{BUILD}"


def settings(build):
    return dict(re.findall(r"^(\w+):\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M))


def places(build):
    """The directories whose names differ from one build to another."""
    names = ("CMAKE_CACHEFILE_DIR", "CMAKE_HOME_DIRECTORY", "HYPERMLA_CUDA_INCLUDE")
    return [settings(build).get(name) for name in names]


def compiled_from(output, command, present):
    """The files, in this build's directories, that the present build has compiled this object from; [] if it has not
    from the same."""
    moves = dict(zip(places(present), places(pathlib.Path.cwd())))
    if not all(moves.values()):  # a compiler check of CMake, in a directory of its own
        return []
    longest_first = "|".join(re.escape(directory) for directory in sorted(moves, key=len, reverse=True))

    def moved(text):
        return re.sub(longest_first, lambda found: moves[found[0]], text)

    def same(file):
        other = pathlib.Path(moved(file))
        return str(other) == file or other.exists() and other.read_text() == moved(pathlib.Path(file).read_text())

    entries = json.loads((present / "compile_commands.json").read_text())
    words = next((shlex.split(one["command"]) for one in entries if f" -o {output} " in one["command"]), [])
    if command[0] not in words or [moved(word) for word in words[words.index(command[0]):]] != command:
        return []
    listed = subprocess.run(["ninja", "-n", "-C", present, "-t", "deps", output], text=True, capture_output=True)
    files = [line.strip() for line in listed.stdout.splitlines() if line.startswith(" ") and ".gch" not in line]
    return [moved(file) for file in files] if all(map(same, files)) else []


def main(present, *command):
    command, present = list(command), pathlib.Path(present)
    value = dict(zip(command, command[1:]))
    # compile_commands.json leaves out what ninja adds for itself.
    plain = [word for i, word in enumerate(command) if word != "-MD" and not {word, command[i - 1]} & {"-MT", "-MF"}]
    files = compiled_from(value.get("-o"), plain, present)
    if not files:
        return subprocess.run(command, check=False).returncode
    shutil.copyfile(present / value["-o"], value["-o"])
    escaped = (file.replace(" ", "\\ ") for file in files)
    pathlib.Path(value["-MF"]).write_text(f"{value['-o']}: {' '.join(escaped)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
