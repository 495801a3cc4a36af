"""Waits that scripts/waits.py finds in machine code, as nvdisasm prints it."""

import os
import subprocess
import sys
import unittest

from support import CHECKOUT, CommandCase

NONE = 7  # of the scoreboards


def instruction(text, result=NONE, operands=NONE, mask=0):
    control = result << 5 | operands << 8 | mask << 11
    return (f"        /*0000*/                   {text} ;   /* 0x0000000000000000 */\n"
            f"                                                /* 0x{control << 41:016x} */\n")


def loop(*body):
    """A function that asks for something in front of its loop and waits for it behind."""
    return "".join([
        ".text._ZN8hypermla4cute5twiceILi64EEEvPf:\n", instruction("LDS R1, [R2]", result=3), ".L_x_0:\n", *body,
        instruction("@P0 BRA `(.L_x_0)"), instruction("FADD R1, R1, R1", mask=1 << 3)])


class Waits(CommandCase):
    def report(self, *body, options=(), status=0, tool=None):
        (self.directory / "listing").write_text(loop(*body))
        tools = self.directory / "tools"
        tools.mkdir(exist_ok=True)
        fake = tools / "nvdisasm"
        fake.write_text(tool or f"#!/bin/sh\ncat '{self.directory}/listing'\n")
        fake.chmod(0o755)
        done = subprocess.run([sys.executable, CHECKOUT / "scripts/waits.py", "some.cubin", *options], text=True,
                              capture_output=True, env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
        self.assertEqual(done.returncode, status, done)
        return [line.split() for line in (done.stdout or done.stderr).splitlines()]

    def test_a_use_just_behind_its_load_waits(self):
        lines = self.report(
            instruction("LDS.128 R4, [R8]", result=0, operands=1), instruction("HGMMA.64x64x16.F32 R24, R56"),
            instruction("@!P1 IADD3 R8, R8, 0x1, RZ", mask=1 << 1), instruction("FMUL R4, R4, R9", mask=1 << 0))
        self.assertEqual(lines[0][:11],
                         "hypermla::cute::twice: a loop of 5 instructions, 1 of them products and".split())
        self.assertEqual(" ".join(lines[1]), "2 @!P1 IADD3 R8, R8, 0x1, RZ waits for 0 LDS.128 R4, [R8] operands read "
                                             "2 instructions and 1 products before")
        self.assertEqual(" ".join(lines[2]), "3 FMUL R4, R4, R9 waits for 0 LDS.128 R4, [R8] result "
                                             "3 instructions and 1 products before")
        self.assertEqual(lines[3][0], "2")
        self.assertEqual(len(lines), 4)

    def test_what_was_asked_for_long_before_is_not_listed(self):
        body = (instruction("LDS R4, [R8]", result=0), *[instruction("HMMA.16816.F32 R24, R56")] * 8,
                instruction("FMUL R4, R4, R9", mask=1))
        self.assertEqual(self.report(*body, options=["--instructions=10"])[1][0], "9")
        self.assertEqual(self.report(*body, options=["--instructions=9"])[1][0], "0")

    def test_the_last_of_several_on_a_scoreboard_counts(self):
        lines = self.report(
            instruction("LDS R4, [R8]", result=0), instruction("HGMMA R24, R56"),
            instruction("LDS R5, [R8+0x4]", result=0), instruction("FMUL R4, R4, R9", mask=1),
            instruction("FMUL R5, R5, R9", mask=1))  # which has nothing left to wait for
        self.assertEqual([" ".join(line[:9]) for line in lines[1:-1]], ["3 FMUL R4, R4, R9 waits for 2 LDS"])

    def test_code_that_a_branch_may_skip_is_left_out(self):
        lines = self.report(
            instruction("HGMMA R24, R56"), instruction("@!P2 BRA `(.L_x_1)"), instruction("LDS R4, [R8]", result=0),
            instruction("FMUL R4, R4, R9", mask=1), ".L_x_1:\n", instruction("S2R R3, SR_TID.X", result=2),
            instruction("LOP3.LUT R3, R3, 0x40, RZ, 0xc0, !PT", mask=1 << 2))
        self.assertIn("2 skipped by branches", " ".join(lines[0]))
        self.assertEqual([line[0] for line in lines[1:]], ["5", "1"])

    def test_a_wait_that_is_written_behind_the_loop_is_no_loop(self):
        listing = self.report(
            instruction("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1]", result=0), instruction("@!P0 BRA `(.L_x_3)", mask=1),
            ".L_x_2:\n", instruction("HGMMA R24, R56"), instruction("@P0 BRA `(.L_x_0)"), ".L_x_3:\n",
            instruction("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1]", result=0), instruction("@P0 BRA `(.L_x_2)", mask=1))
        self.assertEqual([" ".join(line[:6]) for line in listing if "loop" in line],
                         ["hypermla::cute::twice: a loop of 4 instructions,"])

    def test_a_loop_that_copies_is_one_without_the_loop_within_it(self):
        entries = [instruction("LDG.E R5, desc[UR4][R10.64]", result=5), instruction("SEL R4, R4, R9, P0", mask=1 << 5)]
        lines = self.report(
            *entries, instruction("LDGSTS.E.BYPASS.128 [R29], desc[UR4][R8.64]", operands=1), ".L_x_1:\n",
            instruction("LDGSTS.E.BYPASS.128 [R30], desc[UR4][R8.64]", operands=1), instruction("@P1 BRA `(.L_x_1)"))
        self.assertEqual([" ".join(line[1:13]) for line in lines if "loop" in line],
                         ["a loop of 4 instructions, 0 of them products and 1 copies,",
                          "a loop of 2 instructions, 0 of them products and 1 copies,"])
        self.assertEqual(" ".join(lines[1][:10]), "1 SEL R4, R4, R9, P0 waits for 0 LDG.E")

    def test_a_value_that_waits_for_a_newer_load_is_told(self):
        lines = self.report(
            instruction("@!P5 LDG.E.64 R4, desc[UR4][R10.64]", result=5), instruction("HGMMA R24, R56"),
            instruction("SEL R8, R7, R9, P0", mask=1 << 5), instruction("LDG.E.64 R4, desc[UR4][R10.64]", result=5),
            instruction("IADD3 R8, R5, R9, RZ", mask=1 << 5))
        self.assertEqual(["not its own" in " ".join(line) for line in lines[1:-1]], [True, False])

    def test_a_branch_for_lanes_with_other_operands_is_no_loop(self):
        self.assertEqual(self.report(".L_x_1:\n", instruction("UTMALDG.4D [UR8], [UR6]"),
                                     instruction("@P4 BRA.U.ANY `(.L_x_1)"))[0][:11],
                         "hypermla::cute::twice: a loop of 3 instructions, 0 of them products and".split())

    def test_a_loop_without_products_and_copies_is_none(self):
        self.assertEqual(self.report(instruction("LDS R4, [R8]", result=0), instruction("FMUL R4, R4, R9", mask=1)),
                         ["hypermla::cute::twice: no loop with products or copies".split()])

    def test_what_it_cannot_read_it_says(self):
        said, = self.report(status=1, tool="#!/bin/sh\necho 'not an ELF file' >&2\nexit 1\n")
        self.assertEqual(" ".join(said), "waits.py: nvdisasm does not read some.cubin (not an ELF file); give a .cubin")


if __name__ == "__main__":
    unittest.main()
