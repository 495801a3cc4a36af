"""The plug-in for vLLM without vLLM: that it imports nothing before it is used, that its methods take what the recorded
versions of vLLM pass (tests/engines/vllm-*.json), and when a step is planned. tests/engines/vllm_test.py runs it in
vLLM's own classes."""

import ast
import importlib
import math
import pathlib
import subprocess
import sys
import tomllib
import types
import unittest
from unittest import mock

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "cli"), str(TESTS / "engines")]
import vllm_interface
from support import BUILD, CHECKOUT

sys.path.insert(0, str(BUILD / "python"))
import hypermla.vllm
from hypermla.compat._queries import ROUNDED_ROWS, takes_strides
from hypermla.vllm import plans

MODULES = {name: ast.parse((CHECKOUT / f"python/hypermla/vllm/{name}.py").read_text())
           for name in vllm_interface.CLASSES}
FUNCTIONS = {of.name: {one.name: one for one in of.body if isinstance(one, ast.FunctionDef)}
             for module in MODULES.values() for of in module.body if isinstance(of, ast.ClassDef)}
GATHER = "gather_and_maybe_dequant_cache"


def complaints(function, passed):
    """What is wrong with a method that a caller gives the parameters `passed`; "name=": perhaps."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args) if one.arg not in ("self", "cls")]
    optional = names[len(names) - len(function.args.defaults):] if function.args.defaults else []
    given = {name.removesuffix("=") for name in passed}
    wrong = [f"does not take {name}" for name in passed
             if not name.endswith("=") and name not in names and not function.args.kwarg]
    return wrong + [f"wants {name}" for name in names if name not in given and name not in optional]


class Interface(unittest.TestCase):
    def test_nothing_is_imported_before_it_is_used(self):
        script = ("import sys, hypermla.vllm; "
                  "print(sorted({'vllm', 'torch'} & {n.partition('.')[0] for n in sys.modules}))")
        done = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(BUILD / "python")}, text=True,
                              capture_output=True)
        self.assertEqual(done.stdout, "[]\n", done.stderr)

    def test_the_entry_point_is_there(self):
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        plugins = project["entry-points"]["vllm.general_plugins"]
        self.assertEqual(sorted(plugins), ["hypermla", "hypermla_sparse"])
        for plugin in plugins.values():
            module, function = plugin.split(":")
            self.assertTrue(callable(getattr(importlib.import_module(module), function)))
        for path in hypermla.vllm.BACKEND, hypermla.vllm.PREFILL_BACKEND, hypermla.vllm.SPARSE_BACKEND:
            module, _, name = path.rpartition(".")
            self.assertIn(name, vllm_interface.CLASSES[module.removeprefix("hypermla.vllm.")])
            self.assertIn(name, FUNCTIONS)

    def test_methods_take_what_recorded_versions_pass(self):
        versions = vllm_interface.recorded()
        self.assertEqual(sorted(versions), ["0.26.0", "0.33.0"])
        for version, recorded in versions.items():
            with self.subTest(version):
                self.assertEqual(recorded["version"], version)
                self.assertEqual(recorded["imports"], vllm_interface.imported())
                self.assertEqual(recorded["fields"], vllm_interface.read_fields())
                made = next(node for node in ast.walk(FUNCTIONS["HyperMLAMetadataBuilder"]["build"])
                            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.metadata_cls")
                given, taken = {one.arg for one in made.keywords}, recorded["methods"].pop("MLACommonMetadata")
                self.assertLessEqual({name for name in taken["__init__"] if not name.endswith("=")}, given)
                self.assertLessEqual(given, {name.removesuffix("=") for name in taken["__init__"]})
                layer = recorded["methods"].pop("MLAAttention")["forward_impl"]
                self.assertEqual(complaints(next(one for one in ast.walk(MODULES["backend"]) if isinstance(
                    one, ast.FunctionDef) and one.name == "forward_impl"), layer), [])
                self.assertEqual(recorded["methods"].pop("ModelConfig"), {"get_num_layers": ["parallel_config"],
                                                                          "get_total_num_hidden_layers": []})
                for name, methods in recorded["methods"].items():
                    ours = FUNCTIONS[name]
                    for method in ours.keys() & methods.keys():
                        self.assertEqual(complaints(ours[method], methods[method]), [], f"{name}.{method}")
                self.assertEqual(self.gathered(), {name.removesuffix("=") for name in recorded["contexts"][GATHER]})
                here = {name.removesuffix("=") for name in recorded["contexts"]["ChunkedContextMetadata"]}
                self.assertTrue(here & {"chunks", "cu_seq_lens"}, here)
                prefill = {name.removesuffix("=") for name in recorded["contexts"]["MLACommonPrefillMetadata"]}
                self.assertLessEqual({"block_table", "query_start_loc", "chunked_context", "prefill_backend"}, prefill)
        every = {method for recorded in versions.values() for method in recorded["methods"]["HyperMLABackend"]}
        self.assertEqual(FUNCTIONS["HyperMLABackend"].keys() - every, set(), "no recorded version has these")

    def gathered(self):
        """What the plug-in gives to vLLM's gather of the tokens of a cache."""
        return {one.arg for node in ast.walk(FUNCTIONS["Pass"]["gather"]) if isinstance(node, ast.Call)
                and ast.unparse(node.func) == f"ops.{GATHER}" for one in node.keywords}

    def test_a_changed_method_is_noticed(self):
        function = ast.parse("def f(self, a, b=1): pass").body[0]
        self.assertEqual(complaints(function, ["a", "b"]), [])
        self.assertEqual(complaints(function, ["a", "c="]), [])
        self.assertEqual(complaints(function, ["a", "c"]), ["does not take c"])
        self.assertEqual(complaints(function, ["b"]), ["wants a"])


