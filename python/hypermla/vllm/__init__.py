"""The plug-in for vLLM: `vllm serve MODEL --attention-backend CUSTOM` decodes with HyperMLA's kernels (docs/vllm.md).

Where the package is installed, vLLM finds register() by its entry point `vllm.general_plugins`, in every process.
Importing this module imports neither vLLM nor PyTorch.
"""

BACKEND = "hypermla.vllm.backend.HyperMLABackend"
SPARSE_BACKEND = "hypermla.vllm.sparse.HyperMLASparseBackend"
HOPPER = 9, 0  # the compute capability that the kernels in CUDA C++ are for
REPLACED = "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"  # vLLM's choice over a cache in 16 bits, and in FP8


def register():
    """Tells vLLM where the backend is; any number of times. Another plug-in's CUSTOM is left to it."""
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    taken = custom.is_overridden() and custom.get_path()
    if taken and taken != BACKEND:
        init_logger("vllm.hypermla").warning("HyperMLA: the attention backend CUSTOM is %s of another plug-in; set "
                                             "VLLM_PLUGINS=hypermla to leave that one out", taken)
    else:
        register_backend(custom, BACKEND)
    # vLLM 0.33 knows names of one's own.
    if hasattr(AttentionBackendEnum, "register") and "HYPERMLA" not in AttentionBackendEnum.__members__:
        register_backend("HYPERMLA", BACKEND)


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
