#!/usr/bin/env python3
"""What the plug-in uses of vLLM: the names that it imports, the parameters of the methods that it overrides, the fields
of configurations that it reads. Records those of the vLLM that Python finds in tests/engines/vllm-<version>.json; the
files there are of the versions that the plug-in was written for, and tests compare them with the plug-in and with an
installed vLLM.

    python3 tests/engines/vllm_interface.py
"""

import ast
import inspect
import json
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "python/hypermla/vllm"
CLASSES = {"backend": ("HyperMLABackend", "HyperMLADecodeMetadata", "HyperMLAMetadataBuilder", "HyperMLAImpl"),
           "prefill": ("HyperMLAPrefill",),
           "sparse": ("HyperMLASparseBackend", "HyperMLASparseMetadataBuilder", "HyperMLASparseImpl")}  # by module


def recorded():
    """Every version's interface that is recorded."""
    return {path.stem.removeprefix("vllm-"): json.loads(path.read_text())
            for path in sorted(HERE.glob("vllm-*.json"))}


def imported():
    """{module of vLLM: names that the plug-in imports from it}"""
    names = {}
    for path in sorted(SOURCE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "vllm":
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return {module: sorted(found) for module, found in sorted(names.items())}


def read_fields():
    """{configuration, or common metadata of a step: fields that the plug-in reads}"""
    fields = {}
    for path in sorted(SOURCE.glob("*.py")):
        for config, field in re.findall(r"\b(?=(config|common|\w+_config)\.(\w+))", path.read_text()):
            fields.setdefault("vllm_config" if config == "config" else config, set()).add(field)
    return {config: sorted(found) for config, found in sorted(fields.items())}


def parameters(function):
    """Their names; with "=" where they have a default."""
    return [name + "=" * (one.default is not one.empty) for name, one in inspect.signature(function).parameters.items()
            if name != "self"]


def of_engine():
    """The interface of the vLLM that Python finds."""
    import importlib

    import vllm
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    present = {module: [name for name in names if hasattr(importlib.import_module(module), name)]
               for module, names in imported().items()}
    methods = {}
    for ours in (getattr(importlib.import_module(f"hypermla.vllm.{module}"), name)
                 for module, names in CLASSES.items() for name in names):
        base = ours.__mro__[1]
        names = [name for name in vars(ours) if name == "__init__" or not name.startswith("__")]
        methods[ours.__name__] = {name: parameters(getattr(base, name)) for name in sorted(names)
                                  if inspect.isroutine(getattr(base, name, None))}
    methods["MLACommonMetadata"] = {"__init__": parameters(
        importlib.import_module("hypermla.vllm.backend").MLACommonMetadata.__init__)}
    layers = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    methods["MLAAttention"] = {"forward_impl": parameters(layers.MLAAttention.forward_impl)}
    model = VllmConfig.__annotations__["model_config"]
    methods["ModelConfig"] = {name: parameters(getattr(model, name))
                              for name in ("get_num_layers", "get_total_num_hidden_layers")}
    prefill = layers.MLACommonPrefillMetadata
    gather = importlib.import_module("vllm._custom_ops").gather_and_maybe_dequant_cache
    contexts = {of.__name__: parameters(of) for of in (prefill, prefill.ChunkedContextMetadata, gather)}
    fields, kinds = {}, {"vllm_config": VllmConfig, "common": CommonAttentionMetadata}
    for config, wanted in read_fields().items():
        kind = kinds.get(config) or VllmConfig.__annotations__[config]
        kind = next(one for one in (*getattr(kind, "__args__", ()), kind) if hasattr(one, "__dataclass_fields__"))
        fields[config] = [name for name in wanted if name in kind.__dataclass_fields__]
    return {"version": vllm.__version__, "imports": present, "methods": methods, "fields": fields,
            "contexts": contexts}


if __name__ == "__main__":
    interface = of_engine()
    path = HERE / f"vllm-{interface['version']}.json"
    path.write_text(json.dumps(interface, indent=1) + "\n")
    print(path)
