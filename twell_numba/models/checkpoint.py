"""Writing and reading a model's folder, in the layout of a Hugging Face Llama model.

Feedforward weights that are held sparse are stored as the arrays of their format, see
:mod:`twell_numba.models.sparse_tensors`, and ``config.json`` names the format.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from twell_numba.atomic import write_file_atomically
from twell_numba.device.threads import thread_count
from twell_numba.errors import TwellError, UsageError
from twell_numba.formats import BlockELLMatrix, CSRMatrix
from twell_numba.formats.tensor_file import write_tensors
from twell_numba.layers.ffn import (
    FLOAT8_PATHS,
    PATHS_OF_ACTIVATION,
    PATHS_OF_FORMAT,
    REASON_OF_ACTIVATION,
)
from twell_numba.layers.parameter import Operand
from twell_numba.models.config import ModelConfig
from twell_numba.models.huggingface import (
    file_shape,
    from_huggingface,
    to_file_layout,
    to_huggingface,
)
from twell_numba.models.published_layout import neuron_major
from twell_numba.models.reading import exists, is_file, is_folder, is_gguf, unreadable
from twell_numba.models.sparse_tensors import (
    VALUES_NAMES,
    from_tensors,
    tensor_names,
    to_tensors,
)
from twell_numba.models.tokenizer import TextTokenizer, load_tokenizer
from twell_numba.models.transformer import Transformer
from twell_numba.models.weight_files import (
    WEIGHTS_NAME,
    WeightFiles,
    open_weight_files,
    to_dtype,
)

CONFIG_NAME = "config.json"
EMBEDDING_NAME = "model.embed_tokens.weight"
# Frequencies of rotary positions, which older files hold beside the weights.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
# Of a run, see twell_numba.train.run_folder.
CHECKPOINTS_NAME = "checkpoints"
SETTINGS_NAME = "config.toml"
_FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")


def save_model(
    folder: str | os.PathLike[str], model: Transformer, tokenizer: TextTokenizer
) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``tokenizer.json`` into a folder.

    Weights are written in the format that they are held in.

    The folder is made if it is missing. Each file is written in one piece or not at all; to have
    that for the folder as a whole, write it inside
    :func:`twell_numba.atomic.write_folder_atomically`.

    Raises
    ------
    TwellError
        If the file system refuses (disk full, no permission).
    ValueError
        If the feedforward weights are held in several formats.
    """
    folder = Path(folder)
    config = replace(model.config, ffn_weight_format=model.weight_format)
    tensors: dict[str, np.ndarray] = {}
    parameters = model.parameters()
    for name, parameter in parameters.items():
        tensors |= _tensors_of(name, parameter.on_host())
    tokenizer.save(folder)
    # transformers asks for the metadata
    write_tensors(folder / WEIGHTS_NAME, tensors, metadata={"format": "pt"})
    with write_file_atomically(folder / CONFIG_NAME) as temporary:
        # what a model on a GPU computes in may have fewer bits than what is trained
        stored_dtype = next(iter(parameters.values())).value.dtype
        description = to_huggingface(config, stored_dtype)
        description["bos_token_id"] = tokenizer.bos_token
        description["eos_token_id"] = _one_or_list(tokenizer.eos_tokens)
        temporary.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_model(
    folder: str | os.PathLike[str],
    dtype: DTypeLike = np.float32,
    ffn_path: str = "auto",
    *,
    keep_format: bool = False,
    device: str = "cpu",
    float8: bool = False,
) -> tuple[Transformer, TextTokenizer]:
    """Read a model and its tokenizer.

    Parameters
    ----------
    folder : path
        A run (its newest checkpoint is read), a checkpoint, a Hugging Face model of Llama or Qwen2
        shape, or a GGUF file.
    dtype : dtype
        float32 or float64; on a GPU also bfloat16 or float16. Tensors are converted to it.
    ffn_path : str
        Execution path of the feedforward layers. Their weights are held as it needs them, however
        they are stored; ``auto`` holds them in the format that computes fastest.
    keep_format : bool
        Hold the weights exactly as they are stored, for training. The path is then ``auto`` if it
        does not fit the format.
    float8 : bool
        For inference: hold feedforward weights of which few rows are read as 8-bit floats.

    Raises
    ------
    UsageError
        If the path does not fit ``float8``, or one of them the model's activation.
    TwellError
        If a file is missing, truncated or of another kind, or a tensor is missing, unexpected or
        of another shape or dtype: one line naming the file and the tensor.
    """
    if float8 and ffn_path not in FLOAT8_PATHS:
        raise UsageError(
            f"FFN path {ffn_path} given for weights held as 8-bit floats, one of "
            f"{', '.join(FLOAT8_PATHS)} wanted"
        )
    stream = None if device == "cpu" else _open_gpu(device)
    dtype = np.dtype(dtype)
    # NumPy's models compute in no fewer bits.
    is_short = stream is not None and dtype.itemsize == 2
    host_dtype = np.dtype(np.float32) if is_short else dtype
    # What is trained is written to, all of it.
    config, weights, tokenizer = _read_model(folder, host_dtype, mapped=not keep_format)
    _require_path_of_activation(ffn_path, float8, config.activation, device)
    model = Transformer(config, weights, host_dtype)
    if not keep_format:
        _hold_for_path(model, "twell" if float8 else ffn_path)
    if ffn_path in PATHS_OF_FORMAT[model.weight_format]:
        model.ffn_path = ffn_path
    if float8:
        model.hold_float8()
    if stream is not None:
        model.move_to_gpu(stream, dtype)
    return model, tokenizer


