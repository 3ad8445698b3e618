"""A model's description and tensors as Hugging Face's Llama has them, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.models.config import ModelConfig, shown

# Other tools would open a two-matrix model named "llama" with a gate of random numbers, and one
# whose feedforward weights are stored as sparse matrices with random numbers for all of these.
MODEL_TYPES = {"gated": "llama", "two_matrix": "two_matrix_llama"}
ARCHITECTURES = {"gated": "LlamaForCausalLM", "two_matrix": "TwoMatrixLlamaForCausalLM"}
SPARSE_MODEL_TYPES = {ffn: f"sparse_{name}" for ffn, name in MODEL_TYPES.items()}
SPARSE_ARCHITECTURES = {ffn: f"Sparse{name}" for ffn, name in ARCHITECTURES.items()}
WEIGHT_FORMAT_KEY = "ffn_weight_format"

# Their key and ours, for values that are the same in both.
SAME_VALUES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_ffn",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}


def to_huggingface(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    sparse = config.ffn_weight_format != "dense"
    return {
        "architectures": [(SPARSE_ARCHITECTURES if sparse else ARCHITECTURES)[config.ffn]],
        "model_type": (SPARSE_MODEL_TYPES if sparse else MODEL_TYPES)[config.ffn],
        **{theirs: getattr(config, ours) for theirs, ours in SAME_VALUES.items()},
        "head_dim": config.head_width,
        "ffn": config.ffn,
        **({WEIGHT_FORMAT_KEY: config.ffn_weight_format} if sparse else {}),
        "hidden_act": config.activation,
        "attention_bias": False,
        "mlp_bias": False,
        # transformers 5 reads the second form, older versions and most other tools the first.
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # Likewise "dtype" and "torch_dtype".
        "dtype": dtype.name,
        "torch_dtype": dtype.name,
        "use_cache": True,
    }


def from_huggingface(content: Mapping[str, Any]) -> ModelConfig:
    """Return the model that the contents of a ``config.json`` describe.

    Raises
    ------
    TwellError
        If it is of another kind, lacks a key, or asks for something that is not supported.
    """
    ffn = content.get("ffn", "gated")
    model_type = content.get("model_type")
    weight_format = content.get(WEIGHT_FORMAT_KEY, "dense")
    known = MODEL_TYPES if weight_format == "dense" else SPARSE_MODEL_TYPES
    if weight_format == "dense" and model_type in list(SPARSE_MODEL_TYPES.values()):
        given = f"{shown(weight_format)} given" if WEIGHT_FORMAT_KEY in content else "missing"
        raise TwellError(
            f"{WEIGHT_FORMAT_KEY} {given} with model_type {shown(model_type)}, 'csr' or "
            f"'block_ell' wanted, as the weights are stored; put the key back as it was saved"
        )
    if ffn not in list(known) or model_type != known[ffn]:
        raise TwellError(
            f"model_type {shown(model_type)} with ffn {shown(ffn)} and {WEIGHT_FORMAT_KEY} "
            f"{shown(weight_format)} given, one of {', '.join(known.values())} wanted: other "
            f"models are not supported"
        )
    activation = content.get("hidden_act")
    if activation != "relu":
        raise TwellError(
            f"hidden_act {shown(activation)} given, 'relu' wanted: a model with another activation "
            f"has no exact zeros to make use of, and is not supported"
        )
    for key in ("attention_bias", "mlp_bias"):
        if content.get(key):
            raise TwellError(
                f"{key} {shown(content[key])} given, false wanted: biases are not supported"
            )
    values = {ours: content[theirs] for theirs, ours in SAME_VALUES.items() if theirs in content}
    values.setdefault("tied_embeddings", False)  # their defaults
    values.setdefault("n_kv_heads", values.get("n_heads"))
    for theirs, ours in SAME_VALUES.items():
        if ours not in values:
            raise TwellError(f"no {theirs} given, which a model's description needs")
    config = ModelConfig(
        **values,
        ffn=ffn,
        activation=activation,
        rope_base=_rope_base(content),
        ffn_weight_format=weight_format,
    )
    config.validate()
    head_width = content.get("head_dim") or config.head_width
    if head_width != config.head_width:
        raise TwellError(
            f"head_dim {shown(head_width)} given, hidden_size / num_attention_heads = "
            f"{config.head_width} wanted: other widths are not supported"
        )
    return config


def to_file_layout(name: str, value: np.ndarray) -> np.ndarray:
    """Return a view of a parameter as it stands in a file: the down projection is [D, F] there.

    The same function takes it back to memory, where all feedforward weights are [F, D].
    """
    return value.T if _is_transposed(name) else value


def file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a file of a parameter that has ``shape`` in memory."""
    return shape[::-1] if _is_transposed(name) else shape


def _is_transposed(name: str) -> bool:
    return name.endswith("mlp.down_proj.weight")


def _rope_base(content: Mapping[str, Any]) -> float:
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise TwellError(f"rope_parameters {shown(rope)} given, an object wanted")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise TwellError(
            f"rotary positions of type {shown(kind)} given, 'default' wanted: scaled ones are not "
            f"supported"
        )
    return rope.get("rope_theta", content.get("rope_theta", 10000.0))
