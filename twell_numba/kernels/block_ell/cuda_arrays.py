"""What products with the transpose of a block-ELL matrix on a GPU need, made once for a pattern."""

from twell_numba.device.gpu import DeviceArray
from twell_numba.formats import BlockELLMatrix
from twell_numba.kernels.conversion.cuda import blocks_by_column
from twell_numba.kernels.device_products import once_for_pattern


def by_column(A: BlockELLMatrix) -> tuple[DeviceArray, DeviceArray]:
    """Return the blocks of each column of blocks, rows ascending.

    Made at the first call, without waiting.

    Returns
    -------
    starts : DeviceArray, shape (columns of blocks + 1,)
    blocks : DeviceArray, shape (block_rows * blocks_per_row,)
        Each as its row of blocks times ``blocks_per_row``, plus its slot; as many as ``starts``
        says.
    """
    return once_for_pattern(A, "by_column", lambda: blocks_by_column(A))
