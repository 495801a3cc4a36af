"""The plug-in for SGLang without SGLang: that it imports nothing before it is used, and that what it imports and
overrides is as tests/engines/sglang-*.json records it. tests/engines/sglang_test.py runs it in SGLang's own classes."""

import ast
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib
import types
import unittest
from unittest import mock

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "cli"), str(TESTS / "engines")]
import bench_sglang
import sglang_interface
from support import BUILD, CHECKOUT

sys.path.insert(0, str(BUILD / "python"))
import hypermla.sglang

SOURCES = [CHECKOUT / "python/hypermla/sglang" / name
           for name in ("__init__.py", "backend.py", "sparse.py", "prefill.py")]
RECORDS = sglang_interface.recorded()
REQUESTS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs"
SPARSE = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"


class Interface(unittest.TestCase):
    def test_two_versions_are_recorded(self):
        self.assertEqual({name: record["version"] for name, record in RECORDS.items()},
                         {version: version for version in ("0.5.17", "0.5.23")})

    def test_what_is_imported_is_recorded(self):
        def imported(nodes):
            imports = [node for top in nodes for node in ast.walk(top)
                       if isinstance(node, ast.ImportFrom) and node.module.startswith("sglang.")]
            return {f"{node.module}.{name.name}" for node in imports for name in node.names}

        nodes = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text()))]
        either = [(imported(node.body), imported(node.handlers)) for node in nodes
                  if isinstance(node, ast.Try) and imported(node.handlers)]
        always = imported(nodes) - {name for pair in either for names in pair for name in names}
        self.assertGreater(len(always), 8)
        self.assertEqual(len(either), 1)
        for version, record in RECORDS.items():
            missing = lambda names, uses=record["uses"]: [
                name for name in names if not any(used == name or used.startswith(name + ".") for used in uses)]
            self.assertEqual(missing(always), [], version)
            self.assertTrue(all(not missing(first) or not missing(second) for first, second in either), version)

    def test_what_is_overridden_takes_the_same(self):
        """Parameters of the base's method come first, under the same names; what is added has defaults."""
        bases = {"HyperMlaBackend": "FlashMLABackend", "HyperMlaMultiStepDraftBackend": "FlashMLAMultiStepDraftBackend"}
        checked = set()
        for node in ast.parse(SOURCES[1].read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name not in bases:
                continue
            for method in (one for one in node.body if isinstance(one, ast.FunctionDef)):
                name = f"sglang.srt.layers.attention.flashmla_backend.{bases[node.name]}.{method.name}"
                own = [argument.arg for argument in method.args.args]
                for version, record in RECORDS.items():
                    base = record["uses"].get(name)
                    if base is None or method.name == "__init__":  # SGLang makes ours by our own functions
                        continue
                    checked.add(method.name)
                    self.assertEqual(own[:len(base)], base, (version, method.name))
                    self.assertGreaterEqual(len(method.args.defaults), len(own) - len(base), (version, method.name))
        self.assertEqual(checked, {"init_forward_metadata", "init_forward_metadata_out_graph", "init_cuda_graph_state",
                                   "init_mha_chunk_metadata", "forward_decode", "forward_extend", "common_template"})

    def test_what_stands_around_others_takes_the_same(self):
        """What is named comes first."""
        functions = {node.name.removeprefix("forward_"): node.args
                     for node in ast.parse(SOURCES[2].read_text()).body if isinstance(node, ast.FunctionDef)}
        for version, record in RECORDS.items():
            for method in ("_forward_flashmla_sparse", "_forward_flashmla_kv", "_forward_fa3", "forward_decode",
                           "_compute_flashmla_metadata"):
                ours = functions[method.lstrip("_").removeprefix("forward_")]
                given = record["uses"][f"{SPARSE}.{method}"]
                own = [argument.arg for argument in ours.args][1:]
                self.assertEqual(own, given[:len(own)], (version, method))
                self.assertTrue(len(own) == len(given) or ours.kwarg, (version, method))

    def test_the_hooks_take_what_the_functions_are_given(self):
        hooks = {node.name: ([argument.arg for argument in node.args.args][1:], node.args.kwarg)
                 for node in ast.parse(SOURCES[0].read_text()).body if isinstance(node, ast.FunctionDef)}
        (own, others), (of_pages, _) = hooks["_add_to_drafts"], hooks["_page_size"]
        of_requests, _ = hooks["_max_num_reqs"]
        for version, record in RECORDS.items():
            given = record["uses"]["sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"][1:]
            self.assertEqual(own, given[:len(own)], version)
            self.assertTrue(len(own) == len(given) or others, version)
            self.assertEqual(of_pages, record["uses"]["sglang.srt.arg_groups.overrides._page_size_default"], version)
            self.assertEqual(of_requests[1:], record["uses"][REQUESTS][1:], version)  # behind what it is a method of

    def test_pages_have_64_tokens_where_none_are_named(self):
        script = """if True:
            from types import SimpleNamespace as View
            from hypermla.sglang import _page_size
            for view in (View(page_size=None, attention_backend="hypermla", decode_attention_backend=None),
                         View(page_size=None, attention_backend=None, decode_attention_backend="hypermla"),
                         View(page_size=1, attention_backend="hypermla", decode_attention_backend=None),
                         View(page_size=None, attention_backend="fa3", decode_attention_backend=None),
                         View(page_size=None, attention_backend="hypermla", decode_attention_backend="fa3"),
                         View(page_size=None, attention_backend="hypermla", decode_attention_backend=None,
                              uses_mamba_radix_cache=False, mamba_radix_cache_strategy="no_buffer"),
                         View(page_size=None, attention_backend="hypermla", decode_attention_backend=None,
                              uses_mamba_radix_cache=True),
                         View(page_size=None, attention_backend="hypermla", decode_attention_backend=None,
                              uses_mamba_radix_cache=True, mamba_radix_cache_strategy="no_buffer"),
                         View(page_size=None, attention_backend="hypermla", decode_attention_backend=None,
                              uses_mamba_radix_cache=True, mamba_radix_cache_strategy="extra_buffer")):
                print(_page_size(lambda view: "as ever", view))"""
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                              text=True, capture_output=True, check=False, timeout=120)
        self.assertEqual((done.stdout.splitlines(), done.stderr),
                         (["{'page_size': 64}", "{'page_size': 64}", "as ever", "as ever", "as ever",
                           "{'page_size': 64}", "{'page_size': 64}", "as ever", "{'page_size': 64}"], ""))

    def test_as_many_requests_run_as_a_plan_takes(self):
        for backend, given, taken in (("hypermla", 4096, 2048), ("hypermla", 2049, 2048), ("hypermla", 48, 48),
                                      ("fa3", 4096, 4096)):
            flags = types.SimpleNamespace(attention_backend=None, decode_attention_backend=backend)
            its = types.SimpleNamespace(server_args=flags)
            default = lambda configurator, tokens: given if (configurator, tokens) == (its, 7) else None
            with self.assertLogs(hypermla.sglang.__name__) if given != taken else self.assertNoLogs():
                self.assertEqual(hypermla.sglang._max_num_reqs(default, its, 7), taken)

    def test_drafts_know_the_backend(self):
        class Factory:
            draft_model_runner, topk, speculative_num_steps = "runner", 1, 4
            _create_flashmla_decode_backend, _create_flashmla_prefill_backend = lambda self: 1, lambda self: 2
            _create_backend = lambda self, name, backends, template: None

        class Newer(Factory):
            _create_backend = lambda self, name, backends, template, stamps_children=False: None

        made = types.SimpleNamespace(HyperMlaBackend=lambda *given: ("one", *given),
                                     HyperMlaMultiStepDraftBackend=lambda *given: ("steps", *given))
        with mock.patch.dict(sys.modules, {"hypermla.sglang.backend": made}):
            for factory, pairs in (Factory(), False), (Newer(), True):
                for of, backend in ((factory._create_flashmla_decode_backend, ("steps", "runner", 1, 4)),
                                    (factory._create_flashmla_prefill_backend, ("one", "runner"))):
                    known = {"flashmla": of}
                    self.assertEqual(hypermla.sglang._add_to_drafts(factory, "a", known, "b", more=1),
                                     ((factory, "a", known, "b"), {"more": 1}))
                    self.assertEqual(known["hypermla"](), ("hypermla", backend) if pairs else backend)
                known = {}
                hypermla.sglang._add_to_drafts(factory, "a", known, "b")
                self.assertEqual(known, {})

    def test_the_entry_point_is_there(self):
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        self.assertEqual(project["entry-points"]["sglang.srt.plugins"],
                         {"hypermla": "hypermla.sglang:register", "hypermla_sparse": "hypermla.sglang:register_sparse"})

    def test_nothing_is_imported_before_it_is_used(self):
        script = "import sys, hypermla.sglang; print({'torch', 'sglang', 'numpy'} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                              text=True, capture_output=True, check=False, timeout=120)
        self.assertEqual((done.stdout, done.stderr), ("set()\n", ""))

    def test_the_benchmark_finds_what_it_shares_with_that_of_vllm(self):
        script = "print(b.is_attention('flash_mla'), b.is_attention('set_mla_kv_buffer'))"
        self.assertEqual(self.with_the_benchmark(script), ("True False\n", ""))

    def test_its_record_names_no_files_of_the_machine_and_holds_no_texts(self):
        script = """results = [{"what": "texts", "texts": []},
                              {"what": "decode", "error": "no such file: '/root/a/b.so'"},
                              {"what": "failed", "said": ["Error: ~/x/y.py:3", "heads/queries"]}]
record = b.record_of(b.parse(["--record=/root/r.json", "--work=/root/w"]), results)
print(record["results"], "/root" in str(record), len(results), "/root" in str(results))"""
        kept = [{"what": "decode", "error": "no such file: '<path>'"},
                {"what": "failed", "said": ["Error: <path>:3", "heads/queries"]}]
        self.assertEqual(self.with_the_benchmark(script), (f"{kept} False 3 True\n", ""))

    def with_the_benchmark(self, script):
        done = subprocess.run([sys.executable, "-c", f"import bench_sglang as b\n{script}"], text=True, timeout=120,
                              env={**os.environ, "PYTHONPATH": str(TESTS / "engines")}, capture_output=True,
                              check=False)
        return done.stdout, done.stderr


