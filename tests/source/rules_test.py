"""Rules about the sources: includes go down, versions of kernels stand alone, only the command line talks to the
world."""

import pathlib
import re
import unittest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = CHECKOUT / "src/hypermla"
KERNELS = CHECKOUT / "kernels"

# A layer may include those of its own rank and of lower ones.
RANK = {"base": 0, "knowledge": 1, "device": 1, "compile": 2, "roofline": 2, "plan": 3, "tune": 4, "profile": 4,
        "api": 5, "cli": 6}


def files(root, *suffixes):
    found = [path for path in sorted(root.rglob("*")) if path.suffix in suffixes]
    assert found, root
    return found


def includes(path):
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.M)


def layer_of(include):
    parts = include.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == "hypermla" else None


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


class Layers(unittest.TestCase):
    def test_every_directory_is_a_layer(self):
        self.assertEqual({path.name for path in SOURCES.iterdir() if path.is_dir()}, set(RANK))

    def test_includes_go_down(self):
        upward = []
        for path in files(SOURCES, ".h", ".cpp"):
            own = path.relative_to(SOURCES).parts[0]
            for include in includes(path):
                layer = layer_of(include)
                if layer and RANK[layer] > RANK[own] or include == "hypermla/hypermla.h" and RANK[own] < RANK["api"]:
                    upward.append(f"{path.relative_to(CHECKOUT)} includes {include}")
        self.assertEqual(upward, [])

    def test_the_framework_names_no_kernel(self):
        named = [f"{path.relative_to(CHECKOUT)} includes {include}" for path in files(SOURCES, ".h", ".cpp")
                 for include in includes(path)
                 if any((base / include).exists() for base in (KERNELS, KERNELS / "cutile", KERNELS / "cute"))]
        self.assertEqual(named, [])
        designs = "|".join({path.parent.parent.name for path in KERNELS.glob("*/*/*/*/*.cpp")})
        for path in files(SOURCES, ".h", ".cpp"):
            code = re.sub(r'"(?:\\.|[^"\\])*"', "", without_comments(path.read_text()))
            self.assertEqual(re.findall(rf"\b(?:{designs})\w*", code), [], path)

    def test_public_headers_include_only_each_other(self):
        for path in files(CHECKOUT / "include", ".h"):
            for include in includes(path):
                if "/" in include:
                    self.assertTrue((CHECKOUT / "include" / include).exists(), f"{path.name} includes {include}")

    def test_kernels_sit_on_plan(self):
        shared = ("_plan.h", "_maps.h", "_time.h", "_cost.h")  # what the plans of versions share
        for path in files(KERNELS, ".h", ".cuh", ".cpp"):
            for include in includes(path):
                layer = layer_of(include)
                host = path.suffix == ".cpp" or path.name.endswith(shared)
                if include.endswith(shared):
                    self.assertTrue(host, f"{path} is compiled for devices, but includes {include}")
                if layer:
                    self.assertTrue(host, f"{path} is compiled for devices, but includes {include}")
                    self.assertLessEqual(RANK[layer], RANK["plan"], f"{path} includes {include}")

    def test_a_version_never_includes_another(self):
        versions = {path.parent for path in KERNELS.glob("*/*/*/*/*.cpp")}  # some have no kernel of their own
        self.assertTrue(versions)
        self.assertLess({path.parent for path in KERNELS.glob("*/*/*/*/*.cuh")}, versions)
        for path in files(KERNELS, ".h", ".cuh", ".cpp"):
            for include in includes(path):
                for base in (path.parent, KERNELS, KERNELS / "cutile", KERNELS / "cute"):
                    target = base / include
                    if target.exists():
                        other = next((version for version in versions if version in target.resolve().parents),
                                     path.parent)
                        self.assertEqual(other, path.parent, f"{path.relative_to(CHECKOUT)} includes {include}")
                        break


class Library(unittest.TestCase):
    FORBIDDEN = {
        "prints": r"std::(cout|cerr|clog)|\b(printf|puts|fputs|putchar|perror|vprintf)\s*\(|"
                  r"\bfmt::print\b|std::print|\bfprintf\b",
        "exits": r"\b(exit|abort|quick_exit|terminate)\s*\(",
        "reads the environment": r"\b(secure_)?getenv\b",
    }

    def test_only_the_command_line_talks_to_the_world(self):
        talks = []
        for path in [*files(SOURCES, ".h", ".cpp"), *files(KERNELS, ".cpp")]:
            name = path.relative_to(CHECKOUT).as_posix()
            if name.startswith("src/hypermla/cli/") or name == "src/hypermla/api/environment.cpp":
                continue
            text = without_comments(path.read_text())
            talks += [f"{name} {what}: {found[0]}" for what, pattern in self.FORBIDDEN.items()
                      for found in [re.search(pattern, text)] if found]
        self.assertEqual(talks, [])

    def test_the_rule_would_notice(self):
        for line in ("std::cout << 1;", 'fmt::print("x");', "std::exit(1);", 'std::getenv("HOME");'):
            self.assertTrue(any(re.search(pattern, line) for pattern in self.FORBIDDEN.values()), line)


if __name__ == "__main__":
    unittest.main()
