"""Weights held as 8-bit floats, for layers that only compute forward.

    W[j, d] = scales[j] * numbers[j, d],    scales[j] = max_d |W[j, d]| / 448

with the numbers in e4m3: a sign, four bits of exponent and three of mantissa, at most 448, without
infinities. A number is off by at most 1/16 of itself, or by 2^-10 scales[j] where it is small.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from twell_numba.device.arrays import Array, is_on_gpu, to_host
from twell_numba.kernels.checks import require_shape

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = float(ml_dtypes.finfo(FLOAT8).max)


@dataclass(frozen=True, slots=True)
class Float8Weights:
    """A matrix of 8-bit floats with a scale for each row.

    Attributes
    ----------
    numbers : ndarray or DeviceArray of uint8, shape (F, D)
        Bits of e4m3 numbers, none of them NaN.
    scales : ndarray or DeviceArray of float32, shape (F,)
        NaN for a row of which a number was not finite: all of it is NaN.
    dtype : dtype
        Of the matrix it was made of.
    """

    numbers: Array
    scales: Array
    dtype: np.dtype

    @classmethod
    def from_dense(cls, matrix: Array) -> "Float8Weights":
        """Round a matrix to nearest, ties to even; one on a GPU is waited for.

        Parameters
        ----------
        matrix : ndarray or DeviceArray of floats, shape (F, D)

        Raises
        ------
        ValueError
            If it has another number of dimensions.
        """
        require_shape("matrix", matrix, ("F", "D"))
        numbers, scales = _rounded(to_host(matrix))
        weights = cls(numbers, scales, matrix.dtype)
        return weights.to(matrix.stream) if is_on_gpu(matrix) else weights

    def to_dense(self, dtype: DTypeLike | None = None) -> Array:
        """Return the matrix, where the numbers are.

        Parameters
        ----------
        dtype : dtype of floats, optional
            That of the matrix it was made of, if not given.
        """
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        if self.is_on_gpu:
            from twell_numba.kernels.twell.float8_rows import to_dense

            return to_dense(self, dtype)
        wide = np.result_type(dtype, np.float32)
        return (self.numbers.view(FLOAT8).astype(wide) * self.scales[:, None]).astype(dtype)

    def to(self, stream: Any) -> "Float8Weights":
        """Return the same weights in the memory of a stream's GPU, or of the host for ``"cpu"``."""
        if stream == "cpu":
            return Float8Weights(to_host(self.numbers), to_host(self.scales), self.dtype)
        from twell_numba.device.gpu import from_numpy

        numbers = from_numpy(to_host(self.numbers), stream)
        return Float8Weights(numbers, from_numpy(to_host(self.scales), stream), self.dtype)

    @property
    def is_on_gpu(self) -> bool:
        """Whether they are in a GPU's memory."""
        return is_on_gpu(self.numbers)

    @property
    def shape(self) -> tuple[int, int]:
        """F and D."""
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        """Bytes that numbers and scales take."""
        return self.numbers.nbytes + self.scales.nbytes


def _rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of the rounded numbers, and each row's scale."""
    wide = matrix.astype(np.result_type(matrix.dtype, np.float32))
    largest = np.abs(wide).max(axis=1, initial=0)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (largest / LARGEST).astype(np.float32)
        scales[~np.isfinite(scales)] = np.nan
        # of zeros, and where NaN would come out, stay zeros
        numbers = np.divide(
            wide, scales[:, None], out=np.zeros_like(wide), where=scales[:, None] > 0
        )
    # a scale that is subnormal is so coarse that the quotient can be above the largest number
    np.clip(numbers, -LARGEST, LARGEST, out=numbers)
    return numbers.astype(FLOAT8).view(np.uint8), scales
