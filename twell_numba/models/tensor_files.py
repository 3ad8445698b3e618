"""Named arrays in a safetensors file: written in one piece or not at all, read strictly."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from twell_numba.errors import TwellError
from twell_numba.models.atomic import write_file_atomically


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to a safetensors file, atomically.

    Any memory layout and byte order may be given; little-endian C order is written.

    Raises
    ------
    TwellError
        If the file system refuses (disk full, no permission).
    """
    # safetensors 0.8 writes a transposed array in the order of its memory, which scrambles it.
    laid_out = {
        name: np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        for name, array in tensors.items()
    }
    with write_file_atomically(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(laid_out, temporary, dict(metadata) if metadata else None)
        except SafetensorError as error:
            raise OSError(_reason(error)) from error
        # It makes files that only their owner may read, whatever the user's umask says.
        temporary.chmod(mode)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read every array of a safetensors file into memory.

    Returns
    -------
    dict
        C-contiguous, writable arrays in native byte order; bfloat16 as ``ml_dtypes.bfloat16``.

    Raises
    ------
    TwellError
        If there is no such file, it is truncated, or it is not a safetensors file.
    """
    if not Path(path).is_file():
        raise TwellError(f"{path} is missing: a safetensors file wanted, check the path")
    try:
        with safe_open(path, framework="numpy") as file:
            return {
                name: np.require(file.get_tensor(name), requirements=["C", "W"])
                for name in list(file.keys())
            }
    except (SafetensorError, OSError) as error:
        raise TwellError(
            f"{path} cannot be read as safetensors: {_reason(error)}; "
            f"it may be truncated or of another kind, fetch or save it again"
        ) from error


def _reason(error: Exception) -> str:
    """Shorten "Error while serializing: I/O error: No space left on device (os error 28)"."""
    text = " ".join(str(error).split())
    return re.sub(r"^Error while (de)?serializing( header)?: ", "", text)
