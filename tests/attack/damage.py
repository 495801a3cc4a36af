"""Damaged files: a cache entry, a tuning history, the measured devices, a profile, a record or a table of the sources
is damaged in many ways. A command then works without it, or says one sentence that names it. Nothing wrong is used."""

import json
import math
import os
import random as randomness
import shutil

from world import CHECK, PROFILE, TUNE, Done, environment, expect

WRONG = [None, True, -1, 0, 1e308, -0.5, 2**63, 2**64, "", "text", "\u0000", [], {}, [[]], {"": {}}, [None] * 3]


def some_json(random, text):
    """The file with one of its values replaced, removed, or doubled; text where it is none."""
    value = json.loads(text)
    places = []

    def walk(at):
        for key in range(len(at)) if isinstance(at, list) else list(at) if isinstance(at, dict) else ():
            places.append((at, key))
            walk(at[key])

    walk(value)
    if not places or random.random() < 0.1:
        return json.dumps(random.choice(WRONG))
    for _ in range(random.choice((1, 1, 2, 5))):
        at, key = random.choice(places)
        if random.random() < 0.2 and (isinstance(at, dict) and key in at):
            del at[key]
        else:
            at[key] = random.choice(WRONG)
    return json.dumps(value)


def harm(random, path):
    """Damages a file, or what a file is; returns how."""
    whole = path.read_bytes() if path.is_file() else b""
    kinds = [
        "cut", "flip", "empty", "noise", "hole", "doubled", "pipe", "directory", "dangling", "loop", "huge", "deep",
        "missing", "mode", "zeros"
    ]
    if path.suffix == ".json":
        kinds += ["value"] * 8
    kind = random.choice(kinds)
    place = random.randrange(len(whole)) if whole else 0
    contents = {
        "cut": lambda: whole[:place], "empty": lambda: b"",
        "noise": lambda: random.randbytes(random.randrange(1, 5000)),
        "hole": lambda: whole[:place] + whole[place + random.randrange(1, 100):], "doubled": lambda: whole * 2,
        "huge": lambda: whole[:place] + b" " * (30 << 20) + whole[place:], "zeros": lambda: bytes(len(whole)),
        "deep": lambda: random.choice((b'{"a":' * 100000 + b"1" + b"}" * 100000, b"[" * 100000 + b"]" * 100000)),
        "value": lambda: some_json(random, whole).encode(errors="surrogatepass")
    }
    if kind == "flip":
        bits = bytearray(whole)
        for _ in range(random.choice((1, 1, 3, 20))):
            if bits:
                bits[random.randrange(len(bits))] ^= 1 << random.randrange(8)
        path.write_bytes(bits)
    elif kind in contents:
        path.write_bytes(contents[kind]())
    elif kind == "mode":
        path.chmod(random.choice((0o000, 0o666, 0o622, 0o777, 0o200)))
        if os.geteuid() == 0 and random.random() < 0.5:
            os.chown(path, 12345, 12345)
    else:
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "dangling":
            path.symlink_to("nowhere")
        elif kind == "loop":
            path.symlink_to(path.name)
    return kind


def value_of(path):
    """What a strict reader makes of a JSON file; None: nothing."""
    def no(name):
        raise ValueError(name)

    if not path.is_file():  # a pipe would wait
        return None
    try:
        text = path.read_bytes().decode()
        return json.loads(text, parse_constant=no)
    except RecursionError:  # of a list or an object, deep in each other
        return [] if text[0] == "[" else {"": None}
    except (OSError, ValueError):
        return None


