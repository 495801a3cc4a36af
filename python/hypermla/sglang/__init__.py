"""SGLang's plug-in: `--attention-backend hypermla` (docs/sglang.md).

SGLang finds register() by the entry point `sglang.srt.plugins` and calls it in each of its processes. Nothing of SGLang
or PyTorch is imported before.
"""

import inspect
import logging

NAME = "hypermla"
PAGE = 64  # tokens, where the command line names none
SPARSE = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"


def register():
    """Makes the backend's name known to SGLang. May be called again."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    server_args.add_attention_backend_choices([NAME])
    server_args.add_chunked_prefix_cache_attention_backend(NAME)
    register_attention_backend(NAME)(_backend)
    HookRegistry.register("sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", _add_to_drafts,
                          HookType.BEFORE)
    HookRegistry.register("sglang.srt.arg_groups.overrides._page_size_default", _page_size, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
                          _max_num_reqs, HookType.AROUND)


def register_sparse():
    """Puts our kernels in the place of FlashMLA's and FlashAttention-3's in SGLang's backend for sparse attention: only
    where SGLANG_PLUGINS lists `hypermla_sparse`."""
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hypermla.sglang import sparse

    if "hypermla_sparse" in (name.strip() for name in (envs.SGLANG_PLUGINS.get() or "").split(",")):
        for name, method in (("__init__", sparse.initialise),
                             ("_forward_flashmla_sparse", sparse.forward_flashmla_sparse),
                             ("_forward_flashmla_kv", sparse.forward_flashmla_kv), ("_forward_fa3", sparse.forward_fa3),
                             ("forward_decode", sparse.forward_decode),
                             ("_compute_flashmla_metadata", sparse.compute_flashmla_metadata)):
            HookRegistry.register(f"{SPARSE}.{name}", method, HookType.AROUND)


def _backend(runner):
    from hypermla.sglang.backend import HyperMlaBackend

    return HyperMlaBackend(runner)


def _decodes(flags):
    """Whether the command line names the backend for decoding; if it names none, for all."""
    return NAME == (flags.decode_attention_backend or flags.attention_backend)


def _page_size(default, view):
    """Around what SGLang takes where the command line names no page size: 1 token, which kernels gather one by one. A
    prefix cache for states of linear attention that has no buffers, which is for hybrids such as Kimi-Linear, takes
    pages of 1 token alone."""
    no_buffers = (getattr(view, "uses_mamba_radix_cache", False)
                  and getattr(view, "mamba_radix_cache_strategy", None) == "no_buffer")
    if view.page_size is not None or not _decodes(view) or no_buffers:
        return default(view)
    logging.getLogger(__name__).info("HyperMLA takes pages of %d tokens; --page-size names others.", PAGE)
    return {"page_size": PAGE}


def _max_num_reqs(default, configurator, token_capacity):
    """Around how many requests SGLang runs at once: up to 4096 where the command line names no number, of which a plan
    takes half."""
    from hypermla.mla_decode import MlaDecode

    most = default(configurator, token_capacity)
    if most <= MlaDecode.MAX_REQUESTS or not _decodes(configurator.server_args):
        return most
    logging.getLogger(__name__).warning("HyperMLA plans up to %d requests at once, so that many run at once, not %d.",
                                        MlaDecode.MAX_REQUESTS, most)
    return MlaDecode.MAX_REQUESTS


def _add_to_drafts(factory, backend_name, backend_map, error_template, **more):
    """Before DraftBackendFactory chooses: what it takes for FlashMLA's name, it has for ours, too. Since 0.5.18 those
    are pairs of a backend's name and the backend."""
    of_flash_mla = backend_map.get("flashmla")
    if of_flash_mla is not None:
        several_steps = of_flash_mla == factory._create_flashmla_decode_backend
        pairs = "stamps_children" in inspect.signature(factory._create_backend).parameters

        def made():
            backend = _draft_backend(factory, several_steps)
            return (NAME, backend) if pairs else backend

        backend_map[NAME] = made
    return (factory, backend_name, backend_map, error_template), more


def _draft_backend(factory, several_steps):
    from hypermla.sglang.backend import HyperMlaBackend, HyperMlaMultiStepDraftBackend

    if several_steps:
        return HyperMlaMultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    return HyperMlaBackend(factory.draft_model_runner)
