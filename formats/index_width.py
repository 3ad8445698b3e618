"""How wide the integers are that number columns and entries.

The width follows from the largest number that has to be held: a count of entries for pointers, a
count of columns for column numbers. Never is one chosen for the other's sake.
"""

import numpy as np

NARROW = np.dtype(np.int32)
"""The dtype of small index arrays. A test puts a narrower one here, to reach the limit quickly."""
WIDE = np.dtype(np.int64)


def index_dtype(largest: int) -> np.dtype:
    """Return the narrowest dtype of index arrays that holds ``largest``."""
    return NARROW if largest <= np.iinfo(NARROW).max else WIDE


def require_index_dtype(array: np.ndarray, name: str) -> None:
    """Raise TypeError unless an array has one of the two dtypes of index arrays."""
    if array.dtype not in (NARROW, WIDE):
        raise TypeError(
            f"{name} of dtype {array.dtype.name} given, {NARROW.name} or {WIDE.name} wanted"
        )
