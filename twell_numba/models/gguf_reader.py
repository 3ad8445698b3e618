"""Reading a model from a GGUF file, tensor by tensor."""

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.threads import run_ranges
from twell_numba.errors import TwellError
from twell_numba.models.config import ModelConfig, shown
from twell_numba.models.gguf_file import GGUFFile, GGUFTensor, open_gguf
from twell_numba.models.gguf_names import (
    ARCHITECTURES,
    LLAMA,
    OWN_ARCHITECTURE,
    ROPE_FACTORS,
    ROPE_SCALING,
    interleaved_rows,
    is_rotated,
    stored_name,
)
from twell_numba.models.gguf_tokenizer import tokenizer_from_gguf
from twell_numba.models.gguf_types import unpack
from twell_numba.models.reading import unreadable
from twell_numba.models.rope_scaling import RopeScaling
from twell_numba.models.tokenizer import TextTokenizer

# Bytes of packed rows that are read and unpacked at a time: they stay in the cache.
BAND_NBYTES = 1 << 18
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
)
# Fewest numbers worth a thread of their own.
GRAIN = 500_000
# What Llama 3.1 and later were first trained on.
LLAMA3_CONTEXT = 8192


def read_gguf(
    path: str | os.PathLike[str], dtype: DTypeLike = np.float32
) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Read a model's description, weights and tokenizer.

    Parameters
    ----------
    path : path
        A GGUF file of a Llama or Qwen2 model, or one that :mod:`.gguf_writer` wrote.
    dtype : dtype
        float32 or float64; whatever the file packs is unpacked to it.

    Returns
    -------
    config : ModelConfig
    weights : dict of str to ndarray
        By the names, in the shapes and in the order of ``config.parameter_shapes()``.
    tokenizer : TextTokenizer

    Raises
    ------
    TwellError
        If the file is missing or damaged, or the model is of another kind: one line.
    """
    file = open_gguf(path)
    config = config_of(file)
    tokenizer = tokenizer_from_gguf(file)
    if tokenizer.vocab_size > config.vocab_size:
        raise TwellError(
            f"{file.path} has a tokenizer of {tokenizer.vocab_size} tokens for a model of "
            f"{config.vocab_size}: fetch it again"
        )
    return config, dict(_read_weights(file, config, np.dtype(dtype))), tokenizer


def read_tensor(file: GGUFFile, name: str) -> np.ndarray:
    """Return a tensor's numbers in float32, as they stand in the file."""
    tensor = file.tensors[name]
    values = np.empty(tensor.shape, np.float32)
    _read_tensor(file, tensor, values)
    return values


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
    base = file.number(f"{architecture}.rope.freq_base", 10000.0)
    config = ModelConfig(
        vocab_size=_rows_of(file, "token_embd.weight"),
        d_model=width,
        d_ffn=file.integer(f"{architecture}.feed_forward_length"),
        n_layers=file.integer(f"{architecture}.block_count"),
        n_heads=heads,
        n_kv_heads=file.integer(f"{architecture}.attention.head_count_kv", heads),
        context_length=file.integer(f"{architecture}.context_length"),
        rope_base=base,
        norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
        ffn=file.text("twell.ffn") if own else "gated",
        activation=file.text("twell.hidden_act") if own else "silu",
        head_dim=None if key_width * heads == width else key_width,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        rope_scaling=_rope_scaling(file, architecture, key_width, base),
    )
    try:
        config.validate()
    except TwellError as error:
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


def _rope_scaling(
    file: GGUFFile, architecture: str, head_width: int, base: float
) -> RopeScaling | None:
    kind = file.text(f"{architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise TwellError(
            f"{file.path} has rotary positions scaled by {shown(kind)}, none or linear wanted: "
            f"others are not supported"
        )
    if ROPE_FACTORS in file.tensors:
        return _scaling_of_factors(file, head_width, base)
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
    try:
        scaling.validate()
    except TwellError as error:
        raise TwellError(f"{file.path}: {error}") from error
    return scaling


def _read_weights(
    file: GGUFFile, config: ModelConfig, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    shapes = config.parameter_shapes()
    names = {name: stored_name(name) for name in shapes}
    _require_tensors(file, names, shapes)
    in_llamas_order = file.text("general.architecture") == LLAMA
    for name, shape in shapes.items():
        weight = np.empty(shape, dtype)
        places = None
        if in_llamas_order and is_rotated(name):
            places = interleaved_rows(shape[0], config.head_width)
        # the same numbers with the file's rows as rows
        rows = weight.T if _is_transposed(name) else weight
        _read_tensor(file, file.tensors[names[name]], rows, places)
        yield name, weight


def _require_tensors(
    file: GGUFFile, names: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Refuse a file that lacks a tensor, has one too many, or one of another shape."""
    stored = file.tensors.keys() - {ROPE_FACTORS}
    if missing := [name for name in names.values() if name not in stored]:
        raise TwellError(
            f"{file.path} has no tensor {missing[0]} ({len(missing)} of {len(names)} are "
            f"missing): fetch the model again"
        )
    if unexpected := sorted(stored - set(names.values())):
        raise TwellError(
            f"{file.path} has a tensor {shown(unexpected[0])} ({len(unexpected)} in all) that "
            f"models of this kind have no place for: it is not supported"
        )
    for name, shape in shapes.items():
        wanted = shape[::-1] if _is_transposed(name) else shape
        given = file.tensors[names[name]].shape
        if given != wanted:
            raise TwellError(
                f"{file.path} has {names[name]} of shape {given}, {wanted} wanted by its metadata"
            )


def _is_transposed(name: str) -> bool:
    """Say whether a parameter is neuron-major in memory, and [D, F] in files."""
    return name.endswith("mlp.down_proj.weight")


def _read_tensor(
    file: GGUFFile, tensor: GGUFTensor, out: np.ndarray, places: np.ndarray | None = None
) -> None:
    """Write a tensor's numbers to ``out``, band by band.

    Parameters
    ----------
    out : ndarray of the tensor's shape
        Overwritten; it may be a view.
    places : ndarray of int64, optional
        Where each of the file's rows belongs.
    """
    columns = tensor.shape[-1]
    if out.ndim == 1:
        # one row, of which numbers have places as rows have elsewhere
        values = np.empty((1, columns), np.float32)
        unpack(_read_rows(file, tensor, 0, 1), tensor.type, values)
        out[slice(None) if places is None else places] = values[0]
        return
    band = max(1, BAND_NBYTES // tensor.row_nbytes)
    in_place = places is None and out.dtype == np.float32 and out.flags.c_contiguous

    def read(start: int, stop: int) -> None:
        for first in range(start, stop, band):
            last = min(first + band, stop)
            packed = _read_rows(file, tensor, first, last)
            values = out[first:last] if in_place else np.empty((last - first, columns), np.float32)
            unpack(packed, tensor.type, values)
            if not in_place:
                out[slice(first, last) if places is None else places[first:last]] = values

    run_ranges(read, len(out), grain=1 + GRAIN // columns)


def _read_rows(file: GGUFFile, tensor: GGUFTensor, first: int, last: int) -> np.ndarray:
    """Return rows as they stand in the file, uint8 of shape (rows, row bytes)."""
    count = (last - first) * tensor.row_nbytes
    offset = tensor.offset + first * tensor.row_nbytes
    try:
        packed = np.fromfile(file.path, np.uint8, count, offset=offset)
    except OSError as error:
        raise unreadable(file.path, error) from error
    if packed.size != count:
        raise TwellError(f"{file.path} has become shorter while it was read: fetch it again")
    return packed.reshape(last - first, tensor.row_nbytes)
