"""The small models of the engines' benchmarks: DeepSeek-V3's shape, random weights by which attention reaches the
logits. Of vLLM and PyTorch nothing is imported before it is used."""

import json
import os
import zlib

VOCABULARY = 1024


def directory_of_model(directory, heads, layers, sparse):
    return os.path.join(directory, f"model-{heads}-{layers}{'-sparse' * sparse}")


def write_model(directory, heads, layers, tokens, sparse, **own):
    """A directory that vLLM takes for a DeepSeek-V3, or, sparse, for a V3.2, without experts; own: of its config."""
    directory = directory_of_model(directory, heads, layers, sparse)
    os.makedirs(directory, exist_ok=True)
    hidden = 256
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
              "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 2 * hidden,
              "moe_intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": heads, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
              "n_group": 1, "topk_group": 1, "first_k_dense_replace": layers, "moe_layer_freq": 1,
              "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
              "routed_scaling_factor": 1.0, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
              "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 2 * tokens,
              "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
              "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": None,
              "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
              "eos_token_id": 1, "pad_token_id": 2, "use_cache": True, "num_nextn_predict_layers": 0}
    if sparse:
        config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 2048,
                   "index_n_heads": 64, "index_head_dim": 128}
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config | own, file, indent=1)
    return directory


def attention_shapes(config):
    """{name in a checkpoint: shape} of a layer, but for what follows its attention."""
    hidden, heads, query = (config[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank"))
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent = config["kv_lora_rank"]
    return {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_a_proj": (query, hidden), "self_attn.q_a_layernorm": (query,),
            "self_attn.q_b_proj": (heads * (nope + rope), query),
            "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden), "self_attn.kv_a_layernorm": (latent,),
            "self_attn.kv_b_proj": (heads * (nope + value), latent), "self_attn.o_proj": (hidden, heads * value)}


def mlp_shapes(name, hidden, inner):
    return {f"{name}.gate_proj": (inner, hidden), f"{name}.up_proj": (inner, hidden),
            f"{name}.down_proj": (hidden, inner)}


def spread_of(name, columns):
    """Of weights. Attention that looks at some tokens more than at others, and logits that differ."""
    if "embed_tokens" in name:
        return 1.0
    return columns ** -0.5 * (2.5 if "q_b_proj" in name else 4.0 if "lm_head" in name else 1.0)


def use_normal_weights(rank):
    """vLLM's dummy weights are so small that attention would not reach the logits."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    @torch.no_grad()
    def fill(model, *_, **__):
        if not hasattr(model, "lm_head"):
            return  # a part of the model, which was filled as a whole
        for name, weights in model.named_parameters():
            if not torch.is_floating_point(weights) or weights.device.type == "meta":
                continue
            if "norm" in name or weights.dim() < 2:
                weights.fill_(1.0 if "norm" in name else 0.0)
                continue
            # All GPUs have the weights before the latents alike, of all others each its own part.
            own = 0 if "_a_proj" in name else rank
            generator = torch.Generator(device=weights.device).manual_seed(zlib.crc32(name.encode()) + own)
            numbers = torch.randn(weights.shape, generator=generator, device=weights.device)
            weights.copy_(spread_of(name, weights.shape[-1]) * numbers)

    if hasattr(dummy_loader, "initialize_dummy_weights"):
        dummy_loader.initialize_dummy_weights = fill
    else:  # 0.33
        dummy_loader.DummyModelLoader.load_weights = lambda self, model, model_config: fill(model)


def write_tokenizer(directory, longest):
    """Of words `w0`, `w1`, .., one for each token; longest: of a text, in tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(os.path.join(directory, "tokenizer.json"))
    with open(os.path.join(directory, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1",
                   "pad_token": "w2", "model_max_length": longest}, file)


def weights_of(config):
    """{name in a checkpoint of DeepSeek-V3: tensor}, the MTP layer's as one behind the others."""
    import torch

    generator, hidden, count = torch.Generator().manual_seed(11), config["hidden_size"], config["num_hidden_layers"]
    layer = attention_shapes(config) | mlp_shapes("mlp", hidden, config["intermediate_size"])
    mtp = f"model.layers.{count}"
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "model.norm": (hidden,)}
    for i in range(count + config["num_nextn_predict_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {f"{mtp}.enorm": (hidden,), f"{mtp}.hnorm": (hidden,), f"{mtp}.shared_head.norm": (hidden,),
               f"{mtp}.eh_proj": (hidden, hidden)}
    weights = {name: torch.ones(shape) if len(shape) == 1 else
               spread_of(name, shape[1]) * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    # A token's successor gets about as much as the most that attention gives any.
    weights["lm_head"] += 0.1 * weights["model.embed_tokens"].roll(1, 0)
    # The MTP layer sees mostly the next token's embedding, and little of the last hidden state.
    weights[f"{mtp}.eh_proj"] = torch.cat((torch.eye(hidden), 0.3 * weights[f"{mtp}.eh_proj"]), 1)
    weights[f"{mtp}.embed_tokens"] = weights["model.embed_tokens"].clone()
    weights[f"{mtp}.shared_head.head"] = weights["lm_head"].clone()
    return {f"{name}.weight": one.bfloat16() for name, one in weights.items()}


def write_checkpoint(work, heads, layers, tokens):
    """A directory that `vllm serve` takes, of a DeepSeek-V3 without experts and with an MTP layer. By its weights some
    tokens follow from the last one, as the MTP layer guesses them, and others from attention: some drafts are accepted,
    others not."""
    from safetensors.torch import save_file

    directory = write_model(work, heads, layers, tokens, False, num_nextn_predict_layers=1,
                            first_k_dense_replace=layers + 1)
    with open(os.path.join(directory, "config.json")) as file:
        config = json.load(file)
    save_file(weights_of(config), os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(directory, tokens)
    return directory