class Prompts(unittest.TestCase):
    """The benchmark's steps of prompts, with what stands in for SGLang's scheduler and its model."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.steps = os.path.join(scratch.name, "a.steps")
        self.watch = bench_sglang._Watch(self.steps)

    def test_an_engine_is_named_by_what_it_has(self):
        at = bench_sglang.parse(["--engines", "fa3/1", "hypermla/64/3", "hypermla/64/0/breakable"])
        self.assertEqual([kind.named(16) for kind in bench_sglang.kinds_of(at)],
                         [{"backend": "fa3", "page": 1, "heads": 16},
                          {"backend": "hypermla", "page": 64, "drafts": 3, "heads": 16},
                          {"backend": "hypermla", "page": 64, "graphs": "breakable", "heads": 16}])

    def test_both_forms_are_measured_behind_a_context(self):
        at = bench_sglang.parse("--new 512 --contexts 0 8192 --batches 1 --engines fa3/64 fa3/64/0/breakable".split())
        shapes, kinds = bench_sglang.shapes_of(at), bench_sglang.kinds_of(at)
        self.assertEqual([(shape.context, shape.new) for shape in shapes], [(8192, 512), (0, 512)])
        self.assertEqual([[bench_sglang.forms_of(at, kind, shape) for shape in shapes] for kind in kinds],
                         [[["decompressed", "absorbed"], ["decompressed"]], [["chosen"], ["chosen"]]])

    def test_requests_of_a_step_wait_for_each_other(self):
        scheduler, seen = types.SimpleNamespace(waiting_queue=["a"]), []

        def choose(of, more):
            seen.append(list(of.waiting_queue))
            return more

        self.assertEqual(self.watch.choice(choose, scheduler, 5), 5)
        bench_sglang.ask(self.steps, requests=2, threshold=None)
        self.assertEqual(self.watch.choice(choose, scheduler, 6), 6)
        self.assertEqual(scheduler.waiting_queue, ["a"])
        scheduler.waiting_queue.append("b")
        self.watch.choice(choose, scheduler, 7)
        bench_sglang.ask(self.steps)
        self.watch.choice(choose, scheduler, 8)
        self.assertEqual(seen, [["a"], [], ["a", "b"], ["a", "b"]])

    def test_layers_take_the_form_that_is_asked_for(self):
        layers = [types.SimpleNamespace(chunked_prefix_cache_threshold=8192), types.SimpleNamespace()]
        runner = types.SimpleNamespace(model=types.SimpleNamespace(modules=lambda: layers))
        batch = types.SimpleNamespace(forward_mode=types.SimpleNamespace(is_extend=lambda: True), batch_size=2,
                                      input_ids=range(1024))
        measured = []
        self.watch._measured = lambda about, forward, *batch: measured.append((about, forward(*batch)))
        forward = lambda of, batch: layers[0].chunked_prefix_cache_threshold
        self.assertEqual(self.watch.step_of_prompts(forward, runner, batch), 8192)
        for environment in {}, {bench_sglang.THRESHOLD: "8192"}:
            with mock.patch.dict(os.environ, environment):
                self.watch.layers = None
                for threshold, found in (None, 8192), (1, 1), (2 ** 31, 2 ** 31), (None, 8192):
                    bench_sglang.ask(self.steps, requests=2, threshold=threshold)
                    self.watch.step_of_prompts(forward, runner, batch)
                    self.assertEqual(measured.pop(), ({"requests": 2, "queries": 512}, found))
                    said = environment.get(bench_sglang.THRESHOLD) if threshold is None else str(threshold)
                    self.assertEqual(os.environ.get(bench_sglang.THRESHOLD), said)
        batch.forward_mode.is_extend = lambda: False
        self.watch.step_of_prompts(forward, runner, batch)
        self.assertEqual((measured, vars(layers[1])), ([], {}))

    def test_where_ours_does_not_start_others_are_left_out(self):
        """Of as many heads: as soon as the last of ours has failed."""
        done = []

        class Child:
            def __init__(self, at, words, plugin, kind, heads, number):
                self.one, self.named = f"{kind.backend}/{kind.page}/{heads}", kind.named(heads)
                done.append(("start", self.one))

            def wait_for(self, what, until):
                done.append(("wait", self.one))
                return self.one not in failing

            def measure(self, until):
                done.append(("measure", self.one))

            def end(self):
                return [{"what": "failed" if self.one in failing else "texts", "texts": [], **self.named}]

        def bench(*words):
            done.clear()
            words = ["bench_sglang.py", f"--work={self.steps}.work", f"--record={self.steps}.json", *words]
            with mock.patch.multiple(bench_sglang, Child=Child, write_model=mock.DEFAULT, difference=mock.DEFAULT,
                                     missing_plugins=lambda group: set()) as mocks, \
                 mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(io.StringIO()):
                mocks["difference"].return_value = {}
                bench_sglang.main()
            results = json.loads(pathlib.Path(f"{self.steps}.json").read_text())["results"]
            return {f"{one['backend']}/{one['page']}/{one['heads']}": " ".join(one["said"]) for one in results
                    if one["what"] == "left out"}

        two, left = ("--engines", "fa3/64", "hypermla/64"), {"fa3/64/16": "hypermla has failed"}
        failing = {"hypermla/64/16"}
        self.assertEqual(bench(*two, "--heads", "16", "8", "--at_once=2"), left)
        self.assertNotIn(("wait", "fa3/64/16"), done)
        self.assertEqual([one for what, one in done if what == "measure"], ["fa3/64/8", "hypermla/64/8"])
        self.assertEqual(bench("--engines", "hypermla/64", "fa3/64", "--heads", "16"), left)
        self.assertEqual(done, [("start", "hypermla/64/16"), ("wait", "hypermla/64/16")])
        self.assertEqual(bench(*two, "hypermla/1", "--heads", "16", "--at_once=3"), {})
        failing = {"fa3/64/16"}
        self.assertEqual(bench(*two, "--heads", "16", "--at_once=2"), {})
        self.assertIn(("measure", "hypermla/64/16"), done)
        self.assertEqual(bench(*two, "--heads", "16", "--seconds=9"), dict.fromkeys(
            ("fa3/64/16", "hypermla/64/16"), "the time is over"))

    def test_steps_of_other_shapes_are_no_figures(self):
        engine, about = bench_sglang.Engine.__new__(bench_sglang.Engine), {"requests": 1, "queries": 512.0}
        lines = [{**about, "step_ms": ms, "host_us": 10.0} for ms in (9.0, 8.0, 1.0, 3.0)]
        engine._steps_of = lambda *_: lines
        shape = bench_sglang.Shape(1, 8192, new=512)
        self.assertEqual(engine.time_prompts(None, shape, 1, 2), {"steps": 2, "step_ms": 2.0, "host_us": 10.0})
        lines[-1] = {**lines[-1], "queries": 8704.0}
        with self.assertRaisesRegex(RuntimeError, r"\(1, 512.0\), \(1, 8704.0\)"):
            engine.time_prompts(None, shape, 1, 2)


class Register(unittest.TestCase):
    """With what stands in for SGLang's modules, which keeps what it is told."""

    def setUp(self):
        self.names, self.chunked, self.backends, self.hooks, self.listed = [], [], {}, [], None
        known = types.SimpleNamespace
        keep = lambda name, hook, kind: self.hooks.append((name.rpartition(".")[2], hook.__name__, kind))
        methods = {name: type(name, (), {}) for name in ("initialise", "forward_flashmla_sparse", "forward_flashmla_kv",
                                                         "forward_fa3", "forward_decode", "compute_flashmla_metadata")}
        stand_ins = {"sglang.srt": known(server_args=known(
                         add_attention_backend_choices=self.names.extend,
                         add_chunked_prefix_cache_attention_backend=self.chunked.append)),
                     "sglang.srt.layers.attention.attention_registry": known(
                         ATTENTION_BACKENDS=self.backends,
                         register_attention_backend=lambda name: lambda make: self.backends.update({name: make})),
                     "sglang.srt.plugins.hook_registry": known(HookRegistry=known(register=keep),
                                                               HookType=known(BEFORE="before", AROUND="around")),
                     "sglang.srt.environ": known(envs=known(SGLANG_PLUGINS=known(get=lambda: self.listed))),
                     "hypermla.sglang.sparse": known(**methods)}
        patch = mock.patch.dict(sys.modules, stand_ins)
        patch.start()
        self.addCleanup(patch.stop)

    def test_the_backend_is_registered_once(self):
        hypermla.sglang.register()
        hypermla.sglang.register()
        self.assertEqual((self.names, self.chunked, self.backends),
                         (["hypermla"], ["hypermla"], {"hypermla": hypermla.sglang._backend}))
        self.assertEqual(self.hooks, [("_create_backend", "_add_to_drafts", "before"),
                                      ("_page_size_default", "_page_size", "around"),
                                      ("resolve_max_num_reqs", "_max_num_reqs", "around")])

    def test_sparse_kernels_are_put_in_place_where_they_are_listed(self):
        for self.listed in None, "", "hypermla":
            hypermla.sglang.register_sparse()
            self.assertEqual(self.hooks, [], self.listed)
        self.listed = "hypermla, hypermla_sparse"
        hypermla.sglang.register_sparse()
        methods = ("_forward_flashmla_sparse", "_forward_flashmla_kv", "_forward_fa3", "forward_decode",
                   "_compute_flashmla_metadata")
        self.assertEqual(self.hooks, [("__init__", "initialise", "around"),
                                      *((name, name.lstrip("_"), "around") for name in methods)])


if __name__ == "__main__":
    unittest.main()
