"""The scripts that lock clocks, with --dry-run and a replacement for nvidia-smi, so no clock changes."""

import os
import subprocess
import unittest

from support import CHECKOUT, CommandCase


class Clocks(CommandCase):
    def script(self, name, *arguments, gpu=None):
        """Runs a script with an nvidia-smi that answers only the name of a GPU and records every other call."""
        tools = self.directory / "bin"
        tools.mkdir(exist_ok=True)
        self.calls = self.directory / "calls"
        if gpu:
            (tools / "nvidia-smi").write_text(
                f'#!/bin/sh\n[ "$1" = --query-gpu=name ] && {{ echo "{gpu}"; exit; }}\necho "$@" >> {self.calls}\n'
            )
            (tools / "nvidia-smi").chmod(0o755)
        environment = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin",
                       "HYPERMLA_CACHE_DIR": str(self.directory / "cache")}
        return subprocess.run([CHECKOUT / "scripts" / name, *arguments], env=environment, capture_output=True,
                              text=True, timeout=60)

    def test_each_device_has_its_clocks(self):
        for gpu, sm, memory in (("NVIDIA GeForce RTX 5090", 2407, 14001), ("NVIDIA H200", 1350, 3201)):
            done = self.script("lock-gpu-clock.sh", "--dry-run", gpu=gpu)
            self.assertEqual(done.returncode, 0, done)
            self.assertEqual(
                done.stdout.splitlines(),
                [
                    "nvidia-smi --persistence-mode=1",
                    f"nvidia-smi --lock-gpu-clocks={sm},{sm}",
                    f"nvidia-smi --lock-memory-clocks={memory},{memory}",
                    f'write {{"sm_MHz": {sm}, "memory_MHz": {memory}}} to {self.directory}/cache/locked-clocks.json',
                ],
            )
            self.assertFalse(self.calls.exists(), "a dry run must change nothing")
            self.assertFalse((self.directory / "cache").exists())

    def test_reset(self):
        done = self.script("reset-gpu-clock.sh", "--dry-run", gpu="NVIDIA H200")
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(done.stdout.splitlines()[:2],
                         ["nvidia-smi --reset-gpu-clocks", "nvidia-smi --reset-memory-clocks"])
        self.assertFalse(self.calls.exists())

    def test_without_nvidia_smi(self):
        for name in ("lock-gpu-clock.sh", "h200-lock-gpu-clock.sh", "rtx5090-lock-gpu-clock.sh", "reset-gpu-clock.sh"):
            done = self.script(name, gpu=None)
            self.assertEqual((done.returncode, done.stdout, done.stderr),
                             (2, "", f"{name}: there is no nvidia-smi here; run this on the machine of the GPU\n"))

    def test_refusals(self):
        for arguments, gpu, words in (
            (["--dry-run"], "NVIDIA A100", "no clocks are known for 'NVIDIA A100'"),
            (["--force"], "NVIDIA H200", "unknown option '--force'"),
        ):
            done = self.script("lock-gpu-clock.sh", *arguments, gpu=gpu)
            self.assertEqual(done.returncode, 2, done)
            self.assertIn(words, done.stderr)
            self.assertFalse(self.calls.exists())


if __name__ == "__main__":
    unittest.main()
