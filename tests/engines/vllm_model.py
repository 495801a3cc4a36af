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
    """{name in a checkpoint of DeepSeek-V3: tensor}, an MTP layer's as one behind the others."""
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    layer = attention_shapes(config) | mlp_shapes("mlp", hidden, config["intermediate_size"])
    mtp = f"model.layers.{count}"
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "model.norm": (hidden,)}
    for i in range(count + config["num_nextn_predict_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if config["num_nextn_predict_layers"]:
        shapes |= {f"{mtp}.enorm": (hidden,), f"{mtp}.hnorm": (hidden,), f"{mtp}.shared_head.norm": (hidden,),
                   f"{mtp}.eh_proj": (hidden, hidden)}
    weights = random_weights(shapes, 11)
    # A token's successor gets about as much as the most that attention gives any.
    weights["lm_head"] += 0.1 * weights["model.embed_tokens"].roll(1, 0)
    if config["num_nextn_predict_layers"]:
        weights[f"{mtp}.eh_proj"] = mostly_the_token(weights[f"{mtp}.eh_proj"])
        weights[f"{mtp}.embed_tokens"] = weights["model.embed_tokens"].clone()
        weights[f"{mtp}.shared_head.head"] = weights["lm_head"].clone()
    return weights


def drafter_of(method, config, weights):
    """{name in a checkpoint of an EAGLE or EAGLE-3 drafter: tensor}, of one layer with latent attention."""
    hidden, three = config["hidden_size"], method == "eagle3"
    layer = attention_shapes(config) | mlp_shapes("mlp", hidden, config["intermediate_size"])
    if three:  # of the token's embedding and three layers' hidden states, which become one
        layer |= {"hidden_norm": (hidden,)} | {f"self_attn.{name}": (layer[f"self_attn.{name}"][0], 2 * hidden)
                                               for name in ("q_a_proj", "kv_a_proj_with_mqa")}
    own = {"fc": (hidden, 3 * hidden)} if three else {"fc": (hidden, hidden), "enorm": (hidden,), "hnorm": (hidden,)}
    found = random_weights({"norm": (hidden,)} | own | {f"layers.0.{name}": one for name, one in layer.items()}, 12)
    if not three:
        found["fc"] = mostly_the_token(found["fc"])
    return found | {"embed_tokens": weights["model.embed_tokens"].clone(), "lm_head": weights["lm_head"].clone()}


def random_weights(shapes, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: torch.ones(shape) if len(shape) == 1 else
            spread_of(name, shape[1]) * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def mostly_the_token(weights):
    """Of a drafter's projection, which then sees mostly the last token's embedding, and little of the hidden state."""
    import torch

    return torch.cat((torch.eye(len(weights)), 0.3 * weights), 1)


def write_checkpoint(work, heads, layers, tokens, method="mtp"):
    """A directory that `vllm serve` takes, of a DeepSeek-V3 without experts: with an MTP layer or, for the methods
    "eagle" and "eagle3", with a drafter in drafter_in(). By its weights some tokens follow from the last one, as the
    MTP layer and EAGLE's guess them, and others from attention: some of their drafts are accepted, others not."""
    mtp = method == "mtp"
    directory = write_model(work, heads, layers, tokens, False, num_nextn_predict_layers=int(mtp),
                            first_k_dense_replace=layers + 1)
    weights = weights_of(config_in(directory))
    save(directory, weights)
    write_tokenizer(directory, tokens)
    if not mtp:
        # vLLM takes a drafter of the type deepseek_v3 for an MTP layer, which EAGLE's classes, but not EAGLE-3's, are.
        # Positions of EAGLE-3's are always YaRN's.
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": tokens, "beta_fast": 32,
                "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        kind = ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "rope_scaling": yarn,
                 "rope_parameters": yarn | {"rope_theta": 10000.0}} if method == "eagle3"
                else {"num_nextn_predict_layers": 1})
        drafter = write_model(directory, heads, 1, tokens, False, first_k_dense_replace=layers + 1, **kind)
        save(drafter, drafter_of(method, config_in(drafter), weights))
    return directory


def drafter_in(directory, heads):
    return directory_of_model(directory, heads, 1, False)


def config_in(directory):
    with open(os.path.join(directory, "config.json")) as file:
        return json.load(file)


def save(directory, weights):
    from safetensors.torch import save_file

    save_file({f"{name}.weight": one.bfloat16() for name, one in weights.items()},
              os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