class Register(unittest.TestCase):
    """With what stands in for vLLM's registries: enumerations of backends, whose paths are kept here."""

    def setUp(self):
        self.paths, self.said, self.envs = {}, [], types.SimpleNamespace(VLLM_PLUGINS=None)
        paths = self.paths

        class Backend:
            def __init__(self, name):
                self.name = name

            def is_overridden(self):
                return self.name in paths

            def get_path(self):
                return paths[self.name]  # an error, as vLLM's, of CUSTOM before it is registered

        class Backends(type):
            __members__ = {name: Backend(name) for name in ("CUSTOM", *hypermla.vllm.REPLACED)}
            __getitem__ = lambda self, name: self.__members__[name]

        self.backends = Backends("AttentionBackendEnum", (), {"CUSTOM": Backends.__members__["CUSTOM"]})
        prefills = types.SimpleNamespace(CUSTOM=Backend("CUSTOM of prefills"))
        logger = types.SimpleNamespace(warning=lambda *text: self.said.append("warning"),
                                       info=lambda *text: self.said.append("info"))
        stand_ins = {"vllm": types.SimpleNamespace(envs=self.envs),
                     "vllm.logger": types.SimpleNamespace(init_logger=lambda name: logger),
                     "vllm.v1.attention.backends.registry": types.SimpleNamespace(
                         AttentionBackendEnum=self.backends, register_backend=self.put),
                     "vllm.v1.attention.backends.mla.prefill.registry": types.SimpleNamespace(
                         MLAPrefillBackendEnum=prefills, register_mla_prefill_backend=self.put)}
        patch = mock.patch.dict(sys.modules, stand_ins)
        patch.start()
        self.addCleanup(patch.stop)

    def put(self, backend, path):
        if isinstance(backend, str):  # a new one
            self.assertNotIn(backend, self.backends.__members__)
            self.backends.__members__[backend] = None
        self.paths[getattr(backend, "name", backend)] = path

    def test_any_number_of_times(self):
        for _ in range(2):
            hypermla.vllm.register()
        ours = {"CUSTOM": hypermla.vllm.BACKEND, "CUSTOM of prefills": hypermla.vllm.PREFILL_BACKEND}
        self.assertEqual((self.paths, self.said), (ours, []))
        self.backends.register = None  # vLLM 0.33's has it
        for _ in range(2):
            hypermla.vllm.register()
        self.assertEqual(self.paths, ours | {"HYPERMLA": hypermla.vllm.BACKEND})

    def test_another_plug_in_keeps_its_custom(self):
        taken = dict.fromkeys(("CUSTOM", "CUSTOM of prefills"), "another.Backend")
        self.paths.update(taken)
        hypermla.vllm.register()
        self.assertEqual((self.paths, self.said), (taken, ["warning"] * 2))

    def test_sparse_kernels_are_put_in_place_where_they_are_listed(self):
        for self.envs.VLLM_PLUGINS in None, [], ["hypermla"]:
            hypermla.vllm.register_sparse()
            self.assertEqual(self.paths, {})
        self.envs.VLLM_PLUGINS = ["hypermla", "hypermla_sparse"]
        hypermla.vllm.register_sparse()
        self.assertEqual(self.paths, dict.fromkeys(("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"),
                                                   hypermla.vllm.SPARSE_BACKEND))


