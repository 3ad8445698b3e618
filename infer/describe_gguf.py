"""What a GGUF file holds, with at most one tensor in memory at a time."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.models.config import ModelConfig
from twell_numba.models.gguf_config import config_of
from twell_numba.models.gguf_file import GGUFFile, open_gguf
from twell_numba.models.gguf_names import stored_name
from twell_numba.models.gguf_tensors import read_tensor


def describe_gguf(path: Path) -> dict[str, Any]:
    """Return what :func:`twell_numba.infer.describe.describe_checkpoint` says of a folder.

    Tensors' dtypes are the format's names, ``Q4_1`` for example.

    Raises
    ------
    TwellError
        If the file cannot be read, is damaged, or holds a model that is not supported.
    """
    file = open_gguf(path)
    config = config_of(file)
    wanted = [stored_name(name) for name in config.parameter_shapes()]
    return {
        "checkpoint": str(path),
        "config": dataclasses.asdict(config),
        "parameters": config.parameter_count(),
        "bytes": sum(tensor.nbytes for tensor in file.tensors.values()),
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.type.name,
                "bytes": tensor.nbytes,
            }
            for tensor in file.tensors.values()
        ],
        "missing_tensors": [name for name in wanted if name not in file.tensors],
        "ffn_layers": [_describe_layer(file, config, layer) for layer in range(config.n_layers)],
        "step": None,
        "resumable": False,
    }


def _describe_layer(file: GGUFFile, config: ModelConfig, layer: int) -> dict[str, Any]:
    names = config.ffn_weight_names()
    matrices = len(names) // config.n_layers
    size = config.d_ffn * config.d_model
    counts: dict[str, int | None] = {}
    nbytes = 0
    for name in names[layer * matrices : (layer + 1) * matrices]:
        tensor = file.tensors.get(stored_name(name))
        counts[name.split(".")[-2]] = None if tensor is None else _nonzeros(file, tensor.name)
        nbytes += 0 if tensor is None else tensor.nbytes
    known = [count for count in counts.values() if count is not None]
    nonzeros = sum(known) if len(known) == matrices else None
    return {
        "format": "dense",
        "weights": matrices * size,
        "nonzeros": nonzeros,
        "density": None if nonzeros is None else nonzeros / (matrices * size),
        "density_by_matrix": {
            part: None if count is None else count / size for part, count in counts.items()
        },
        "bytes": nbytes,
        "dense_bytes": nbytes,
    }


def _nonzeros(file: GGUFFile, name: str) -> int:
    return int(np.count_nonzero(read_tensor(file, name)))
