"""Reading a model from a GGUF file, tensor by tensor."""

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.errors import TwellError, shown
from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_config import config_of
from twell_numba.models.gguf_file import GGUFFile, open_gguf
from twell_numba.models.gguf_names import (
    LLAMA,
    ROPE_FACTORS,
    interleaved_rows,
    is_rotated,
    stored_name,
)
from twell_numba.models.gguf_tensors import read_into
from twell_numba.models.gguf_tokenizer import tokenizer_from_gguf
from twell_numba.models.huggingface import file_shape, to_file_layout
from twell_numba.models.tokenizer import TextTokenizer


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
        read_into(file, file.tensors[names[name]], to_file_layout(name, weight), places)
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
        wanted, given = file_shape(name, shape), file.tensors[names[name]].shape
        if given != wanted:
            raise TwellError(
                f"{file.path} has {names[name]} of shape {given}, {wanted} wanted by its metadata"
            )
