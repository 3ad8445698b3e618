"""GGUF files written by the gguf package, from weights as Hugging Face's files have them."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.models.token_bytes import byte_alphabet

NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
# A byte-level vocabulary of single bytes and nothing else.
BYTE_VOCABULARY = 256


def gguf_name(name: str) -> str:
    parts = name.split(".")
    if name == "model.norm.weight":
        return "output_norm.weight"
    stem = NAMES[parts[-2]]
    layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{layer}{stem}.{parts[-1]}"


def interleaved(value: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection as Meta has it: the two numbers that are turned together side by side."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def rope_factors(config: dict[str, Any]) -> np.ndarray:
    """Return by what each frequency of Llama 3 is divided."""
    rope = config["rope_scaling"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factors = []
    for pair in range(width // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / width)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            factors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def byte_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": byte_alphabet(),
        "tokenizer.ggml.token_type": [1] * BYTE_VOCABULARY,
        "tokenizer.ggml.merges": ["t h"],
    }


def metadata_of(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the metadata of a model, without its tokenizer's."""
    heads = config["num_attention_heads"]
    content = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // heads,
    }
    if config.get("head_dim"):
        content["attention.key_length"] = content["attention.value_length"] = config["head_dim"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        content["rope.scaling.type"] = "linear"
        content["rope.scaling.factor"] = scaling["factor"]
    return {f"{architecture}.{key}": value for key, value in content.items()}


def gguf_tensors(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a model's tensors by the names and in the layout of GGUF files."""
    stored = {}
    for name, value in tensors.items():
        if config["model_type"] != "qwen2" and ".q_proj." in name:
            value = interleaved(value, config["num_attention_heads"])
        elif config["model_type"] != "qwen2" and ".k_proj." in name:
            value = interleaved(value, config["num_key_value_heads"])
        stored[gguf_name(name)] = value
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        stored["rope_freqs.weight"] = rope_factors(config)
    return stored


def write_file(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
) -> None:
    """Write a file; matrices in a type, vectors in float32, bytes as they are."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, value in tensors.items():
        number = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        packed = value if value.dtype == np.uint8 else gguf.quantize(value, number)
        writer.add_tensor(
            name, packed, raw_shape=value.shape if kind == "F16" else None, raw_dtype=number
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
    **changes: Any,
) -> None:
    """Write a model with a tokenizer of bytes, with changed metadata; None takes a key out."""
    architecture = "qwen2" if config["model_type"] == "qwen2" else "llama"
    metadata = {**metadata_of(config, architecture), **byte_metadata(), **changes}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    write_file(path, architecture, metadata, gguf_tensors(config, tensors), kind)