class Attack:
    def __init__(self, seed, index, directory):
        self.random, self.directory = randomness.Random(f"{seed}:{index}"), directory
        self.pristine, self.own = directory / "pristine", directory / "file"
        shutil.rmtree(self.own, ignore_errors=True)
        shutil.copytree(self.pristine, self.own, symlinks=True, ignore=shutil.ignore_patterns("root"))
        for folder in [self.own / "cache", *(self.own / "cache").rglob("*")]:
            folder.chmod(0o700 if folder.is_dir() else 0o600)
        self.cache = self.own / "cache"

    def command(self, *words, **more):
        return Done(list(words), environment(self.directory, self.cache, **more), self.own)

    def expect_success(self, done, *others):
        expect(done.status in (0, *others) and "json.exception" not in done.err, str(done))
        return done

    def entry(self):
        """Of the cache: compiled again."""
        before = self.command(*CHECK).out
        files = [path for path in (self.cache / "kernels").rglob("*") if path.is_file()]
        libraries = {path: path.read_bytes() for path in files if path.name == "kernel.so"}
        target = self.random.choice(files)
        self.how = f"{target.name}: {harm(self.random, target)}"
        for _ in range(2):
            done = self.expect_success(self.command(*CHECK))
            expect(done.out == before, f"another output: {done}")
        self.expect_success(self.command(*TUNE, "--retune"))  # takes all entries
        for path, library in libraries.items():
            expect(path.read_bytes() == library, "a damaged library is an entry")

    def place(self):
        """The cache itself, or a directory in it."""
        target = self.random.choice([self.cache, self.cache / "kernels", self.cache / "kernel-autotune"])
        self.how = self.random.choice(("file", "mode", "loop", "pipe", "owner"))
        if self.how == "mode":
            target.chmod(self.random.choice((0o777, 0o770, 0o000)))
        elif self.how == "owner":
            if os.geteuid() == 0:
                os.chown(target, 12345, 12345)
        else:
            shutil.rmtree(target)
            {"file": target.touch, "loop": lambda: target.symlink_to(target.name),
             "pipe": lambda: os.mkfifo(target)}[self.how]()
        self.how += f" {target.name}"
        done = self.command(*self.random.choice((CHECK, TUNE)))
        if done.status:
            done.expect_sentence(str(self.cache))

    def history(self):
        """Of tuning: what can be read is used, the rest is measured again."""
        target = next((self.cache / "kernel-autotune").rglob("autotuning.json"))
        self.how = f"{target.name}: {harm(self.random, target)}"
        done = self.command(*TUNE)
        if done.status == 2:
            return done.expect_sentence(str(target))
        self.expect_success(done)
        expect("check     passed" in done.out, str(done))
        known = value_of(target)
        expect(isinstance(known, list), f"{target.name} was not mended")

    def overlay(self):
        """Measured devices: what is malformed is left out as a whole, and a sentence says so."""
        words = self.random.choice((CHECK, ["predict", "flash_attention", "--b=4"], ["choose", "--b=4", "--s=16"],
                                    ["device", "--device=cpu"], ["choose", "--device_name=NVIDIA H200"]))
        without = self.command(*words)
        target = self.cache / "devices.json"
        shutil.copy(self.own / "devices.json", target)
        self.how = f"{target.name}: {harm(self.random, target)}"
        done = self.command(*words)
        if done.status == 2:  # an entry of the present device that lacks what is asked for
            return done.expect_sentence(target.name)
        self.expect_success(done)
        expect("nan" not in done.out and "inf " not in done.out, f"{done} {done.out}")
        if done.said:
            expect(str(target) in done.said[0] and len(done.said) == 1 and done.out == without.out, str(done))
        else:
            expect(not os.path.lexists(target) or isinstance(value_of(target), dict) or target.is_symlink(),
                   f"{done} used {target}")

    def profile(self):
        """Of a run: compared, or refused."""
        target = self.own / "profile/profile.json"
        self.how = f"{target.name}: {harm(self.random, target)}"
        runs = [self.pristine / "profile", self.random.choice((target, target.parent))]
        self.random.shuffle(runs)
        done = self.command("compare", *runs, *self.random.choice(([], ["--json"])))
        if done.status == 2:  # what is wrong of both together, or of a time, is said of `run A`, `run B` or `the runs`
            return done.expect_sentence(str(self.own / "profile") if " run" not in done.err else " run")
        self.expect_success(done, 1, 3)
        found = value_of(target)
        expect(isinstance(found, dict) and "nan" not in done.out and "inf" not in done.out, f"{done} {done.out}")
        for times in found["timing"].values():
            expect(times is None or 0 < times["median_us"] < math.inf, f"{done} took {times}")

    def record(self):
        """Of verification: read, or refused."""
        target = self.own / "record.json"
        self.how = f"{target.name}: {harm(self.random, target)}"
        words = ["--records_only"] if self.random.random() < 0.9 else ["prefix_decompression", "--device=cpu"]
        done = self.command("verify", *words, f"--record={target}")
        if done.status == 2:
            return done.expect_sentence(str(target))
        self.expect_success(done, 1)
        known = value_of(target)
        expect(isinstance(known, dict) or not os.path.exists(target), f"{done} used {target}")
        expect(done.status == 1 or known, str(done))

    def table(self):
        """Of the sources: devices, rules and knowledge cards."""
        root = self.own / "root"
        shutil.copytree(self.pristine / "root", root, symlinks=True)
        target = root / self.random.choice(("conf/devices.json", "conf/profile_rules.json",
                                            "docs/knowledge/optimizations/split-kv.md"))
        self.how = f"{target.name}: {harm(self.random, target)}"
        out = self.own / "out"
        words = self.random.choice((["choose", "--b=4"], ["predict", "flash_mla"], [*PROFILE, f"--out_dir={out}"]))
        done = self.command(*words, HYPERMLA_ROOT=root)
        if done.status == 2:
            return done.expect_sentence(target.name)
        self.expect_success(done, 1)
        expect(value_of(target) is not None or target.name != "devices.json", f"{done} used {target}")

    def label(self):
        """Bytes that a shell lets through."""
        letters = *range(1, 256), *[0xC3, 0x28, 34, 92, 10, 60, 124] * 20
        label = bytes(self.random.choices(letters, k=self.random.randrange(1, 30)))
        self.how = repr(label)
        done = self.command(*PROFILE, b"--label=" + label, f"--out_dir={self.own}/out")
        if done.status == 2:
            return done.expect_sentence("label")
        self.expect_success(done)
        expect(value_of(self.own / "out/profile.json")["label"].encode() == label, f"{done} kept another label")


WEIGHTS = {"entry": 6, "history": 4, "overlay": 3, "profile": 4, "record": 2, "table": 2, "label": 1, "place": 1}


def run(seed, index, directory):
    attack = Attack(seed, index, directory)
    (kind, ) = attack.random.choices([*WEIGHTS], WEIGHTS.values())
    attack.how = ""
    try:
        getattr(attack, kind)()
    except Exception as error:
        raise type(error)(f"{kind}, {attack.how}: {error}") from error
