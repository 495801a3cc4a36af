#!/usr/bin/env python3
"""What the plug-in uses of SGLang: names, and the parameters of functions. Records those of the SGLang that Python
finds in tests/engines/sglang-<version>.json; the files there are of the versions that the plug-in was written for, and
tests compare them with the plug-in and with an installed SGLang.

    python3 tests/engines/sglang_interface.py
"""

import importlib
import importlib.metadata
import inspect
import json
import pathlib
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
USED = {
    "sglang.srt.arg_groups.overrides": ["_page_size_default"],
    "sglang.srt.environ": ["envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.get",
                            "envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.is_set", "envs.SGLANG_PLUGINS.get"],
    "sglang.srt.layers.attention.dsa_backend": ["DeepseekSparseAttnBackend.__init__",
                                                "DeepseekSparseAttnBackend._forward_flashmla_sparse",
                                                "DeepseekSparseAttnBackend._forward_flashmla_kv",
                                                "DeepseekSparseAttnBackend._forward_fa3",
                                                "DeepseekSparseAttnBackend._compute_flashmla_metadata",
                                                "DSAFlashMLAMetadata.slice",
                                                "DeepseekSparseAttnBackend.forward_decode"],
    "sglang.kernels.ops.attention.kv_indices": ["create_flashmla_kv_indices_triton",
                                                "get_num_kv_index_blocks_flashmla"],
    "sglang.kernels.ops.quantization.fp8_kernel": ["scaled_fp8_quant"],
    "sglang.kernels.ops.attention.utils": ["create_flashmla_kv_indices_triton", "get_num_kv_index_blocks_flashmla"],
    "sglang.srt.layers.attention.attention_registry": ["ATTENTION_BACKENDS", "register_attention_backend"],
    "sglang.srt.layers.attention.base_attn_backend": [
        "AttentionBackend.forward", "AttentionBackend.update_verify_buffers_to_fill_after_draft"],
    "sglang.srt.layers.attention.flashinfer_mla_backend": ["FlashInferMLAAttnBackend.forward_extend"],
    "sglang.srt.layers.attention.flashmla_backend": [
        "FlashMLABackend.__init__", "FlashMLABackend.init_forward_metadata",
        "FlashMLABackend.init_forward_metadata_out_graph", "FlashMLABackend.init_cuda_graph_state",
        "FlashMLABackend.forward_decode", "FlashMLABackend.forward_extend", "FlashMLABackend._eager_block_kv_indices",
        "FlashMLABackend.verify_mask", "FlashMLABackend.init_mha_chunk_metadata",
        "FlashMLAMultiStepDraftBackend.__init__",
        "FlashMLAMultiStepDraftBackend.common_template",
        "FlashMLAMultiStepDraftBackend.init_forward_metadata_out_graph"],
    "sglang.srt.layers.attention.verify_mask": ["maybe_create_verify_mask"],
    "sglang.srt.mem_cache.kv_cache_configurator": ["KVCacheConfigurator.resolve_max_num_reqs"],
    "sglang.srt.mem_cache.memory_pool": ["MLATokenToKVPool.get_key_buffer", "MLATokenToKVPool.set_kv_buffer",
                                         "MLATokenToKVPool.set_mla_kv_buffer"],
    "sglang.srt.model_executor.forward_batch_info": [
        f"ForwardBatch.{name}" for name in (
            "attn_attend_prefix_cache", "extend_prefix_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu",
            "mha_one_shot", "mha_return_lse", "prefix_chunk_cu_seq_lens", "prefix_chunk_idx",
            "prefix_chunk_num_tokens")] + ["ForwardMode.is_dllm_extend", "ForwardMode.is_extend_without_speculative"],
    "sglang.srt.model_executor.forward_context": ["get_attn_backend", "get_token_to_kv_pool"],
    "sglang.srt.managers.schedule_batch": ["ScheduleBatch.extend_lens", "ScheduleBatch.prefix_lens"],
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner": [  # from 0.5.23 on
        "PrefillCudaGraphRunner._backend_can_run_prefill_cuda_graph",
        "PrefillCudaGraphRunner._backend_vote_prefill_cuda_graph"],
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph": ["is_in_breakable_cuda_graph"],
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph": ["is_in_tc_piecewise_cuda_graph"],
    "sglang.srt.models.deepseek_common.attention_backend_handler": ["AttentionBackendRegistry.register",
                                                                    "handle_attention_flashinfer"],
    "sglang.srt.models.deepseek_common.utils": ["FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"],
    "sglang.srt.plugins.hook_registry": ["HookRegistry.register", "HookType.BEFORE", "HookType.AROUND"],
    "sglang.srt.runtime_context": ["get_exec", "get_parallel", "get_spec"],
    "sglang.srt.server_args": ["add_attention_backend_choices", "add_chunked_prefix_cache_attention_backend"],
    "sglang.srt.speculative.draft_utils": ["DraftBackendFactory._create_backend",
                                           "DraftBackendFactory._create_flashmla_decode_backend",
                                           "DraftBackendFactory._create_flashmla_prefill_backend"],
}


def stand_in():
    """For FlashMLA's kernels, which cannot be imported without a GPU."""
    sys.modules.setdefault("sgl_kernel", types.ModuleType("sgl_kernel"))
    for name in "sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface":
        kernels = sys.modules[name] = types.ModuleType(name)
        kernels.flash_mla_with_kvcache = kernels.get_mla_metadata = None


def described(module, name):
    """The names of its parameters, or of what type it is; None if this version has no such thing."""
    try:
        thing = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ModuleNotFoundError, AttributeError):
        return None
    thing = getattr(thing, "fn", thing)  # of Triton
    return list(inspect.signature(thing).parameters) if callable(thing) else type(thing).__name__


def recorded():
    """Every version's interface that is recorded."""
    return {path.stem.removeprefix("sglang-"): json.loads(path.read_text())
            for path in sorted(HERE.glob("sglang-*.json"))}


def of_engine():
    """The interface of the SGLang that Python finds."""
    functions = {f"{module}.{name}": described(module, name) for module, names in USED.items() for name in names}
    return {"version": importlib.metadata.version("sglang"),
            "uses": {name: what for name, what in functions.items() if what is not None}}


if __name__ == "__main__":
    stand_in()
    interface = of_engine()
    path = HERE / f"sglang-{interface['version']}.json"
    path.write_text(json.dumps(interface, indent=1) + "\n")
    print(path)
