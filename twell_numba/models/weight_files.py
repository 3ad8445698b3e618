"""The tensors of a model's folder, in one safetensors file or split over several."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from twell_numba.errors import TwellError
from twell_numba.formats.tensor_file import DTYPES, StoredTensor, TensorFile, open_tensor_file
from twell_numba.models.published_layout import parameter_name
from twell_numba.models.reading import is_file, require_readable, unreadable

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = WEIGHTS_NAME + ".index.json"
_PICKLED_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class WeightFiles:
    """Open files of weights, of which tensors are asked for by their parameter's name.

    Attributes
    ----------
    path : Path
        The file, or the index of the files: what messages name.
    """

    def __init__(self, path: Path, files: list[TensorFile]) -> None:
        self.path = path
        self._place: dict[str, tuple[TensorFile, str]] = {}
        for file in files:
            for stored_name in file.tensors:
                name = parameter_name(stored_name)
                if name in self._place:
                    raise TwellError(
                        f"{path} leads to two tensors for {name}: fetch or save the model again"
                    )
                self._place[name] = (file, stored_name)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """What the files' headers say of each tensor."""
        return {name: file.tensors[stored] for name, (file, stored) in self._place.items()}

    def stored_name(self, name: str) -> str:
        """Return the name that a parameter's tensor has in its file."""
        return self._place[name][1]

    def read(self, name: str) -> np.ndarray:
        """Return a copy of a tensor."""
        file, stored_name = self._place[name]
        return file.read(stored_name)

    def map(self, name: str, dtype: DTypeLike) -> np.ndarray:
        """Return a tensor in the memory of its file, if that holds numbers of a dtype.

        Else a copy of it, to be converted. See :meth:`TensorFile.map`.
        """
        file, stored_name = self._place[name]
        is_of_dtype = DTYPES.get(file.tensors[stored_name].dtype) == np.dtype(dtype)
        return file.map(stored_name) if is_of_dtype else file.read(stored_name)


@contextmanager
def open_weight_files(folder: Path) -> Iterator[WeightFiles]:
    """Open the weights of a model's folder for reading in a ``with`` block.

    Raises
    ------
    TwellError
        If a file is missing, truncated or of another kind.
    """
    path, parts = _weight_paths(folder)
    with ExitStack() as stack:
        for part in parts:
            require_readable(part)
        yield WeightFiles(path, [stack.enter_context(open_tensor_file(part)) for part in parts])


def to_dtype(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return an array C-contiguous and of a dtype; without a copy where it is so already."""
    dtype = np.dtype(dtype)
    if array.dtype == ml_dtypes.bfloat16 and dtype == np.float32:
        # The upper half of a float32: several times as fast as the conversion of ml_dtypes.
        bits = np.empty(array.shape, np.uint32)
        np.left_shift(array.view(np.uint16), 16, out=bits, dtype=np.uint32)
        return bits.view(np.float32)
    return np.ascontiguousarray(array, dtype)


def _weight_paths(folder: Path) -> tuple[Path, list[Path]]:
    path, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if is_file(path) or not is_file(index):
        for name in _PICKLED_NAMES:
            if not is_file(path) and is_file(folder / name):
                raise TwellError(
                    f"{path} is missing, and {name} beside it is pickled, which can run code when "
                    f"it is opened: save the model as safetensors"
                )
        return path, [path]
    names = sorted(set(_read_index(index).values()))
    for name in names:
        if not is_file(folder / name):
            raise TwellError(
                f"{folder / name} is missing, one of {len(names)} files that {INDEX_NAME} names: "
                f"fetch it"
            )
    return index, [folder / name for name in names]


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of each tensor's file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise TwellError(f"{path} is not JSON: {error}; fetch or save it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise TwellError(f"{path} has no weight_map with the file of each tensor; fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise TwellError(
                f"{path} names {file!r} as the file of {name}, the name of a file beside it wanted"
            )
    return weight_map
