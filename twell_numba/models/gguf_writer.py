"""Writing a model to a GGUF file, for other tools."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError, UsageError
from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_names import (
    LLAMA,
    OWN_ARCHITECTURE,
    QWEN2,
    ROPE_FACTORS,
    ROPE_SCALING,
    interleaved_rows,
    is_rotated,
    stored_name,
)
from twell_numba.models.gguf_types import import_gguf
from twell_numba.models.gguf_vocabulary import vocabulary_metadata
from twell_numba.models.huggingface import to_file_layout
from twell_numba.models.tokenizer import TextTokenizer
from twell_numba.models.transformer import Transformer

# A block of Q8_0 holds numbers up to 127 times a scale in float16.
LARGEST_Q8_0 = 127 * 65504.0
# The name of each type in the format, and the number of a file that mostly has it.
WEIGHT_TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}


def write_gguf(
    path: str | os.PathLike[str],
    model: Transformer,
    tokenizer: TextTokenizer,
    weight_type: str = "f32",
) -> None:
    """Write a model to one file, as a whole or not at all.

    A model that llama.cpp and other tools know becomes one of architecture ``llama`` or ``qwen2``.
    Another one (ReLU, two matrices) becomes one of ``twell``, which this package reads and others
    refuse; as ``llama`` they would compute something else with it.

    Parameters
    ----------
    path : path
        Overwritten.
    model : Transformer
        With dense weights.
    tokenizer : TextTokenizer
    weight_type : {"f32", "f16", "bf16", "q8_0"}
        Of matrices. Vectors are float32, and so are, with ``q8_0``, matrices whose rows are no
        multiple of 32 numbers.

    Raises
    ------
    UsageError
        If the type is another one, or the model's weights are sparse.
    TwellError
        If the ``gguf`` package is not installed, a weight does not fit the type, or the file system
        refuses: one line.
    """
    if weight_type not in WEIGHT_TYPES:
        raise UsageError(
            f"weight type {weight_type!r} given, one of {', '.join(WEIGHT_TYPES)} wanted"
        )
    if model.weight_format != "dense":
        raise UsageError(
            f"a model of {model.weight_format} weights given: GGUF files hold dense weights"
        )
    gguf = import_gguf("GGUF files that are written")
    architecture = architecture_of(model.config)
    tensors = _tensors(model, architecture)
    kinds = {
        name: gguf.GGMLQuantizationType[_type_name(tensor, weight_type)]
        for name, tensor in tensors.items()
    }
    with write_file_atomically(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        try:
            _add_metadata(writer, model.config, architecture, weight_type)
            for key, value in vocabulary_metadata(tokenizer, model.config.vocab_size).items():
                _add(writer, key, value)
            for name, tensor in tensors.items():
                _add_description(gguf, writer, name, tensor.shape, kinds[name])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tensors.items():
                writer.write_tensor_data(_packed(gguf, path, name, tensor, kinds[name]))
        finally:
            writer.close()


def architecture_of(config: ModelConfig) -> str:
    """Return the architecture that a model has for other tools, or this package's own."""
    if not config.gated or config.activation != "silu":
        return OWN_ARCHITECTURE
    factors = config.rope_scaling is not None and config.rope_scaling.kind == "llama3"
    return QWEN2 if config.attention_bias and not config.output_bias and not factors else LLAMA


def _tensors(model: Transformer, architecture: str) -> dict[str, np.ndarray]:
    """Return views of the parameters as files have them, and factors of rotary positions."""
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.parameters().items():
        value = parameter.on_host()
        assert isinstance(value, np.ndarray)
        tensor = to_file_layout(name, value)
        if architecture == LLAMA and is_rotated(name):
            tensor = tensor[interleaved_rows(len(tensor), config.head_width)]
        tensors[stored_name(name)] = tensor
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        divisors = scaling.divisors(config.head_width, config.rope_base)
        tensors[ROPE_FACTORS] = divisors.astype(np.float32)
    return tensors


def _type_name(tensor: np.ndarray, weight_type: str) -> str:
    if tensor.ndim == 1 or (weight_type == "q8_0" and tensor.shape[1] % 32):
        return "F32"
    return WEIGHT_TYPES[weight_type][0]


def _add_metadata(writer: Any, config: ModelConfig, architecture: str, weight_type: str) -> None:
    writer.add_string("general.type", "model")
    writer.add_uint32("general.file_type", WEIGHT_TYPES[weight_type][1])
    writer.add_uint32("general.quantization_version", 2)
    sizes = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ffn,
        "rope.dimension_count": config.head_width,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_width,
        "attention.value_length": config.head_width,
    }
    for key, size in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", size)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_base)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_float32(f"{architecture}.rope.scaling.factor", scaling.factor)
    elif scaling is not None:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        numbers = [float(scaling.factor), float(low), float(high), float(scaling.original_context)]
        writer.add_array(ROPE_SCALING, numbers)
    if architecture == OWN_ARCHITECTURE:
        writer.add_string("twell.hidden_act", config.activation)
        writer.add_string("twell.ffn", config.ffn)


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a value of the type that readers expect for values of its kind."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_description(gguf: Any, writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    block_size, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    nbytes = int(np.prod(shape)) // block_size * block_nbytes
    writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)


def _packed(
    gguf: Any, path: str | os.PathLike[str], name: str, tensor: np.ndarray, kind: Any
) -> np.ndarray:
    """Return the numbers of a tensor in the type that it is written in."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(tensor, np.float32)
        if kind == gguf.GGMLQuantizationType.F32:
            return values
        packed = gguf.quantize(values, kind)
    if kind == gguf.GGMLQuantizationType.F16:
        fits = np.array_equal(np.isfinite(packed), np.isfinite(values))
    else:
        fits = kind != gguf.GGMLQuantizationType.Q8_0 or not np.abs(values).max() > LARGEST_Q8_0
    if not fits:
        raise TwellError(
            f"{Path(path)} is not written: {name} has weights up to {np.abs(values).max():g}, "
            f"which do not fit {kind.name.lower()}; give bf16 or f32"
        )
    return packed
