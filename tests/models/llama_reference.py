"""Llama and Qwen2 as their papers and configurations define them, in plain float64 NumPy.

It takes what stands in a checkpoint: ``config.json`` and the tensors as they are stored.
"""

import math
from typing import Any

import numpy as np


def reference_logits(
    config: dict[str, Any], tensors: dict[str, np.ndarray], tokens: np.ndarray
) -> np.ndarray:
    """Return the logits (S, V) of one sequence of tokens (S,)."""
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        inside = {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}
        eps = config["rms_norm_eps"]
        x = x + attention(config, inside, rms_norm(x, inside["input_layernorm.weight"], eps))
        x = x + mlp(config, inside, rms_norm(x, inside["post_attention_layernorm.weight"], eps))
    x = rms_norm(x, weights["model.norm.weight"], config["rms_norm_eps"])
    tied = config.get("tie_word_embeddings", False)
    return x @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def attention(config: dict[str, Any], weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    length = len(x)

    def project(part: str, count: int) -> np.ndarray:
        y = x @ weights[f"self_attn.{part}_proj.weight"].T
        return (y + weights.get(f"self_attn.{part}_proj.bias", 0)).reshape(length, count, width)

    q, k, v = project("q", heads), project("k", groups), project("v", groups)
    angles = np.arange(length)[:, None] * frequencies(config, width)
    q, k = turn(q, angles), turn(k, angles)
    k, v = (np.repeat(each, heads // groups, axis=1) for each in (k, v))
    scores = np.einsum("qhw,khw->hqk", q, k) / math.sqrt(width)
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khw->qhw", weight, v).reshape(length, heads * width)
    return mixed @ weights["self_attn.o_proj.weight"].T + weights.get("self_attn.o_proj.bias", 0)


def turn(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def frequencies(config: dict[str, Any], width: int) -> np.ndarray:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = config.get("rope_theta") or rope["rope_theta"]
    result = [base ** (-2 * pair / width) for pair in range(width // 2)]
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return np.array(result) / rope["factor"]
    if kind == "llama3":
        return np.array([_llama3_frequency(rope, each) for each in result])
    return np.array(result)


def _llama3_frequency(rope: dict[str, Any], frequency: float) -> float:
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    if wavelength < context / rope["high_freq_factor"]:
        return frequency
    if wavelength > context / rope["low_freq_factor"]:
        return frequency / rope["factor"]
    smooth = (context / wavelength - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def mlp(config: dict[str, Any], weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate = x @ weights["mlp.gate_proj.weight"].T
    activated = {
        "relu": np.maximum(gate, 0),
        "relu2": np.maximum(gate, 0) ** 2,
        "silu": gate / (1 + np.exp(-gate)),
    }[config["hidden_act"]]
    hidden = activated * (x @ weights["mlp.up_proj.weight"].T)
    return hidden @ weights["mlp.down_proj.weight"].T
