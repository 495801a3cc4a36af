#!/usr/bin/env python3
"""Where machine code waits for what it has just asked for, read without a GPU.

    scripts/waits.py KERNEL.cubin [KERNEL.cubin ...]

Loads, special registers and other instructions whose time varies signal one of six scoreboards: when the result is
there, or when the operands are read, so that their registers may change. An instruction names in its wait mask those
that it needs. Compilers fill both in, and may move the use of a value up to its load. Then a warp stands still for the
load's whole latency, between products, too. And a scoreboard counts: who waits for it waits for all that was asked for
on it. So a load for the next round makes this round's values wait for it, if both are on one scoreboard; such a wait is
"not its own": the instruction uses nothing of the newest load. This program lists waits for something asked for fewer
than --instructions before, in the loops that hold products or copies to shared memory. Code that a forward branch may
skip is left out, and loops within one.

The layout of the control bits is the one that Jia and others found for Volta (arXiv 1804.06826, section 2.1), which
GPUs up to Hopper keep: bits 105 to 108 of an instruction's 128 are the cycles to the next, 110 to 112 the scoreboard of
the result, 113 to 115 that of the operands, 7 for none, and 116 to 121 the mask.

Compiled kernels lie in the cache, <kernel>-<target>-<hash>/kernel.cubin, and below compiled/ of a profile; a cubin of
any other compiler will do, too. Needs nvdisasm, of the CUDA toolkit or of PyPI's nvidia-cuda-nvdisasm.
"""

import argparse
import collections
import dataclasses
import pathlib
import re
import shutil
import signal
import subprocess
import sys

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
FUNCTION = re.compile(r"\.text\.(\S+):$")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
FIRST_HALF = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
SECOND_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
BRANCH = re.compile(r"(@\S+\s+)?BRA\b.*`\((\.L_x_\d+)\)")
PRODUCTS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA")
COPIES = ("LDGSTS", "UBLKCP", "UTMALDG")
NO_SCOREBOARD = 7
FILLS = re.compile(r"(?:@\S+\s+)?(\S+)\s+(?:P\w+,\s*)?R(\d+)\b")  # an operation, and the first register that it fills
WORDS = {".128.": 4, ".64.": 2, "88.4.": 4, "88.2.": 2}  # by what stands in the operation; else 1


@dataclasses.dataclass
class Instruction:
    text: str
    result: int  # the scoreboard that says when its result is there
    operands: int  # when its operands are read
    mask: int  # those that it waits for

    def uses_what(self, load):
        """Whether a register that the load fills stands in this instruction; of what fills none, True."""
        match = FILLS.match(load.text)
        if not match:
            return True
        words = next((count for ending, count in WORDS.items() if ending in match[1] + "."), 1)
        used = [(int(number), bool(wide)) for number, wide in re.findall(r"\bR(\d+)(\.64)?", self.text)]
        return any(number + wide >= int(match[2]) and number < int(match[2]) + words for number, wide in used)

    @property
    def operation(self):
        return next(word for word in self.text.split() if not re.match(r"@!?U?P", word)).split(".")[0]


def functions(listing):
    """{name: (instructions, {label: index of the instruction behind it})} of what `nvdisasm -c -hex` prints."""
    found, code, labels, first = {}, [], {}, None
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            code, labels = [], {}
            found[match[1]] = code, labels
        elif match := LABEL.match(line):
            labels[match[1]] = len(code)
        elif match := FIRST_HALF.match(line):
            first = match[1]
        elif first and (match := SECOND_HALF.match(line)):
            control = int(match[1], 16) >> 41  # bits 105 and more of the whole
            code.append(Instruction(first, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63))
            first = None
    return found


def loops(code, labels):
    """Of each loop with products or copies the places of its own code, without loops within it that have some, too. Of
    loops around others only those with copies of their own: at the end of a tile much has to be waited for."""
    wanted = [each.operation in PRODUCTS + COPIES for each in code]
    found = {}
    for last, each in enumerate(code):
        match = BRANCH.match(each.text)
        if not match or ".U.ANY" in each.text:  # once for each of the lanes' different operands
            continue
        first = labels.get(match[2], last + 1)
        if first <= last and any(wanted[first:last + 1]):
            found[first] = max(found.get(first, first), last)
    # A branch back into a loop from behind its end is that of a wait which is written out of the way, no loop.
    whole = sorted((a, b) for a, b in found.items() if not any(c < a <= d < b for c, d in found.items()))
    for a, b in whole:
        within = [(c, d) for c, d in whole if (c, d) != (a, b) and a <= c and d <= b]
        places = [index for index in range(a, b + 1) if not any(c <= index <= d for c, d in within)]
        if any(code[index].operation in (COPIES if within else PRODUCTS + COPIES) for index in places):
            yield places


