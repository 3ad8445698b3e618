"""Writing and reading a model's folder, in the layout of a Hugging Face Llama model."""

import json
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import read_tensors, write_tensors
from twell_numba.models.config import ModelConfig
from twell_numba.models.huggingface import (
    file_shape,
    from_huggingface,
    to_file_layout,
    to_huggingface,
)
from twell_numba.models.reading import (
    exists,
    is_file,
    is_folder,
    require_readable,
    unreadable,
)
from twell_numba.models.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    TextTokenizer,
    load_tokenizer,
)
from twell_numba.models.transformer import Transformer

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def save_model(
    folder: str | os.PathLike[str], model: Transformer, tokenizer: TextTokenizer
) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``tokenizer.json`` into a folder.

    The folder is made if it is missing. Each file is written in one piece or not at all; to have
    that for the folder as a whole, write it inside
    :func:`twell_numba.atomic.write_folder_atomically`.

    Raises
    ------
    TwellError
        If the file system refuses (disk full, no permission).
    """
    folder = Path(folder)
    tokenizer.save(folder)
    write_tensors(
        folder / WEIGHTS_NAME,
        {
            name: to_file_layout(name, parameter.value)
            for name, parameter in model.parameters().items()
        },
        metadata={"format": "pt"},  # transformers asks for it
    )
    with write_file_atomically(folder / CONFIG_NAME) as temporary:
        description = to_huggingface(model.config, model.dtype)
        temporary.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_model(
    folder: str | os.PathLike[str], dtype: DTypeLike = np.float32, ffn_path: str = "auto"
) -> tuple[Transformer, ByteTokenizer | BPETokenizer]:
    """Read a model and its tokenizer.

    Parameters
    ----------
    folder : path
        A run (its newest checkpoint is read), a checkpoint, or a Hugging Face Llama model.
    dtype : dtype
        float32 or float64; tensors stored as float16 or bfloat16 are converted.
    ffn_path : str
        Execution path of the feedforward layers.

    Raises
    ------
    TwellError
        If a file is missing, truncated or of another kind, or a tensor is missing, unexpected or
        of another shape or dtype: one line naming the file and the tensor.
    """
    folder = resolve_checkpoint(folder)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise TwellError(
            f"{folder} has a tokenizer of {tokenizer.vocab_size} tokens for a model of "
            f"{config.vocab_size}: put the model's own tokenizer.json there"
        )
    weights = _load_weights(folder / WEIGHTS_NAME, config)
    return Transformer(config, weights, dtype, ffn_path), tokenizer


def load_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read a checkpoint's ``config.json``.

    Raises
    ------
    TwellError
        If it is missing, is not JSON, or describes a model that is not supported.
    """
    path = Path(folder, CONFIG_NAME)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise TwellError(f"{path} is not JSON: {error}; fetch or save it again") from error
    if not isinstance(content, dict):
        raise TwellError(f"{path} does not describe a model: a JSON object wanted")
    try:
        return from_huggingface(content)
    except TwellError as error:
        raise TwellError(f"{path}: {error}") from None


def resolve_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the newest checkpoint that ``path`` leads to.

    Parameters
    ----------
    path : path
        A folder with a ``config.json``, a folder of ``step-N`` folders, or a run folder, which
        holds those under ``checkpoints``.

    Raises
    ------
    TwellError
        If there is no checkpoint, or the system lets nobody look.
    """
    path = Path(path)
    if not is_folder(path):
        given = "is a file" if exists(path) else "does not exist"
        raise TwellError(f"{path} {given}: the folder of a run or a checkpoint wanted")
    if is_file(path / CONFIG_NAME):
        return path
    steps = checkpoint_steps(path / "checkpoints") or checkpoint_steps(path)
    if not steps:
        raise TwellError(
            f"{path} holds no checkpoint: a run that has saved one, or a folder with "
            f"{CONFIG_NAME} and {WEIGHTS_NAME} wanted"
        )
    return steps[max(steps)]


def checkpoint_steps(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the ``step-N`` folders of a folder by N; of a folder that does not exist, none.

    Raises
    ------
    TwellError
        If the folder cannot be read.
    """
    folder = Path(folder)
    if not is_folder(folder):
        return {}
    try:
        paths = list(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    matches = ((re.fullmatch(r"step-([0-9]{1,18})", path.name), path) for path in paths)
    return {int(match[1]): path for match, path in matches if match and is_folder(path)}


def _load_weights(path: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Read the tensors of a model and check each; feedforward weights are [F, D] in the result."""
    if not is_file(path) and is_file(path.with_name(path.name + ".index.json")):
        raise TwellError(
            f"{path} is missing: its weights are split over several files, one file wanted; "
            f"save the model again without splitting"
        )
    require_readable(path)
    tensors = read_tensors(path)
    if config.tied_embeddings:
        _drop_copy_of_tied_head(path, tensors)
    shapes = config.parameter_shapes()
    if missing := [name for name in shapes if name not in tensors]:
        raise TwellError(
            f"{path} has no tensor {missing[0]} ({len(missing)} of {len(shapes)} are missing): "
            f"it does not belong to the {CONFIG_NAME} beside it"
        )
    if unexpected := sorted(tensors.keys() - shapes.keys()):
        raise TwellError(
            f"{path} has a tensor {unexpected[0]} ({len(unexpected)} in all) that the "
            f"{CONFIG_NAME} beside it has no place for"
        )
    weights = {}
    for name, shape in shapes.items():
        stored = tensors.pop(name)  # popped, so that only one copy of each is held
        if stored.shape != file_shape(name, shape):
            raise TwellError(
                f"{path} has {name} of shape {stored.shape}, shape {file_shape(name, shape)} "
                f"wanted by the {CONFIG_NAME} beside it"
            )
        if stored.dtype.name not in ("float64", "float32", "float16", "bfloat16"):
            raise TwellError(
                f"{path} has {name} of dtype {stored.dtype}, float64, float32, float16 or "
                f"bfloat16 wanted"
            )
        weights[name] = to_file_layout(name, stored)
    return weights


def _drop_copy_of_tied_head(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Forget an output head that some tools write again beside the embedding it is tied to."""
    head = tensors.pop("lm_head.weight", None)
    table = tensors.get("model.embed_tokens.weight")
    if head is not None and table is not None and not np.array_equal(head, table):
        raise TwellError(
            f"{path} has an lm_head.weight that differs from the embedding it is tied to: set "
            f"tie_word_embeddings to false in {CONFIG_NAME} if it is a head of its own"
        )
