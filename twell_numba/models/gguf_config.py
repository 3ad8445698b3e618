"""The model that a GGUF file's metadata describes."""

from dataclasses import replace

import numpy as np

from twell_numba.errors import TwellError, UsageError, shown
from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_file import GGUFFile
from twell_numba.models.gguf_names import (
    ARCHITECTURES,
    OWN_ARCHITECTURE,
    ROPE_FACTORS,
    ROPE_SCALING,
)
from twell_numba.models.gguf_tensors import read_tensor
from twell_numba.models.rope_scaling import RopeScaling

# What Llama 3.1 and later were first trained on.
LLAMA3_CONTEXT = 8192
# Numbers that other kinds of models multiply or bound something by.
_FACTORS = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "embedding_scale",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
)


def config_of(file: GGUFFile) -> ModelConfig:
    """Return the model that a file's metadata describes.

    Raises
    ------
    TwellError
        If it is of a kind that is not supported, or lacks something.
    """
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise TwellError(
            f"{file.path} has a model of architecture {shown(architecture)}, one of "
            f"{', '.join(ARCHITECTURES)} wanted: others are not supported"
        )
    _refuse_what_is_not_run(file, architecture)
    heads = file.integer(f"{architecture}.attention.head_count")
    width = file.integer(f"{architecture}.embedding_length")
    key_width = file.integer(f"{architecture}.attention.key_length", width // max(heads, 1))
    own = architecture == OWN_ARCHITECTURE
    config = ModelConfig(
        vocab_size=_rows_of(file, "token_embd.weight"),
        d_model=width,
        d_ffn=file.integer(f"{architecture}.feed_forward_length"),
        n_layers=file.integer(f"{architecture}.block_count"),
        n_heads=heads,
        n_kv_heads=file.integer(f"{architecture}.attention.head_count_kv", heads),
        context_length=file.integer(f"{architecture}.context_length"),
        rope_base=file.number(f"{architecture}.rope.freq_base", 10000.0),
        norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
        ffn=file.text("twell.ffn") if own else "gated",
        activation=file.text("twell.hidden_act") if own else "silu",
        head_dim=None if key_width * heads == width else key_width,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )
    try:
        config.validate()
        config = replace(config, rope_scaling=_rope_scaling(file, architecture, config))
        config.validate()
    except UsageError as error:
        raise TwellError(f"{file.path}: {error}") from error
    return config


def _refuse_what_is_not_run(file: GGUFFile, architecture: str) -> None:
    """Refuse what would change the numbers and has no place in a config."""
    refusals = {
        f"{architecture}.expert_count": "a mixture of experts",
        f"{architecture}.attention.sliding_window": "attention in a sliding window",
    }
    for key, what in refusals.items():
        if file.integer(key, 0):
            raise TwellError(
                f"{file.path} has a model with {what} ({key} = {file.integer(key)}), which is not "
                f"supported"
            )
    for key in _FACTORS:
        if file.number(f"{architecture}.{key}", 1.0) not in (0.0, 1.0):
            raise TwellError(
                f"{file.path} has a model with {architecture}.{key} = "
                f"{file.number(f'{architecture}.{key}'):g}, which is not supported"
            )
    if not file.flag(f"{architecture}.attention.causal", True):
        raise TwellError(f"{file.path} has a model without causal attention: not supported")
    if file.integer("split.count", 1) > 1:
        raise TwellError(
            f"{file.path} is one of {file.integer('split.count')} parts of a model: join them with "
            f"llama-gguf-split --merge"
        )
    heads = file.integer(f"{architecture}.attention.head_count")
    key_width = file.integer(
        f"{architecture}.attention.key_length",
        file.integer(f"{architecture}.embedding_length") // max(heads, 1),
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        width = file.integer(f"{architecture}.{key}", key_width)
        if width != key_width:
            raise TwellError(
                f"{file.path} has {architecture}.{key} {width}, {key_width} wanted, the width of a "
                f"head: others are not supported"
            )


def _rows_of(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise TwellError(f"{file.path} has no tensor {name}: fetch the model again")
    return file.tensors[name].shape[0]


def _rope_scaling(file: GGUFFile, architecture: str, config: ModelConfig) -> RopeScaling | None:
    kind = file.text(f"{architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise TwellError(
            f"{file.path} has rotary positions scaled by {shown(kind)}, none or linear wanted: "
            f"others are not supported"
        )
    if ROPE_FACTORS in file.tensors:
        return _scaling_of_factors(file, config.head_width, config.rope_base)
    key = f"{architecture}.rope.scaling.factor"
    factor = file.number(key, file.number(f"{architecture}.rope.scale_linear", 1.0))
    if factor == 1.0 or (kind == "none" and key in file.metadata):
        return None
    return RopeScaling("linear", factor)


def _scaling_of_factors(file: GGUFFile, head_width: int, base: float) -> RopeScaling | None:
    """Return the scaling that comes to the file's factor for each frequency."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.shape != (head_width // 2,):
        raise TwellError(
            f"{file.path} has {ROPE_FACTORS} of shape {tensor.shape}, ({head_width // 2},) wanted"
        )
    factors = read_tensor(file, ROPE_FACTORS)
    largest = float(factors.max())
    if not 1 <= factors.min() <= largest < np.inf:
        raise TwellError(f"{file.path} has {ROPE_FACTORS} {factors.min():g}, at least 1 wanted")
    if np.allclose(factors, 1.0, rtol=1e-5):
        return None
    # A file keeps what comes of a scaling, not the scaling.
    candidates = [
        RopeScaling("linear", largest),
        RopeScaling("llama3", largest, 1.0, 4.0, LLAMA3_CONTEXT),
    ]
    if ROPE_SCALING in file.metadata:
        candidates.insert(0, _own_scaling(file))
    for scaling in candidates:
        if np.allclose(factors, scaling.divisors(head_width, base), rtol=1e-3):
            return scaling
    raise TwellError(
        f"{file.path} has {ROPE_FACTORS} from {factors.min():g} to {largest:g}, which are those of "
        f"no scaling that is supported: linear, or that of Llama 3"
    )


def _own_scaling(file: GGUFFile) -> RopeScaling:
    numbers = file.numbers(ROPE_SCALING).tolist()
    if len(numbers) != 4 or not np.isfinite(numbers).all():
        raise TwellError(f"{file.path} has {ROPE_SCALING} {numbers}, four numbers wanted")
    factor, low, high, context = numbers
    scaling = RopeScaling("llama3", factor, low, high, int(context))
    scaling.validate()
    return scaling