def _require_path_of_activation(ffn_path: str, float8: bool, activation: str, device: str) -> None:
    """Refuse an execution path that there is not for a model's activation."""
    paths = PATHS_OF_ACTIVATION[activation]
    if activation != "relu" and device != "cpu":
        paths = ("auto", "dense")
    if ffn_path not in paths or (float8 and activation != "relu"):
        given = "8-bit floats" if float8 else f"FFN path {ffn_path}"
        raise UsageError(
            f"{given} given for a model with the activation {activation}, FFN path "
            f"{' or '.join(paths)} wanted: {REASON_OF_ACTIVATION[activation]}"
        )


def _read_model(
    path: str | os.PathLike[str], dtype: np.dtype, mapped: bool
) -> tuple[ModelConfig, Mapping[str, Operand], TextTokenizer]:
    path = resolve_checkpoint(path)
    if is_gguf(path):
        from twell_numba.models.gguf_reader import read_gguf

        return read_gguf(path, dtype)
    config = load_config(path)
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise TwellError(
            f"{path} has a tokenizer of {tokenizer.vocab_size} tokens for a model of "
            f"{config.vocab_size}: put the model's own tokenizer.json there"
        )
    return config, _load_weights(path, config, dtype, mapped), tokenizer


def load_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read a checkpoint's ``config.json``, or what a GGUF file says.

    Raises
    ------
    TwellError
        If it is missing, is not JSON, or describes a model that is not supported.
    """
    if is_gguf(folder):
        from twell_numba.models.gguf_config import config_of
        from twell_numba.models.gguf_file import open_gguf

        return config_of(open_gguf(folder))
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
        A folder with a ``config.json``, a folder of ``step-N`` folders, a run folder, which
        holds those under ``checkpoints``, or a GGUF file, which is returned as it is.

    Raises
    ------
    TwellError
        If there is no checkpoint, or the system lets nobody look.
    """
    written = os.fspath(path)
    path = Path(path)
    if not written.strip():
        raise TwellError(f"{written!r} given, the folder of a run or a checkpoint wanted")
    if is_gguf(path):
        return path
    if not is_folder(path):
        given = "is a file" if exists(path) else "does not exist"
        raise TwellError(
            f"{path} {given}: the folder of a run or a checkpoint, or a GGUF file, wanted"
        )
    if is_file(path / CONFIG_NAME):
        return path
    steps = checkpoint_steps(path / CHECKPOINTS_NAME) or checkpoint_steps(path)
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


def run_of_checkpoints(path: str | os.PathLike[str]) -> Path | None:
    """Return the run of which a path is, or lies in, the folder of checkpoints; None without one.

    Whatever is written there changes from where the run goes on.

    Raises
    ------
    TwellError
        If the system lets nobody look.
    """
    path = Path(os.path.realpath(path))
    for folder in (path, *path.parents):
        if folder.name == CHECKPOINTS_NAME and is_file(folder.parent / SETTINGS_NAME):
            return folder.parent
    return None


def stored_names(config: ModelConfig) -> dict[str, list[str]]:
    """Return the names of the tensors in a file that hold each parameter, by its name."""
    sparse = set() if config.ffn_weight_format == "dense" else set(config.ffn_weight_names())
    return {
        name: tensor_names(name, config.ffn_weight_format) if name in sparse else [name]
        for name in config.parameter_shapes()
    }


def _open_gpu(device: str) -> Any:
    from twell_numba.device.gpu import choose

    return choose(device).stream


def _one_or_list(tokens: Sequence[int]) -> int | list[int] | None:
    """Return tokens as ``config.json`` has them."""
    if len(tokens) > 1:
        return list(tokens)
    return tokens[0] if tokens else None


def _tensors_of(name: str, weights: Operand) -> dict[str, np.ndarray]:
    """Return a parameter's tensors as they stand in a file."""
    if isinstance(weights, CSRMatrix | BlockELLMatrix):
        return to_tensors(name, weights)
    return {name: to_file_layout(name, weights)}


