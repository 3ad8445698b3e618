"""A model's description and tensors as Hugging Face's Llama and Qwen2 have them, and back.

Also read: the layout that sparse models were published in (keys ``sparsity_*`` in ``config.json``,
weights named ``mlp.gate_weight``), as far as it is known here, from descriptions alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from twell_numba.errors import TwellError, shown
from twell_numba.models.config import ACTIVATIONS, ModelConfig
from twell_numba.models.rope_scaling import RopeScaling

# Other tools would open a two-matrix model named "llama" with a gate of random numbers, and one
# whose feedforward weights are stored as sparse matrices with random numbers for all of these.
MODEL_TYPES = {"gated": "llama", "two_matrix": "two_matrix_llama"}
ARCHITECTURES = {"gated": "LlamaForCausalLM", "two_matrix": "TwoMatrixLlamaForCausalLM"}
SPARSE_MODEL_TYPES = {ffn: f"sparse_{name}" for ffn, name in MODEL_TYPES.items()}
SPARSE_ARCHITECTURES = {ffn: f"Sparse{name}" for ffn, name in ARCHITECTURES.items()}
WEIGHT_FORMAT_KEY = "ffn_weight_format"
# Models of others that are computed as ours are: Llama's, with biases as Qwen2 has them.
QWEN2 = "qwen2"
MISTRAL = "mistral"
OUTPUT_BIAS_KEY = "attention_output_bias"
# What transformers takes where a Mistral's config.json says nothing.
MISTRAL_WINDOW = 4096
PUBLISHED_SPARSE_PREFIX = "sparsity_"
ACTIVATION_NAMES = {"swish": "silu", **{name: name for name in ACTIVATIONS}}

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
    architecture = (SPARSE_ARCHITECTURES if sparse else ARCHITECTURES)[config.ffn]
    model_type = (SPARSE_MODEL_TYPES if sparse else MODEL_TYPES)[config.ffn]
    is_qwen2 = config.attention_bias and not config.output_bias
    if is_qwen2 and model_type == MODEL_TYPES["gated"]:
        architecture, model_type = "Qwen2ForCausalLM", QWEN2
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SAME_VALUES.items()},
        "head_dim": config.head_width,
        "ffn": config.ffn,
        **({WEIGHT_FORMAT_KEY: config.ffn_weight_format} if sparse else {}),
        "hidden_act": config.activation,
        "attention_bias": config.attention_bias,
        OUTPUT_BIAS_KEY: config.output_bias,
        "mlp_bias": False,
        # transformers 5 reads the second form, older versions and most other tools the first.
        "rope_theta": config.rope_base,
        "rope_parameters": {**_rope_description(config), "rope_theta": config.rope_base},
        **({"rope_scaling": _rope_description(config)} if config.rope_scaling else {}),
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
    _require_known_model(content, ffn, model_type, weight_format)
    _refuse_what_is_not_computed(content)
    activation = content.get("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATION_NAMES:
        raise TwellError(
            f"hidden_act {shown(activation)} given, one of {', '.join(ACTIVATIONS)} wanted: models "
            f"with another activation are not supported"
        )
    values = {ours: content[theirs] for theirs, ours in SAME_VALUES.items() if theirs in content}
    values.setdefault("tied_embeddings", False)  # their defaults
    values.setdefault("n_kv_heads", values.get("n_heads"))
    for theirs, ours in SAME_VALUES.items():
        if ours not in values:
            raise TwellError(f"no {theirs} given, which a model's description needs")
    attention_bias = content.get("attention_bias", False) if model_type != QWEN2 else True
    config = ModelConfig(
        **values,
        ffn=ffn,
        activation=ACTIVATION_NAMES[activation],
        rope_base=_rope(content).get("rope_theta", content.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(content),
        ffn_weight_format=weight_format,
        head_dim=_head_dim(content, values),
        attention_bias=attention_bias,
        output_bias=content.get(OUTPUT_BIAS_KEY, attention_bias and model_type != QWEN2),
    )
    config.validate()
    return config


def is_published_sparse(content: Mapping[str, Any]) -> bool:
    """Say whether a ``config.json`` is of the layout in which sparse models were published."""
    return any(key.startswith(PUBLISHED_SPARSE_PREFIX) for key in content)


def _require_known_model(
    content: Mapping[str, Any], ffn: Any, model_type: Any, weight_format: Any
) -> None:
    known = MODEL_TYPES if weight_format == "dense" else SPARSE_MODEL_TYPES
    if weight_format == "dense" and model_type in list(SPARSE_MODEL_TYPES.values()):
        if is_published_sparse(content):
            return
        given = f"{shown(weight_format)} given" if WEIGHT_FORMAT_KEY in content else "missing"
        raise TwellError(
            f"{WEIGHT_FORMAT_KEY} {given} with model_type {shown(model_type)}, 'csr' or "
            f"'block_ell' wanted, as the weights are stored; put the key back as it was saved"
        )
    is_theirs = model_type in (QWEN2, MISTRAL) or is_published_sparse(content)
    if weight_format == "dense" and ffn == "gated" and is_theirs:
        return
    if ffn not in list(known) or model_type != known[ffn]:
        theirs = f", {QWEN2}, {MISTRAL}" if weight_format == "dense" else ""
        raise TwellError(
            f"model_type {shown(model_type)} with ffn {shown(ffn)} and {WEIGHT_FORMAT_KEY} "
            f"{shown(weight_format)} given, one of {', '.join(known.values())}{theirs} wanted: "
            f"other models are not supported"
        )


def _refuse_what_is_not_computed(content: Mapping[str, Any]) -> None:
    """Refuse a model that would run, but give other numbers than it should."""
    if content.get("mlp_bias"):
        raise TwellError(
            f"mlp_bias {shown(content['mlp_bias'])} given, false wanted: feedforward layers with "
            f"biases are not supported"
        )
    if content.get("quantization_config"):
        raise TwellError(
            "quantization_config given, none wanted: fetch the model that was quantized, or a "
            "GGUF file of it"
        )
    context = content.get("max_position_embeddings")
    is_mistral = content.get("model_type") == MISTRAL
    window = content.get("sliding_window", MISTRAL_WINDOW if is_mistral else None)
    uses_window = content.get("use_sliding_window", is_mistral)
    reaches = isinstance(window, int) and isinstance(context, int) and window >= context
    if uses_window and window is not None and not reaches:
        raise TwellError(
            f"sliding_window {shown(window)} given, attention to all of the context wanted: a "
            f"window is not supported"
        )
    for holder in (content, _rope(content)):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            raise TwellError(
                f"partial_rotary_factor {shown(holder['partial_rotary_factor'])} given, 1 wanted: "
                f"heads of which only a part is turned are not supported"
            )


def _head_dim(content: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the width of a head where it is not what the other sizes say."""
    given = content.get("head_dim")
    heads, width = values["n_heads"], values["d_model"]
    sizes = (given, heads, width)
    is_implied = all(isinstance(size, int) for size in sizes) and given * heads == width
    return None if is_implied else given


def _rope(content: Mapping[str, Any]) -> dict[str, Any]:
    # transformers takes the older name where both are given, as where a user adds it to a file.
    name = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    rope = content.get(name) or {}
    if not isinstance(rope, dict):
        raise TwellError(f"{name} {shown(rope)} given, an object wanted")
    return rope


def _rope_scaling(content: Mapping[str, Any]) -> RopeScaling | None:
    rope = _rope(content)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind not in ("linear", "llama3"):
        raise TwellError(
            f"rotary positions of type {shown(kind)} given, 'default', 'linear' or 'llama3' "
            f"wanted: others are not supported"
        )
    names = {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_context",
    }
    wanted = names if kind == "llama3" else {"factor": "factor"}
    for theirs in wanted:
        if theirs not in rope:
            raise TwellError(f"no {theirs} given, which rotary positions of type {kind!r} need")
    return RopeScaling(kind, **{ours: rope[theirs] for theirs, ours in wanted.items()})


def _rope_description(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


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
