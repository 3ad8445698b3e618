"""A block-ELL matrix in a GPU's memory."""

import functools
from dataclasses import dataclass

import numpy as np

from twell_numba.device.gpu import DeviceArray, Stream, from_numpy
from twell_numba.formats import BlockELLMatrix


@dataclass(frozen=True, eq=False)
class BlockELLArrays:
    """A block-ELL matrix on a GPU; see :class:`twell_numba.formats.BlockELLMatrix`.

    Attributes
    ----------
    values : DeviceArray, shape (block_rows, blocks_per_row, b, b)
    block_columns : DeviceArray of int32 or int64, shape (block_rows, blocks_per_row)
    shape : tuple of int
    block_size : int
        b.
    """

    values: DeviceArray
    block_columns: DeviceArray
    shape: tuple[int, int]
    block_size: int

    @classmethod
    def from_host(cls, A: BlockELLMatrix, stream: Stream | None = None) -> "BlockELLArrays":
        """Return a copy of a matrix in the host's memory."""
        values, block_columns = from_numpy(A.values, stream), from_numpy(A.block_columns, stream)
        return cls(values, block_columns, A.shape, A.block_size)

    def to_host(self) -> BlockELLMatrix:
        """Return a copy in the host's memory."""
        values, block_columns = self.values.to_numpy(), self.block_columns.to_numpy()
        return BlockELLMatrix(values, block_columns, self.shape, block_size=self.block_size)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def slots(self) -> int:
        """Blocks that a row of blocks has room for."""
        return self.block_columns.shape[1]

    def with_values(self, values: DeviceArray) -> "BlockELLArrays":
        """Return a matrix of this pattern with other values; ``block_columns`` is shared."""
        if values.shape != self.values.shape:
            raise ValueError(f"values of shape {values.shape} given, {self.values.shape} wanted")
        other = BlockELLArrays(values, self.block_columns, self.shape, self.block_size)
        if "by_column" in self.__dict__:
            other.__dict__["by_column"] = self.by_column
        return other

    @functools.cached_property
    def by_column(self) -> tuple[DeviceArray, DeviceArray]:
        """The blocks of each column of blocks, rows ascending.

        Made in the host's memory, which waits for the GPU, when first needed.

        Returns
        -------
        starts : DeviceArray of int64, shape (columns of blocks + 1,)
        blocks : DeviceArray of int64, shape (blocks,)
            Each as its row of blocks times ``slots``, plus its slot.
        """
        columns = self.block_columns.to_numpy().reshape(-1).astype(np.int64)
        stored = np.flatnonzero(columns >= 0)
        order = np.argsort(columns[stored], kind="stable")
        count = -(-self.shape[1] // self.block_size)
        ends = np.cumsum(np.bincount(columns[stored], minlength=count))
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        stream = self.values.stream
        return from_numpy(starts, stream), from_numpy(stored[order], stream)