def _hold_for_path(model: Transformer, ffn_path: str) -> None:
    """Hold the feedforward weights in the format that a path computes with."""
    if ffn_path == "auto":
        model.hold_fastest()
        return
    for weight_format, paths in PATHS_OF_FORMAT.items():
        if ffn_path in paths and weight_format != model.weight_format:
            model.hold_ffn_weights(weight_format, model.block_size)


def _load_weights(
    folder: Path, config: ModelConfig, dtype: np.dtype, mapped: bool
) -> dict[str, Operand]:
    """Read the tensors of a model and check each; feedforward weights are [F, D] in the result.

    Dense tensors are converted to a dtype. Where they are ``mapped``, those that are computed with
    as they are stored stay in the memory of their file.
    """
    with open_weight_files(folder) as files:
        path = files.path
        fetch = partial(files.map, dtype=dtype) if mapped else files.read
        there = {name for name in files.tensors if not name.endswith(IGNORED_SUFFIX)}
        if config.tied_embeddings and "lm_head.weight" in there:
            there.remove("lm_head.weight")
            _require_copy_of_embedding(files)
        names = stored_names(config)
        _require_names(path, there, [each for group in names.values() for each in group])

        def load(name: str, shape: tuple[int, ...]) -> Operand:
            if names[name] == [name]:  # the arrays of a sparse weight have longer names
                dense = _neuron_major(files, name, fetch(name), shape)
                return to_dtype(dense, dtype)
            return _sparse_weight(path, name, config, {each: fetch(each) for each in names[name]})

        with ThreadPoolExecutor(thread_count()) as threads:
            loaded = threads.map(
                lambda item: (item[0], load(*item)), config.parameter_shapes().items()
            )
            weights = dict(loaded)
    _require_one_block_size(path, weights)
    return weights


def _require_names(path: Path, there: set[str], wanted: list[str]) -> None:
    """Refuse a file that lacks a tensor of the model or has another one."""
    if missing := [name for name in wanted if name not in there]:
        raise TwellError(
            f"{path} has no tensor {missing[0]} ({len(missing)} of {len(wanted)} are missing): "
            f"it does not belong to the {CONFIG_NAME} beside it"
        )
    if unexpected := sorted(there - set(wanted)):
        raise TwellError(
            f"{path} has a tensor {unexpected[0]} ({len(unexpected)} in all) that the "
            f"{CONFIG_NAME} beside it has no place for"
        )


def _neuron_major(
    files: WeightFiles, name: str, stored: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Return a view of a tensor in the layout of memory, of the shape that is wanted there."""
    stored_name = files.stored_name(name)
    _require_float(files.path, stored_name, stored)
    if stored_name != name:
        try:
            return neuron_major(stored_name, stored, shape)
        except TwellError as error:
            raise TwellError(f"{files.path} has {error}") from None
    if stored.shape != file_shape(name, shape):
        raise TwellError(
            f"{files.path} has {name} of shape {stored.shape}, shape {file_shape(name, shape)} "
            f"wanted by the {CONFIG_NAME} beside it"
        )
    return to_file_layout(name, stored)


def _sparse_weight(
    path: Path, name: str, config: ModelConfig, stored: dict[str, np.ndarray]
) -> Operand:
    weight_format = config.ffn_weight_format
    values_name = f"{name}.{weight_format}.{VALUES_NAMES[weight_format]}"
    _require_float(path, values_name, stored[values_name])
    try:
        return from_tensors(name, weight_format, (config.d_ffn, config.d_model), stored)
    except (ValueError, TypeError) as error:
        raise TwellError(
            f"{path} has {name} that is not valid ({error}); fetch or save it again"
        ) from error


def _require_one_block_size(path: Path, weights: dict[str, Operand]) -> None:
    """Refuse blocks of several sizes in a model, of which each weight is valid by itself."""
    sizes = {
        name: matrix.block_size
        for name, matrix in weights.items()
        if isinstance(matrix, BlockELLMatrix)
    }
    for name, size in sizes.items():
        first = next(iter(sizes))
        if size != sizes[first]:
            raise TwellError(
                f"{path} has {name} that is not valid (blocks of {size} rows given beside blocks "
                f"of {sizes[first]} in {first}, one size wanted); fetch or save it again"
            )


def _require_float(path: Path, name: str, stored: np.ndarray) -> None:
    if stored.dtype.name not in _FLOAT_DTYPES:
        raise TwellError(
            f"{path} has {name} of dtype {stored.dtype}, float64, float32, float16 or "
            f"bfloat16 wanted"
        )


def _require_copy_of_embedding(files: WeightFiles) -> None:
    """Refuse an output head that is not the embedding it is tied to, beside which some write it."""
    has_table = EMBEDDING_NAME in files.tensors
    if has_table and not np.array_equal(files.read("lm_head.weight"), files.read(EMBEDDING_NAME)):
        raise TwellError(
            f"{files.path} has an lm_head.weight that differs from the embedding it is tied to: "
            f"set tie_word_embeddings to false in {CONFIG_NAME} if it is a head of its own"
        )
