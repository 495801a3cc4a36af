"""Rules about the documents: links lead somewhere, pages are short, the index lists every page; their lines, and those
of the sources, fit a screen."""

import pathlib
import re
import subprocess
import tempfile
import unittest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS = 120
SOURCES = ("CMakeLists.txt", "cmake", "examples", "hypermla", "include", "kernels", "pyproject.toml", "python",
           "requirements.txt", "scripts", "src", "test", "tests")
NOT_BROKEN = (".json", ".svg", ".pyc")  # JSON cannot break a string, and programs made the others
PAGE_LINES = 80  # of pages below docs/; a log in docs/log/ may be longer, and so may the index of the knowledge cards
KNOWLEDGE = "docs/knowledge/README.md"
MENTION = re.compile(r"\bdocs/[\w/.-]+\.(?:md|svg)\b")


def documents(root):
    """All pages, but for those of builds, runs and environments."""
    found = [path for path in sorted(root.rglob("*.md"))
             if not re.match(r"(\.|build|out/)", path.relative_to(root).as_posix())]
    assert found, root
    return found


def without_code(text):
    """The text of a page without its blocks and spans of code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`|^    .*$", "", text, flags=re.M)


def anchors(text):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).lower().replace(" ", "-")
            for heading in headings}


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", without_code(text))


def broken_links(root):
    broken = []
    for page in documents(root):
        for link in links(page.read_text()):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or anchor and anchor not in anchors(target.read_text()):
                broken.append(f"{page.relative_to(root)}: {link}")
    return broken


def long_lines(root):
    sources = [path for name in SOURCES for path in sorted([root / name, *(root / name).rglob("*")])
               if path.is_file() and path.suffix not in (".md", *NOT_BROKEN)]
    return [f"{page.relative_to(root)}:{number}: {len(line)} columns" for page in documents(root) + sources
            for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > COLUMNS]


def long_pages(root):
    return [f"{page.relative_to(root)}: {lines} lines" for page in documents(root / "docs")
            for lines in [len(page.read_text().splitlines())]
            if lines > PAGE_LINES and page.parent != root / "docs/log" and page != root / KNOWLEDGE]


def files_named(text):
    """The programs that a page names, `a[_b].py` as a.py and a_b.py."""
    program = r"(?<![\w/.*<-])((?:[\w.]+/)*)(\w+)(?:\[([\w,]+)\])?(\.(?:py|sh|cu))\b"
    for place, name, more, end in re.findall(program, text):
        for variant in ("", *more.split(",")) if more else ("",):
            yield f"{place}{name}{variant}{end}"


def unknown_commands(text):
    """What a page calls that is not there: commands of the program and theirs, tests, and programs by their paths or,
    below tests/, by their names."""
    cli = CHECKOUT / "src/hypermla/cli"
    known = {name: set() for name in re.findall(r'^    \{"([\w-]+)", "', (cli / "main.cpp").read_text(), re.M)}
    for path in cli.glob("*_command.cpp"):
        found = re.search(r'run_subcommand\("(\w+)",(.*?)words\);', path.read_text(), re.S)
        if found:
            known[found[1]] = set(re.findall(r'\{"(\w+)", "', found[2]))
    for command, word in re.findall(r"(?:\./|`)hypermla ([a-z][\w-]*)(?: ([a-z]\w*))?", text):
        if command not in known:
            yield f"hypermla {command}"
        elif word and known[command] and word not in known[command]:
            yield f"hypermla {command} {word}"
    tests = CHECKOUT / "tests"
    names = {f"{path.parent.name}.{path.stem.removesuffix('_test')}" for path in tests.glob("*/*_test.py")}
    names |= {f"{path.parent.name}.{suite}.{name}" for path in tests.glob("*/*_test.cpp")
              for suite, name in re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", path.read_text(), re.M)}
    names |= set(re.findall(r"add_test\(NAME ([\w.]+)", (tests / "CMakeLists.txt").read_text()))
    for wanted in re.findall(r"\./test '?([^\s`']+)", text):
        flag = wanted.startswith("-") and f"\n  {wanted})" in (CHECKOUT / "test").read_text()
        if not flag and not any(re.search(wanted, name) for name in names):
            yield f"./test {wanted}"
    for name in files_named(text):
        if not (CHECKOUT / name).exists() and ("/" in name or not any(tests.glob(f"*/{name}"))):
            yield name


def unlisted_pages(root):
    indexes = [path for path in (root / "docs/index.md", root / KNOWLEDGE) if path.exists()]
    listed = {(index.parent / link.partition("#")[0]).resolve() for index in indexes
              for link in links(index.read_text())}
    return [str(page.relative_to(root)) for page in documents(root / "docs")
            if page != indexes[0] and page.resolve() not in listed]


class Documents(unittest.TestCase):
    def tracked(self):
        listed = subprocess.run(["git", "ls-files"], cwd=CHECKOUT, text=True, capture_output=True)
        if listed.returncode:
            self.skipTest("no repository here")
        return listed.stdout.splitlines()

    def test_links_lead_somewhere(self):
        self.assertEqual(broken_links(CHECKOUT), [])

    def test_lines_fit_a_screen(self):
        self.assertEqual(long_lines(CHECKOUT), [])

    def test_files_end_with_a_line(self):
        files = [CHECKOUT / name for name in self.tracked() if not name.startswith("results/")]
        self.assertEqual([str(path) for path in files if path.is_file() and path.stat().st_size
                          and not path.read_bytes().endswith(b"\n")], [])

    def test_the_layout_names_every_folder(self):
        """Those at the top, and one below where they differ in kind."""
        agents = (CHECKOUT / "AGENTS.md").read_text()
        layout = agents[agents.index("## Layout"):agents.index("Layers; an include")]
        parents = ("", "docs", "examples", "kernels", "kernels/cute", "kernels/cutile", "tests")
        folders = {folder for name in self.tracked() for folder in pathlib.PurePath(name).parents
                   if str(folder) != "." and folder.parent in map(pathlib.PurePath, parents)}
        self.assertGreater(len(folders), 30)
        named = set(re.findall(r"[\w.]+", layout))
        self.assertEqual(sorted(str(folder) for folder in folders if folder.name not in named), [])

    def test_every_environment_variable_has_its_line(self):
        page = (CHECKOUT / "docs/environment.md").read_text()
        patterns = {"src": r'(?:variable|getenv)\("(\w+)"\)', "scripts": r"\$\{(HYPERMLA_\w+|CXX):",
                    "tests": r'environ(?:\.get|\.setdefault)?[\[(]"(\w+)"'}
        names = {name for folder, pattern in patterns.items() for path in (CHECKOUT / folder).rglob("*.*")
                 if path.suffix in (".cpp", ".h", ".sh", ".py") for name in re.findall(pattern, path.read_text())}
        self.assertIn("HYPERMLA_CACHE_DIR", names)
        self.assertEqual([name for name in sorted(names) if f"`{name}`" not in page], [])

    def test_pages_are_short(self):
        self.assertEqual(long_pages(CHECKOUT), [])

    def test_the_index_lists_every_page(self):
        self.assertEqual(unlisted_pages(CHECKOUT), [])

    def test_pages_that_sources_name_exist(self):
        missing = []
        for folder in ("src", "kernels", "include", "python", "tests", "scripts", "conf", "examples"):
            for path in sorted((CHECKOUT / folder).rglob("*")):
                if path.is_file() and path != pathlib.Path(__file__).resolve() and path.suffix != ".pyc":
                    for name in MENTION.findall(path.read_text(errors="ignore")):
                        if not (CHECKOUT / name).exists():
                            missing.append(f"{path.relative_to(CHECKOUT)}: {name}")
        self.assertEqual(missing, [])

    def test_commands_that_pages_name_exist(self):
        """Of AGENTS.md, all; other pages, which also name files of other projects, may call the program."""
        agents = (CHECKOUT / "AGENTS.md").read_text()
        self.assertEqual(list(unknown_commands(agents)), [])
        self.assertGreater(len(list(files_named(agents))), 15)
        for page in documents(CHECKOUT):
            unknown = unknown_commands(page.read_text())
            self.assertEqual([one for one in unknown if one.startswith("hypermla ")], [], page)
        page = ("    ./hypermla list\n    ./hypermla compare a b\n    ./hypermla kb mach <run>\n"
                "`hypermla devlog remove`\n    ./test 'unit.Gone'\n    ./test 'unit.Roofline'\n    ./test --engine\n"
                "    ./test --engines\nscripts/gone.sh and scripts/waits.py\n"
                "`bench_mla_var6_plus[_v3,_v7].py`, `bench_gone.py`\n")
        self.assertEqual(list(unknown_commands(page)), [
            "hypermla list", "hypermla kb mach", "hypermla devlog remove", "./test unit.Gone", "./test --engine",
            "scripts/gone.sh", "bench_mla_var6_plus_v7.py", "bench_gone.py"])

    def test_the_steps_of_an_engine_are_those_that_run(self):
        page = (CHECKOUT / "docs/serving.md").read_text()
        for name, language, first in (("python/decode.py", "python", "import"), ("cpp/decode.cpp", "cpp", "#include")):
            code = (CHECKOUT / "examples" / name).read_text()
            code = code[code.index(f"\n{first} ") + 1:]
            self.assertIn(f"```{language}\n{code}```", page, f"examples/{name} is not what docs/serving.md shows")
            self.assertLessEqual(len(code.splitlines()), 30)

    def test_the_rules_would_notice(self):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            (root / "docs/log").mkdir(parents=True)
            (root / "docs/index.md").write_text(
                "# Index\n[a](page.md) [b](page.md#here) [c](page.md#gone) [d](gone.md)\n")
            (root / "docs/page.md").write_text("## Here\n" + "x" * 121 + "\n\n" * 80)
            (root / "docs/log/page.md").write_text("x\n" * 100)
            (root / "tests").mkdir()
            (root / "tests/recorded.json").write_text("x" * 121)
            for name in ("CMakeLists.txt", "hypermla", "tests/CMakeLists.txt", "tests/a.cu"):
                (root / name).write_text("x" * 120 + "\n" + "x" * 121)
            self.assertEqual(broken_links(root), ["docs/index.md: page.md#gone", "docs/index.md: gone.md"])
            self.assertEqual(long_lines(root), [
                f"{name}:2: 121 columns"
                for name in ("docs/page.md", "CMakeLists.txt", "hypermla", "tests/CMakeLists.txt", "tests/a.cu")])
            self.assertEqual(long_pages(root), ["docs/page.md: 161 lines"])
            self.assertEqual(unlisted_pages(root), ["docs/log/page.md"])


if __name__ == "__main__":
    unittest.main()
