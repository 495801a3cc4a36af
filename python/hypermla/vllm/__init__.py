"""The plug-in for vLLM: `vllm serve MODEL --attention-backend CUSTOM` attends with HyperMLA's kernels (docs/vllm.md).

Where the package is installed, vLLM finds register() by its entry point `vllm.general_plugins`, in every process.
Importing this module imports neither vLLM nor PyTorch.
"""

BACKEND = "hypermla.vllm.backend.HyperMLABackend"
PREFILL_BACKEND = "hypermla.vllm.prefill.HyperMLAPrefill"
SPARSE_BACKEND = "hypermla.vllm.sparse.HyperMLASparseBackend"
REPLACED = "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"  # vLLM's choice over a cache in 16 bits, and in FP8


def register():
    """Tells vLLM where the backends are; any number of times. Another plug-in's CUSTOM is left to it."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _put(AttentionBackendEnum.CUSTOM, BACKEND, register_backend, "attention")
    _put(MLAPrefillBackendEnum.CUSTOM, PREFILL_BACKEND, register_mla_prefill_backend, "MLA prefill")
    # vLLM 0.33 knows names of one's own.
    if hasattr(AttentionBackendEnum, "register") and "HYPERMLA" not in AttentionBackendEnum.__members__:
        register_backend("HYPERMLA", BACKEND)


def _put(custom, path, register_path, what):
    from vllm.logger import init_logger

    taken = custom.is_overridden() and custom.get_path()
    if taken and taken != path:
        init_logger("vllm.hypermla").warning("HyperMLA: the %s backend CUSTOM is %s of another plug-in; set "
                                             "VLLM_PLUGINS=hypermla to leave that one out", what, taken)
    else:
        register_path(custom, path)


def register_sparse():
    """Puts the sparse backend in the place of those that vLLM has for Hopper: only where VLLM_PLUGINS lists
    `hypermla_sparse`."""
    from vllm import envs
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if "hypermla_sparse" in (envs.VLLM_PLUGINS or ()):
        for name in REPLACED:
            register_backend(AttentionBackendEnum[name], SPARSE_BACKEND)
        init_logger("vllm.hypermla").info("HyperMLA's kernels are those of %s", " and ".join(REPLACED))
