"""Reading the numbers of a GGUF file's tensors, band by band."""

import numpy as np

from twell_numba.device.threads import run_ranges
from twell_numba.errors import TwellError
from twell_numba.models.gguf_file import GGUFFile, GGUFTensor
from twell_numba.models.gguf_types import unpack
from twell_numba.models.reading import unreadable

# Bytes of packed rows that are read and unpacked at a time: they stay in the cache.
BAND_NBYTES = 1 << 18
# Fewest numbers worth a thread of their own.
GRAIN = 100_000


def read_tensor(file: GGUFFile, name: str) -> np.ndarray:
    """Return a tensor's numbers in float32, as they stand in the file."""
    tensor = file.tensors[name]
    values = np.empty(tensor.shape, np.float32)
    read_into(file, tensor, values.reshape(-1, tensor.shape[-1]))
    return values


def read_into(
    file: GGUFFile, tensor: GGUFTensor, out: np.ndarray, places: np.ndarray | None = None
) -> None:
    """Write a tensor's numbers to ``out``, band by band.

    Parameters
    ----------
    out : ndarray of the tensor's shape, shape (numbers,) or (rows, columns)
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