def skipped(code, labels, first, last):
    """The places in a loop that a forward branch within it may skip."""
    found = set()
    for index in range(first, last + 1):
        match = BRANCH.match(code[index].text)
        if match and match[1] and index < labels.get(match[2], -1) <= last:
            found.update(range(index + 1, labels[match[2]]))
    return found


@dataclasses.dataclass
class Wait:
    at: int  # instructions from the loop's first on
    text: str
    asked_at: int
    asked: str
    what: str  # it waits for: "result", of a newer load "not its own", or "operands read"
    products: int  # between the two


def waits(code, places, instructions):
    """What a loop waits for that was asked for fewer than so many instructions before; `places`: its code, in order."""
    pending, products = {}, 0
    for index in places:
        each = code[index]
        for board in range(6):
            if each.mask >> board & 1:
                for asked, result, before in pending.pop(board, ()):
                    if index - asked < instructions:
                        what = "operands read" if not result else \
                            "result" if each.uses_what(code[asked]) else "not its own"
                        yield Wait(index - places[0], each.text, asked - places[0], code[asked].text, what,
                                   products - before)
        products += each.operation in PRODUCTS
        for board, result in ((each.result, True), (each.operands, False)):
            if board != NO_SCOREBOARD:
                # Of several on one scoreboard the last one counts: it is waited for, too.
                pending[board] = [one for one in pending.get(board, ()) if one[1] != result]
                pending[board].append((index, result, products))


def find_nvdisasm():
    for directory in (None, *map(str, CHECKOUT.glob(".venv/lib/python3*/site-packages/nvidia/cu13/bin"))):
        if path := shutil.which("nvdisasm", path=directory):
            return path
    version = re.search(r"^nvidia-cuda-nvcc==(\S+)", (CHECKOUT / "requirements.txt").read_text(), re.M)[1]
    sys.exit(f"waits.py: no nvdisasm; install the CUDA toolkit, or `.venv/bin/pip install --no-deps "
             f"nvidia-cuda-nvdisasm=={version}` (5 MB)")


def listing_of(nvdisasm, cubin):
    done = subprocess.run([nvdisasm, "-c", "-hex", cubin], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"waits.py: nvdisasm does not read {cubin} ({done.stderr.strip() or done.returncode}); give a .cubin")
    return done.stdout


def readable(name):
    """A mangled name without its template's arguments."""
    parts, rest = [], name.removeprefix("_ZN" if name.startswith("_ZN") else "_Z")
    while name.startswith("_Z") and (match := re.match(r"\d+", rest)):
        begin, end = match.end(), match.end() + int(match[0])
        parts.append(rest[begin:end])
        rest = rest[end:]
    return "::".join(parts) or name


def report(name, code, labels, instructions):
    name = readable(name)
    found = list(loops(code, labels))
    if not found:
        print(f"{name}: no loop with products or copies")
    for own in found:
        skip = skipped(code, labels, own[0], own[-1])
        places = [index for index in own if index not in skip]
        common = collections.Counter(code[index].operation for index in places).most_common(10)
        products, copies = (sum(code[index].operation in of for index in own) for of in (PRODUCTS, COPIES))
        print(f"{name}: a loop of {len(own)} instructions, {products} of them products and {copies} copies, "
              f"{len(own) - len(places)} skipped by branches; of the others "
              + ", ".join(f"{operation} {count}" for operation, count in common))
        short = list(waits(code, places, instructions))
        for each in short:
            print(f"  {each.at:5} {each.text[:44]:44} waits for {each.asked_at:5} {each.asked[:40]:40} {each.what:13} "
                  f"{each.at - each.asked_at} instructions and {each.products} products before")
        print(f"  {len(short)} waits for what was asked for fewer than {instructions} instructions before")


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader may have enough
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin", nargs="+", help="a compiled kernel")
    parser.add_argument("--instructions", type=int, default=24, metavar="N",
                        help="what was asked for so many instructions before, or more, is not listed (24)")
    options = parser.parse_args()
    nvdisasm = find_nvdisasm()
    for cubin in options.cubin:
        for name, (code, labels) in functions(listing_of(nvdisasm, cubin)).items():
            report(name, code, labels, options.instructions)


if __name__ == "__main__":
    main()
