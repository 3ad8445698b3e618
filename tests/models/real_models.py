"""Small models of random weights in the shapes that people have, as ``config.json`` has them."""

from typing import Any

import numpy as np

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, grouped heads": {"num_key_value_heads": 2},
    "llama, one key and value head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama, wide heads": {"head_dim": 24, "num_key_value_heads": 2},
    "llama, biases": {"attention_bias": True, "num_key_value_heads": 2},
    "llama 3": {"rope_theta": 5e5, "rope_scaling": _LLAMA3, "num_key_value_heads": 2},
    "llama, linear rotary scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama, relu": {"hidden_act": "relu"},
    "llama, relu2": {"hidden_act": "relu2", "tie_word_embeddings": True},
    "llama, as SmolLM2": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 48,
        "tie_word_embeddings": True,
        "rope_theta": 1e5,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied and grouped": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "qwen2, relu": {"model_type": "qwen2", "hidden_act": "relu", "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
}


def configuration(name: str) -> dict[str, Any]:
    """Return the contents of a ``config.json``."""
    return {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **CONFIGURATIONS[name],
    }


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return weights, float32, as a file holds them: large enough for logits that differ."""
    rng = np.random.default_rng(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    query, key = heads * width, config["num_key_value_heads"] * width
    neurons = config["intermediate_size"]
    has_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (rows, hidden)
            if has_bias:
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, query)
        if config.get("attention_bias", False):
            shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (neurons, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (neurons, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, neurons)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith(".bias"):
            value = rng.normal(0, 0.5, shape)
        else:
            value = rng.normal(0, 1.2 / np.sqrt(shape[-1]), shape)
        tensors[name] = value.astype(np.float32)
    return tensors
