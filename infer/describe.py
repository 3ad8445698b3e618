"""What a checkpoint or a saved sparse matrix holds, with at most one tensor in memory at a time."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba import formats
from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import DTYPES, StoredTensor, TensorFile
from twell_numba.models.checkpoint import load_config, resolve_checkpoint, stored_names
from twell_numba.models.config import ModelConfig
from twell_numba.models.reading import is_file, is_gguf, require_readable, unreadable
from twell_numba.models.sparse_tensors import VALUES_NAMES, tensor_names
from twell_numba.models.weight_files import WeightFiles, open_weight_files

OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "training_state.json"


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint's model, tensors, weight sparsity and training state.

    Parameters
    ----------
    path : path
        A run (its newest checkpoint is described), a checkpoint, or a GGUF file.

    Returns
    -------
    dict
        ``checkpoint`` (its path), ``config`` (by the names of
        :class:`~twell_numba.models.config.ModelConfig`), ``parameters``, ``bytes``, ``tensors``
        (list of ``name``, ``shape``, ``dtype``, ``bytes``), ``missing_tensors`` (names of those
        that the model needs but the file lacks), ``ffn_layers`` (see
        :func:`describe_ffn_layers`), ``step`` (None where there is no training state) and
        ``resumable``.

    Raises
    ------
    TwellError
        If there is no checkpoint, or a file cannot be read, is truncated or of another kind.
    """
    folder = resolve_checkpoint(path)
    if is_gguf(folder):
        from twell_numba.infer.describe_gguf import describe_gguf

        return describe_gguf(folder)
    config = load_config(folder)
    with open_weight_files(folder) as files:
        tensors = _tensor_headers(files)
        ffn_layers = describe_ffn_layers(files, config)
        there = files.tensors.keys()
    step = _training_step(folder / STATE_NAME)
    wanted = (name for names in stored_names(config).values() for name in names)
    return {
        "checkpoint": str(folder),
        "config": dataclasses.asdict(config),
        "parameters": config.parameter_count(),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "tensors": tensors,
        "missing_tensors": [name for name in wanted if name not in there],
        "ffn_layers": ffn_layers,
        "step": step,
        "resumable": step is not None and is_file(folder / OPTIMIZER_NAME),
    }


def describe_matrix(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a file written by a sparse matrix's ``save`` holds.

    Returns
    -------
    dict
        ``format``, ``shape``, ``dtype``, ``stored`` entries, ``nonzeros``, ``density``, ``bytes``,
        ``dense_bytes``, ``arrays`` (name to shape and dtype), ``row_lengths``: a list of ``low``,
        ``high`` and ``rows``, the number of rows with ``low`` to ``high`` nonzeros.

    Raises
    ------
    TwellError
        If the file is missing, truncated, or holds no sparse matrix.
    """
    require_readable(Path(path))
    matrix = formats.load(path)
    rows, _, values = matrix.coordinates()
    nonzero_rows = rows[values != 0]  # NaN is not zero
    return {
        "path": str(path),
        "format": type(matrix).__name__,
        "shape": list(matrix.shape),
        "dtype": matrix.dtype.name,
        "stored": int(matrix.nnz),
        "nonzeros": int(matrix.count_nonzero()),
        "density": matrix.density,
        "bytes": int(matrix.nbytes),
        "dense_bytes": math.prod(matrix.shape) * matrix.dtype.itemsize,
        "arrays": {
            name: {"shape": list(array.shape), "dtype": array.dtype.name}
            for name in matrix.array_names
            for array in [getattr(matrix, name)]
        },
        "row_lengths": row_length_histogram(np.bincount(nonzero_rows, minlength=matrix.shape[0])),
    }


def row_length_histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Count rows by length: 0, 1, 2 to 3, 4 to 7 and so on, up to the longest.

    Parameters
    ----------
    lengths : ndarray of integers, shape (rows,)
    """
    histogram = []
    low, high = 0, 0
    longest = int(lengths.max(initial=-1))
    while low <= longest:
        rows = int(np.count_nonzero((low <= lengths) & (lengths <= high)))
        histogram.append({"low": low, "high": high, "rows": rows})
        low, high = high + 1, 2 * high + 1
    return histogram


def describe_ffn_layers(
    file: TensorFile | WeightFiles, config: ModelConfig
) -> list[dict[str, Any]]:
    """Return how the weights of each feedforward layer are stored.

    Returns
    -------
    list of dict
        By layer: ``format``; ``weights``, zeros included; ``nonzeros``; ``density``;
        ``density_by_matrix``; ``bytes``; ``dense_bytes``, of dense weights of the same dtype.
        Counts and densities are None where weights are of a dtype that is not supported, or are not
        in the file.
    """
    names = config.ffn_weight_names()
    matrices = len(names) // config.n_layers
    layers = []
    for layer in range(config.n_layers):
        parts = [
            _describe_ffn_weight(file, name, config)
            for name in names[layer * matrices : (layer + 1) * matrices]
        ]
        counts = [part["nonzeros"] for part in parts]
        size = config.d_ffn * config.d_model
        nonzeros = None if None in counts else sum(counts)
        layers.append(
            {
                "format": config.ffn_weight_format,
                "weights": matrices * size,
                "nonzeros": nonzeros,
                "density": None if nonzeros is None else nonzeros / (matrices * size),
                "density_by_matrix": {
                    part["matrix"]: None if count is None else count / size
                    for part, count in zip(parts, counts, strict=True)
                },
                "bytes": sum(part["bytes"] for part in parts),
                "dense_bytes": sum(part["dense_bytes"] for part in parts),
            }
        )
    return layers


def _describe_ffn_weight(
    file: TensorFile | WeightFiles, name: str, config: ModelConfig
) -> dict[str, Any]:
    weight_format = config.ffn_weight_format
    names, values = [name], name
    if weight_format != "dense":
        names = tensor_names(name, weight_format)
        values = f"{name}.{weight_format}.{VALUES_NAMES[weight_format]}"
    stored = [file.tensors[each] for each in names if each in file.tensors]
    values_dtype = file.tensors[values].dtype if values in file.tensors else None
    return {
        "matrix": name.split(".")[-2],
        "nonzeros": int(np.count_nonzero(file.read(values))) if values_dtype in DTYPES else None,
        "bytes": sum(_byte_count(tensor) for tensor in stored),
        "dense_bytes": _byte_count(StoredTensor((config.d_ffn, config.d_model), values_dtype))
        if values_dtype
        else 0,
    }


def _tensor_headers(files: WeightFiles) -> list[dict[str, Any]]:
    return [
        {
            "name": files.stored_name(name),
            "shape": list(stored.shape),
            "dtype": stored.dtype,
            "bytes": _byte_count(stored),
        }
        for name, stored in files.tensors.items()
    ]


def _byte_count(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * _bits_of_dtype(stored.dtype) // 8


def _bits_of_dtype(name: str) -> int:
    """Return an element's size from safetensors' name of its dtype: ``F32``, ``BF16``, ``F4``."""
    if name == "BOOL":
        return 8
    return int(name.partition("_")[0].lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))


def _training_step(path: Path) -> int | None:
    if not is_file(path):
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TwellError(
            f"{path} is damaged ({error}); the weights beside it can still be used without it"
        ) from error
