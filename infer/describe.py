"""What a checkpoint or a saved sparse matrix holds, without loading weights into memory."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba import formats
from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import open_tensor_file
from twell_numba.models.checkpoint import WEIGHTS_NAME, load_config, resolve_checkpoint
from twell_numba.models.reading import is_file, require_readable, unreadable
from twell_numba.models.transformer import Transformer

OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "training_state.json"


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint's model, tensors and training state, as read from its files' headers.

    Parameters
    ----------
    path : path
        A run (its newest checkpoint is described) or a checkpoint.

    Returns
    -------
    dict
        ``checkpoint`` (its path), ``config`` (by the names of
        :class:`~twell_numba.models.config.ModelConfig`), ``parameters``, ``bytes``, ``tensors``
        (list of ``name``, ``shape``, ``dtype``, ``bytes``), ``step`` (None where there is no
        training state) and ``resumable``.

    Raises
    ------
    TwellError
        If there is no checkpoint, or a file cannot be read, is truncated or of another kind.
    """
    folder = resolve_checkpoint(path)
    config = load_config(folder)
    tensors = _tensor_headers(folder / WEIGHTS_NAME)
    step = _training_step(folder / STATE_NAME)
    return {
        "checkpoint": str(folder),
        "config": vars(config),
        "parameters": config.parameter_count(),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "tensors": tensors,
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


def weight_sparsity_by_layer(model: Transformer) -> list[float]:
    """Return the fraction of exact zeros among the weights of each feedforward layer."""
    fractions = []
    for ffn in model.ffn_layers:
        weights = [parameter.value for parameter in ffn.parameters()]
        nonzeros = sum(int(np.count_nonzero(weight)) for weight in weights)
        fractions.append(1 - nonzeros / sum(weight.size for weight in weights))
    return fractions


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


def _tensor_headers(path: Path) -> list[dict[str, Any]]:
    require_readable(path)
    with open_tensor_file(path) as file:
        return [
            {
                "name": name,
                "shape": list(stored.shape),
                "dtype": stored.dtype,
                "bytes": math.prod(stored.shape) * _bits_of_dtype(stored.dtype) // 8,
            }
            for name, stored in file.tensors.items()
        ]


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