class Plans(unittest.TestCase):
    def setUp(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("NumPy is not installed")
        self.numpy = numpy
        self.plans = plans.Plans("cpu")
        self.cache = numpy.random.default_rng(1).standard_normal((9, 16, 576)).astype("float16")
        self.q = numpy.random.default_rng(2).standard_normal((3, 2, 576)).astype("float16")
        self.planned = []

    def step(self, *lengths, causal=True):
        integers = lambda *values: self.numpy.array(values, dtype="int32")
        return types.SimpleNamespace(seq_lens=integers(*lengths), query_start_loc=integers(0, 2, 3),
                                     block_table=integers([3, 1, 4], [0, 2, 5]), causal=causal,
                                     capacity=plans.Capacity(requests=2, queries=2, query_tokens=4, tokens=48))

    def attend(self, step):
        return self.plans.attend(step, self.q, self.cache, self.q.dtype, 0.1)

    def watch(self):
        for one in self.plans._planned.values():
            decode, plan = one.decode, one.decode.plan
            decode.plan = lambda *arguments, plan=plan: (self.planned.append(arguments), plan(*arguments))

    def test_one_plan_for_all_layers(self):
        one, other = self.step(40, 17), self.step(30, 0)
        first, lse = self.attend(one)
        self.watch()
        self.assertTrue((self.attend(one)[0] == first).all())
        self.assertEqual(len(self.planned), 0)
        self.assertEqual(self.attend(other)[1][2, 0], -math.inf)
        self.assertEqual(len(self.planned), 1)
        self.assertTrue((self.attend(one)[0] == first).all())  # its plan was another's meanwhile
        self.assertEqual(len(self.planned), 2)

    def test_a_step_is_planned_before_its_layers(self):
        step = self.step(40, 17)
        kind = 2, 16, self.q.dtype, 0.1
        self.plans.plan(step, *kind)
        self.watch()
        self.attend(step)
        self.assertEqual(len(self.planned), 0)
        self.plans.plan(step, *kind)
        self.assertEqual(len(self.planned), 1)

    def test_lengths_that_changed_are_planned_when_that_is_said(self):
        step = self.step(40, 17)
        before = self.attend(step)[1].copy()
        step.seq_lens[1] = 5
        self.assertTrue((self.attend(step)[1] == before).all())
        self.plans.forget()
        self.assertTrue((self.attend(step)[1][2] != before[2]).all())

    def test_a_plan_that_fails_leaves_none(self):
        step = self.step(40, 17)
        self.attend(step)
        bad = self.step(40, 4000)
        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, "lengths"):
                self.attend(bad)
        self.watch()
        self.attend(step)
        self.assertEqual(len(self.planned), 1)

    def test_each_kind_of_layers_has_its_plan(self):
        step, run = self.step(40, 17), lambda scale: self.plans.attend(step, self.q, self.cache, self.q.dtype, scale)[1]
        first, second = run(0.1).copy(), run(0.2).copy()
        self.assertTrue((run(0.1) == first).all() and (second != first).all())
        self.watch()
        self.plans.forget()
        run(0.1), run(0.2)
        self.assertEqual(len(self.planned), 2)

    def test_a_cache_in_fp8(self):
        from hypermla import MlaDecode

        step, numbers = self.step(40, 17), self.numpy.random.default_rng(3)
        cache = numbers.integers(0, 120, (9, 16, 576)).astype("uint8")
        q, one = (self.q.view("uint16") & 0x3fff), self.numpy.full(1, 0.03, "float32")  # small in bfloat16, too
        codes = numbers.integers(0, 120, q.shape).astype("uint8")
        for queries, q_scale in ((q, None), (codes, self.numpy.full(1, 0.02, "float32"))):
            decode = MlaDecode(heads=2, max_requests=2, max_queries=2, max_tokens=48, page=16, scale=0.1, device="cpu",
                               cache_format="fp8_576", fp8_queries=q_scale is not None)
            decode.plan(step.seq_lens, step.query_start_loc)
            expected = decode.run(queries, cache, step.block_table, cache_scale=one, q_scale=q_scale)
            given = self.plans.attend(step, queries, cache, "bfloat16", 0.1, one, q_scale)
            for result, wanted in zip(given, expected):
                self.assertTrue((result == wanted).all())

    def test_drafts_that_see_each_other(self):
        causal, both = self.attend(self.step(40, 17))[1], self.attend(self.step(40, 17, causal=False))[1]
        self.assertTrue((causal[0] < both[0]).all() and (causal[1:] == both[1:]).all())

    def test_shards_go_by_the_lengths_of_whole_requests(self):
        step = self.step(20, 9)  # which this one has of 40 and 17 tokens
        step.dcp_tot_seq_lens = self.numpy.array([40, 17], "int32")
        step.capacity = step.capacity._replace(shards=2, shard=0, interleave=4)
        _, lse = self.attend(step)
        scores = self.q.astype("float32") @ self.cache.reshape(-1, 576).astype("float32").T * 0.1
        # The last two queries of 40 tokens see 39 and 40 of them, of which this shard has none of the last four.
        for row, (pages, count) in enumerate((((3, 1), 20), ((3, 1), 20), ((0, 2), 9))):
            seen = [scores[row, :, pages[token // 16] * 16 + token % 16] for token in range(count)]
            expected = self.numpy.log(sum(self.numpy.exp(self.numpy.float64(score)) for score in seen))
            self.assertTrue((abs(lse[row] - expected) < 1e-3).all())
        # The first query of 33 tokens sees 32 of them, the second another one, which is here.
        step = self.step(17, 9)
        step.dcp_tot_seq_lens = self.numpy.array([33, 17], "int32")
        step.capacity = step.capacity._replace(shards=2, shard=0, interleave=4)
        _, lse = self.attend(step)
        seen = [scores[0, :, (3, 1)[token // 16] * 16 + token % 16] for token in range(16)]
        expected = self.numpy.log(sum(self.numpy.exp(self.numpy.float64(score)) for score in seen))
        self.assertTrue((abs(lse[0] - expected) < 1e-3).all())
        # Of 38 tokens the second of two has 18, the 38th among them; of 17 it has 8.
        step = self.step(0, 0)
        step.dcp_tot_seq_lens = self.numpy.array([38, 17], "int32")
        step.capacity = step.capacity._replace(shards=2, shard=1, interleave=4)
        _, lse = self.attend(step)
        for row, (pages, count) in enumerate((((3, 1), 17), ((3, 1), 18), ((0, 2), 8))):
            seen = [scores[row, :, pages[token // 16] * 16 + token % 16] for token in range(count)]
            expected = self.numpy.log(sum(self.numpy.exp(self.numpy.float64(score)) for score in seen))
            self.assertTrue((abs(lse[row] - expected) < 1e-3).all(), row)

    def test_where_prefixes_are_shared_the_table_is_planned_with(self):
        step = self.step(40, 17)
        kind = 2, 16, self.q.dtype, 0.1
        expected = self.attend(step)[0].copy()
        step.capacity = step.capacity._replace(shared_prefixes=True)
        given = []
        decode = self.plans.decode(step.capacity, True, *kind)
        plan = decode.plan
        decode.plan = lambda *arguments, **named: (given.append(named), plan(*arguments, **named))
        self.plans.plan(step, *kind)
        self.assertTrue((self.attend(step)[0] == expected).all())
        self.assertEqual([list(named) for named in given], [["block_table"]])
        self.assertIs(given[0]["block_table"], step.block_table)
        step.capacity = step.capacity._replace(shards=2)
        with self.assertRaisesRegex(RuntimeError, "shared_prefixes is not supported with shards"):
            self.plans.plan(step, *kind)

    def test_which_configurations_ask_for_an_option(self):
        wanted = "_asked", "_drafted_queries", "_rounds_queries", "FP8"
        name_of = lambda one: getattr(one, "name", "") or getattr(getattr(one, "targets", [None])[0], "id", "")
        found = [one for one in MODULES["backend"].body if name_of(one) in wanted]
        names = {"envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False), "ROUNDED_ROWS": ROUNDED_ROWS}
        exec(compile(ast.Module(found, []), "backend.py", "exec"), names)
        for additional, asked in (({}, False), ({"hypermla_shared_prefixes": True}, True), (object(), False),
                                  ({"hypermla_shared_prefixes": False, "hypermla_fp8_queries": True}, False)):
            config = types.SimpleNamespace(additional_config=additional)
            self.assertIs(names["_asked"](config, "shared_prefixes"), asked)
        yes, no = {"hypermla_fp8_queries": True}, {"hypermla_fp8_queries": False}
        for heads, drafts, cache, additional, invariant, rounded in (
                (128, 0, "fp8", {}, False, True), (64, 0, "fp8_e4m3", object(), False, True),
                (16, 0, "fp8", {}, False, False), (16, 2, "fp8", {}, False, False), (16, 3, "fp8", {}, False, True),
                (128, 0, "auto", {}, False, False), (128, 0, "fp8", no, False, False), (16, 0, "fp8", yes, False, True),
                (128, 0, "fp8", {}, True, False)):
            names["envs"].VLLM_BATCH_INVARIANT = invariant
            drafting = types.SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
            config = types.SimpleNamespace(additional_config=additional, speculative_config=drafting)
            self.assertIs(names["_rounds_queries"](config, heads, cache), rounded, (heads, drafts, cache, additional))

    def test_which_queries_are_read_where_they_lie(self):
        def tensor(heads, *strides):
            return types.SimpleNamespace(data_ptr=None, shape=(3, heads, 512), stride=lambda: (*strides, 1))

        for heads, taken in ((128, True), (64, True), (16, True), (8, True), (20, False), (48, False)):
            rows = tensor(heads, heads * 192, 192)
            self.assertEqual(takes_strides(tensor(heads, 512, 3 * 512), rows), taken)
            self.assertTrue(takes_strides(tensor(heads, heads * 512, 512), rows))


if __name__ == "__main__":
    unittest.main()
