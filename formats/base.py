"""What all sparse matrices share.

The arrays of a matrix are all NumPy's, or all on one GPU. Conversions and products run where they
are; what is left works on a copy in the host's memory (:func:`on_host`).

A format is a subclass of :class:`SparseMatrix`. It names its arrays and parameters, and provides a
constructor that takes them by name, ``_pack``, ``_pack_dense``, ``coordinates``, ``validate``,
``_layout``, and where its product kernels are. Conversions, comparison, copies, products and files
are written here once, in terms of those.
"""

import copy
import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from os import PathLike
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from twell_numba.formats.arrays import (
    Array,
    index_array,
    is_on_gpu,
    kernel_array,
    matrix_shape,
    refuse_gpu,
    value_array,
    value_dtype,
)

LARGEST_IMPLICIT_ARRAY = 2**24
"""Bytes of the largest dense array that NumPy gets without ``to_dense``."""

FORMATS: dict[str, type["SparseMatrix"]] = {}
"""The class of each format by its name in files."""

Method = TypeVar("Method", bound=Callable[..., Any])


def on_host(method: Method) -> Method:
    """Let a method of a matrix on a GPU work on a copy in the host's memory; it waits for the GPU.

    A decorator, for what is rare or returns NumPy's arrays anyway.
    """

    @functools.wraps(method)
    def work(self: "SparseMatrix", *arguments: Any, **options: Any) -> Any:
        matrix = self.to("cpu") if self.is_on_gpu else self
        return method(matrix, *arguments, **options)

    return work  # type: ignore[return-value]


class SparseMatrix(ABC):
    """A matrix of which only the nonzero entries are stored.

    Attributes
    ----------
    shape : tuple of int
        Rows and columns.
    """

    format_name: ClassVar[str]
    """The format's name in files, and of its product kernels: ``{format_name}_matmul``."""
    kernel_family: ClassVar[str]
    """The folder of ``twell_numba.kernels`` in which those are."""
    array_names: ClassVar[tuple[str, ...]]
    """The attributes that hold arrays; the constructor takes them by these names."""
    parameter_names: ClassVar[tuple[str, ...]] = ()
    """The whole-number attributes that the constructor needs beside the arrays and the shape."""
    knows_nnz: ClassVar[bool] = False
    """Whether ``nnz`` follows from the shapes of the arrays: then nothing is read to know it."""
    layout_names: ClassVar[tuple[str, ...]] = ()
    """The keywords that ``from_dense`` and the other conversions accept."""

    shape: tuple[int, int]
    derived: dict[str, Any]
    """What kernels have made of the pattern, to be made once; shared by all of this pattern."""

    # NumPy's operators leave `array @ matrix` and `array == matrix` to this class.
    __array_ufunc__ = None
    # Compared by value and changeable.
    __hash__ = None  # type: ignore[assignment]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "format_name" in cls.__dict__:
            FORMATS[cls.format_name] = cls

    def _hold(self, shape: Any, **arrays: Any) -> None:
        """Set the attributes, without copying arrays that kernels can use as they are."""
        owner = type(self).__name__
        self.shape = matrix_shape(shape, owner)
        self.derived = {}
        places = {name: device_of(array) for name, array in arrays.items()}
        if len(set(places.values())) > 1:
            given = ", ".join(f"{name} on {place}" for name, place in places.items())
            raise TypeError(f"{owner}: {given} given, one device for all wanted")
        for name, array in arrays.items():
            setattr(self, name, kernel_array(array))

    # ------------------------------------------------------------------ what a format provides

    @property
    @abstractmethod
    def dtype(self) -> np.dtype:
        """The dtype of the values."""

    @property
    @abstractmethod
    def nnz(self) -> int:
        """Number of stored entries; zeros that were stored on purpose count (``count_nonzero``)."""

    @abstractmethod
    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the stored entries as (rows, columns, values), by row and then by column.

        Each has shape (nnz,); rows and columns are int64. They are copies, in the host's memory.
        """

    @abstractmethod
    def validate(self) -> None:
        """Check every invariant of the format.

        Raises
        ------
        ValueError
            If one does not hold, with the row, what was given and what is wanted.
        TypeError
            If an array has the wrong dtype.
        """

    @classmethod
    @abstractmethod
    def _pack(
        cls,
        rows: np.ndarray,
        columns: np.ndarray,
        values: np.ndarray,
        shape: tuple[int, int],
        **layout: Any,
    ) -> Self:
        """Build a matrix from valid, nonzero entries in the order of ``coordinates``."""

    @classmethod
    @abstractmethod
    def _pack_dense(cls, dense: Array, **layout: Any) -> Self:
        """Build a matrix from the nonzero elements of an array of two dimensions.

        It has an accepted dtype in native byte order, and any strides. It may be on a GPU.
        """

    @classmethod
    @abstractmethod
    def _pack_rows(cls, entries: Any, **layout: Any) -> Self:
        """Build a matrix of all entries of a CSRMatrix on a GPU, zeros included."""

    @abstractmethod
    def _entry_rows(self, *, with_zeros: bool) -> Any:
        """Return a matrix on a GPU as a CSRMatrix of its nonzero entries, or of all."""

    @abstractmethod
    def _dense_on_gpu(self) -> Array:
        """Return a matrix on a GPU as a dense array there."""

    @abstractmethod
    def _layout(self) -> dict[str, int]:
        """Return the keywords with which ``_pack`` lays a matrix out as this one is."""

    def _kernel(self, operation: str) -> Callable[..., Any]:
        """Return a product kernel of this format; kernels are imported only when they are used."""
        family = importlib.import_module(f"twell_numba.kernels.{self.kernel_family}")
        return getattr(family, f"{self.format_name}_{operation}")

    def _padding(self) -> dict[str, np.ndarray]:
        """Return masks of the elements that no operation reads, by the names of their arrays."""
        return {}

    def _arrays_to_save(self) -> dict[str, np.ndarray]:
        """Return the arrays by name as they go into files, with zeros in place of padding."""
        arrays = {name: getattr(self, name) for name in self.array_names}
        for name, padding in self._padding().items():
            arrays[name] = arrays[name].copy()
            arrays[name][padding] = 0
        return arrays

    # ------------------------------------------------------------------ conversions

    @classmethod
    def from_dense(cls, dense: Any, **layout: Any) -> Self:
        """Store the nonzero entries of a dense matrix.

        Parameters
        ----------
        dense : array, shape (rows, columns)
            float64, float32, float16 or bfloat16, with any strides and byte order. Not changed. Of
            an array on a GPU the matrix is there too.
        **layout
            How the format lays them out; see the class.

        Raises
        ------
        TypeError
            If the dtype is another (convert with ``astype``) or a layout keyword is unknown.
        ValueError
            If ``dense`` has not two dimensions.
        """
        owner = f"{cls.__name__}.from_dense"
        cls._check_layout(layout)
        if isinstance(dense, SparseMatrix):
            raise TypeError(f"{owner}: sparse matrix given, dense array wanted; use from_sparse")
        if hasattr(dense, "tocoo"):
            raise TypeError(f"{owner}: sparse matrix given, dense array wanted; use from_scipy")
        if is_on_gpu(dense):
            value_dtype(dense.dtype, owner)
        array = dense if is_on_gpu(dense) else value_array(dense, owner)
        if array.ndim != 2:
            raise ValueError(f"{owner}: {array.ndim} dimensions given, 2 wanted")
        return cls._pack_dense(array, **layout)

    @classmethod
    def from_sparse(cls, matrix: "SparseMatrix", **layout: Any) -> Self:
        """Store the nonzero entries of a matrix of any of this package's formats.

        Parameters
        ----------
        matrix : SparseMatrix
            Not changed; no array is shared with it. Its stored zeros are left out. Of a matrix on a
            GPU the new one is there too; only sizes are read back.
        **layout
            How the format lays them out; see the class.

        Raises
        ------
        TypeError
            If ``matrix`` is another kind of object or a layout keyword is unknown.
        """
        cls._check_layout(layout)
        if not isinstance(matrix, SparseMatrix):
            raise TypeError(
                f"{cls.__name__}.from_sparse: {type(matrix).__name__} given, a matrix of "
                "twell_numba.formats wanted; use from_scipy or from_dense"
            )
        if matrix.is_on_gpu:
            return cls._pack_rows(matrix._entry_rows(with_zeros=False), **layout)
        rows, columns, values = matrix.coordinates()
        kept = is_nonzero(values)
        return cls._pack(rows[kept], columns[kept], values[kept], matrix.shape, **layout)

    @classmethod
    def from_coordinates(
        cls, rows: Any, columns: Any, values: Any, shape: tuple[int, int], **layout: Any
    ) -> Self:
        """Store entries given by their places, in any order.

        Entries at the same place are added up, in float64. Zeros are left out.

        Parameters
        ----------
        rows, columns : arrays of whole numbers, shape (nnz,)
        values : array, shape (nnz,)
        shape : tuple of int
            Rows and columns of the matrix.
        **layout
            How the format lays them out; see the class.

        Raises
        ------
        TypeError
            If a dtype is not accepted or a layout keyword is unknown.
        ValueError
            If an index is out of range, the lengths differ, or a sum is too large for the dtype.
        """
        owner = f"{cls.__name__}.from_coordinates"
        cls._check_layout(layout)
        shape = matrix_shape(shape, owner)
        values = value_array(values, owner)
        rows = index_array(rows, shape[0], f"{owner}: rows")
        columns = index_array(columns, shape[1], f"{owner}: columns")
        if not rows.shape == columns.shape == values.shape:
            raise ValueError(
                f"{owner}: shapes {rows.shape}, {columns.shape} and {values.shape} given "
                "for rows, columns and values, equal ones wanted"
            )
        rows, columns, values = _sum_duplicates(rows, columns, values, owner)
        kept = is_nonzero(values)
        return cls._pack(rows[kept], columns[kept], values[kept], shape, **layout)

    @classmethod
    def from_scipy(cls, matrix: Any, **layout: Any) -> Self:
        """Store the entries of a SciPy sparse matrix or array of any format.

        Duplicate entries are added up, stored zeros are left out, ``matrix`` is not changed.

        Raises
        ------
        TypeError
            If ``matrix`` is not SciPy's, or its dtype is not accepted.
        ValueError
            If it has not two dimensions, or its arrays contradict each other.
        """
        import scipy.sparse

        owner = f"{cls.__name__}.from_scipy"
        refuse_gpu(matrix, owner)
        if not scipy.sparse.issparse(matrix):
            raise TypeError(f"{owner}: {type(matrix).__name__} given, a SciPy sparse matrix wanted")
        if len(matrix.shape) != 2:
            raise ValueError(f"{owner}: {len(matrix.shape)} dimensions given, 2 wanted")
        value_dtype(matrix.dtype, owner)
        if matrix.format in ("csr", "csc", "bsr"):
            # SciPy's own conversion trusts the arrays: it reads what lies beyond the last pointer
            # as entries. Its check cuts that off, in place, so it is done on a copy.
            matrix = matrix.copy()
            matrix.check_format(full_check=True)
        entries = matrix.tocoo()
        return cls.from_coordinates(entries.row, entries.col, entries.data, matrix.shape, **layout)

    @classmethod
    def _check_layout(cls, layout: dict[str, Any]) -> None:
        for name in layout:
            if name not in cls.layout_names:
                accepted = f"one of {', '.join(cls.layout_names)}" if cls.layout_names else "none"
                raise TypeError(f"{cls.__name__}: layout keyword {name!r} given, {accepted} wanted")

    def to_dense(self) -> Array:
        """Return the matrix as a C-contiguous array of shape ``shape`` and the same dtype.

        Of a matrix on a GPU it is an array there.
        """
        if self.is_on_gpu:
            return self._dense_on_gpu()
        rows, columns, values = self.coordinates()
        dense = np.zeros(self.shape, self.dtype)
        dense[rows, columns] = values
        return dense

    @on_host
    def to_scipy(self, format: str = "csr") -> Any:
        """Return the matrix as a SciPy sparse array, such as ``scipy.sparse.csr_array``.

        Zeros are left out, but for those inside the blocks of ``"bsr"``; no array is shared. SciPy
        knows neither float16 nor bfloat16: those become float32, which holds them exactly.

        Parameters
        ----------
        format : str
            ``"csr"``, ``"csc"``, ``"coo"``, ``"bsr"`` or another of SciPy's formats.
        """
        import scipy.sparse

        rows, columns, values = self.coordinates()
        kept = is_nonzero(values)
        entries = (widened_for_scipy(values[kept]), (rows[kept], columns[kept]))
        return scipy.sparse.csr_array(entries, shape=self.shape).asformat(format)

    def astype(self, dtype: Any) -> Self:
        """Return a copy with values of another dtype, in the same layout.

        Values that round to zero are no longer stored. Values too large for the dtype become
        infinite with NumPy's ``RuntimeWarning`` (on a GPU without).
        """
        target = value_dtype(dtype, f"{type(self).__name__}.astype")
        if self.is_on_gpu:
            from twell_numba.kernels.conversion.cuda import converted

            entries = self._entry_rows(with_zeros=False)
            entries = entries.with_values(converted(entries.data, target))
            return self._pack_rows(entries._entry_rows(with_zeros=False), **self._layout())
        rows, columns, values = self.coordinates()
        values = values.astype(target)
        kept = is_nonzero(values)
        return self._pack(rows[kept], columns[kept], values[kept], self.shape, **self._layout())

    @property
    def is_on_gpu(self) -> bool:
        """Whether the arrays are in a GPU's memory."""
        return is_on_gpu(getattr(self, self.array_names[0]))

    @property
    def device(self) -> str:
        """Where the arrays are: ``"cpu"``, or ``"cuda:N"`` for GPU N."""
        return device_of(getattr(self, self.array_names[0]))

    def to(self, device: Any) -> Self:
        """Return the matrix on a device: the matrix itself where it is there already.

        Parameters
        ----------
        device : str or twell_numba.device.gpu.Stream
            ``"cpu"``, ``"cuda"`` (the first GPU) or ``"cuda:N"``. A stream stands for its GPU;
            work with the matrix then goes to it.

        Raises
        ------
        TwellError
            If there is no such GPU, too little memory on it, or the extra ``cuda`` is missing.
        ValueError
            For any other name.
        """
        if str(device) == "cpu":
            return self._with_arrays(lambda array: array.to_numpy()) if self.is_on_gpu else self
        from twell_numba.device.gpu import Stream, choose, empty, from_numpy

        if not isinstance(device, Stream) and str(device).partition(":")[0] != "cuda":
            raise ValueError(f"device {device!r} given, 'cpu', 'cuda' or 'cuda:N' wanted")
        stream = device if isinstance(device, Stream) else choose(str(device)).stream
        if not self.is_on_gpu:
            return self._with_arrays(lambda array: from_numpy(array, stream))
        first = getattr(self, self.array_names[0])
        if first.gpu is not stream.gpu:
            return self.to("cpu").to(stream)
        if device is not stream or first.stream is stream:
            return self

        def copied(array: Array) -> Array:
            result = empty(array.shape, array.dtype, stream)
            result.copy_from(array)
            return result

        return self._with_arrays(copied)

    def copy(self) -> Self:
        """Return an independent copy: no array is shared."""
        if self.is_on_gpu:
            return self._with_arrays(lambda array: array.copy())
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy take: the arrays, not what kernels made of them."""
        self._refuse_gpu("one in the host's memory, or copy(),")
        return {**self.__dict__, "derived": {}}

    def _of_same_pattern(self, **arrays: Array) -> Self:
        """Return a matrix with these arrays of values; what belongs to the pattern is shared."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **arrays)
        return other

    def _with_arrays(self, change: Callable[[Array], Array]) -> Self:
        """Return a matrix with ``change(array)`` for each array of this one."""
        arrays = {name: change(getattr(self, name)) for name in self.array_names}
        parameters = {name: getattr(self, name) for name in self.parameter_names}
        construct: Callable[..., Self] = type(self)
        return construct(**arrays, shape=self.shape, **parameters, validate=False)

    @property
    def T(self) -> Self:
        """The transpose, a new matrix of the same format and layout.

        It is built anew each time, in O(nnz + rows + columns): keep it where it is used more than
        once, or multiply with :meth:`transposed_matmul`. Stored zeros stay stored.
        """
        if self.is_on_gpu:
            return self._pack_rows(self._entry_rows(with_zeros=True).T, **self._layout())
        from twell_numba.formats.csr import CSRMatrix

        transpose = CSRMatrix._pack(*self.coordinates(), self.shape).T
        rows, columns, values = transpose.coordinates()
        return self._pack(rows, columns, values, transpose.shape, **self._layout())

    # ------------------------------------------------------------------ measures

    def count_nonzero(self) -> int:
        """Return the number of entries that are not zero (NaN is not zero)."""
        return int(np.count_nonzero(is_nonzero(self.coordinates()[2])))

    def row_lengths(self) -> np.ndarray:
        """Return the number of stored entries of each row, int64, shape (rows,)."""
        return np.bincount(self.coordinates()[0], minlength=self.shape[0])

    @property
    def density(self) -> float:
        """The fraction of the matrix that is not zero; 0.0 for a matrix without elements."""
        size = self.shape[0] * self.shape[1]
        return self.count_nonzero() / size if size else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take, padding included."""
        return sum(getattr(self, name).nbytes for name in self.array_names)

    # ------------------------------------------------------------------ operators

    def __matmul__(self, X: Any) -> Array:
        """Return the product with a dense vector or matrix, an array where both are.

        Parameters
        ----------
        X : array, shape (columns,) or (columns, N)
            A DeviceArray for a matrix on a GPU.

        Returns
        -------
        array, shape (rows,) or (rows, N)
            Of the wider of the two dtypes (float32 for float16 with bfloat16). Rows without entries
            are +0.0.

        Raises
        ------
        TypeError
            If ``X`` is sparse or not of an accepted dtype.
        ValueError
            If the shapes do not fit.
        """
        return self._kernel("matmul")(self, X)

    def __rmatmul__(self, X: Any) -> Array:
        """Return ``X @ A`` of a dense vector or matrix ``X``; as ``A @ X``.

        Parameters
        ----------
        X : array, shape (rows,) or (N, rows)

        Returns
        -------
        array, shape (columns,) or (N, columns)
        """
        return self._kernel("left_matmul")(X, self)

    def matmul(self, X: Any, out: Array | None = None) -> Array:
        """Return ``A @ X``, in ``out`` if that is given.

        Parameters
        ----------
        X : array, shape (columns,) or (columns, N)
        out : array, shape (rows,) or (rows, N), optional
            Of the result's dtype, with any strides; overwritten and returned. It may share memory
            with ``X``.

        Raises
        ------
        TypeError, ValueError
            As ``A @ X``; also if ``out`` has the wrong dtype or shape, or is read-only.
        """
        return self._kernel("matmul")(self, X, out)

    def transposed_matmul(self, X: Any, out: Array | None = None) -> Array:
        """Return ``A.T @ X`` without building the transpose; as :meth:`matmul`.

        Parameters
        ----------
        X : array, shape (rows,) or (rows, N)
        out : array, shape (columns,) or (columns, N), optional
        """
        return self._kernel("transposed_matmul")(self, X, out)

    def left_matmul(self, X: Any, out: Array | None = None) -> Array:
        """Return ``X @ A``; as :meth:`matmul`.

        Parameters
        ----------
        X : array, shape (rows,) or (N, rows)
        out : array, shape (columns,) or (N, columns), optional
        """
        return self._kernel("left_matmul")(X, self, out)

    def sampled_product(self, Y: Any, X: Any, out: Self | None = None) -> Self:
        """Return the values of ``Y @ X.T`` at this matrix's entries, and nothing elsewhere.

        This is the gradient of ``A`` in ``A @ X`` on A's pattern, where Y is that of the product.

        Parameters
        ----------
        Y : array, shape (rows, D)
        X : array, shape (columns, D)
        out : matrix, optional
            Of this format and pattern and the result's dtype; its values are overwritten and it is
            returned.

        Returns
        -------
        matrix
            Of this format, layout and pattern, and of the wider dtype of ``Y`` and ``X`` (float32
            for float16 with bfloat16). Stored zeros are entries, so that block-ELL has all elements
            of its blocks. Index arrays are shared with this matrix.

        Raises
        ------
        TypeError
            If an operand has the wrong type or dtype.
        ValueError
            If the shapes or patterns do not fit.
        """
        return self._kernel("sampled_product")(self, Y, X, out)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same matrix, by value.

        Format, layout, dtype, stored zeros, the sign of zeros and the device make no difference;
        NaN equals NaN in the same place.
        """
        if not isinstance(other, SparseMatrix):
            return NotImplemented
        if self.shape != other.shape:
            return False
        own, others = _nonzero_coordinates(self), _nonzero_coordinates(other)
        return (
            np.array_equal(own[0], others[0])
            and np.array_equal(own[1], others[1])
            and np.array_equal(own[2], others[2], equal_nan=True)
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return ``to_dense()`` for NumPy, of a matrix that is small when dense.

        Raises
        ------
        TypeError
            If the dense array would take more than :data:`LARGEST_IMPLICIT_ARRAY` bytes: that much
            only ``to_dense()`` makes, so that it does not happen by accident. Also for a matrix on
            a GPU.
        ValueError
            If ``copy`` is False: a dense array is always a new one.
        """
        self._refuse_gpu("a NumPy array")
        size = self.shape[0] * self.shape[1] * self.dtype.itemsize
        if size > LARGEST_IMPLICIT_ARRAY:
            raise TypeError(
                f"{type(self).__name__} given where a dense array is wanted, which would take "
                f"{_readable_size(size)} (at most {_readable_size(LARGEST_IMPLICIT_ARRAY)} is made "
                "implicitly); use to_dense()"
            )
        if copy is False:
            raise ValueError(f"{type(self).__name__} cannot become a dense array without a copy")
        dense = self.to_dense()
        return dense if dtype is None else dense.astype(dtype, copy=False)

    def aslinearoperator(self) -> Any:
        """Return a ``scipy.sparse.linalg.LinearOperator`` of this matrix, for SciPy's solvers.

        It keeps the matrix, without a copy, and multiplies through the kernels.

        Raises
        ------
        TypeError
            For a matrix on a GPU.
        """
        self._refuse_gpu("one in the host's memory")
        from twell_numba.formats.linear_operator import MatrixOperator

        return MatrixOperator(self)

    def _refuse_gpu(self, wanted: str) -> None:
        if self.is_on_gpu:
            raise TypeError(
                f"{type(self).__name__} on {self.device} given, {wanted} wanted; use .to('cpu')"
            )

    def __repr__(self) -> str:
        rows, columns = self.shape
        parts = []
        if self.knows_nnz or not self.is_on_gpu:  # where counting would wait
            nnz = self.nnz
            parts += [f"{nnz:,} stored entries ({nnz / max(rows * columns, 1):.2%})"]
        parts += [f"{name} {value}" for name, value in self._layout().items()]
        parts += [*self._notes(), _readable_size(self.nbytes)]
        parts += [f"on {self.device}"] if self.is_on_gpu else []
        return f"<{type(self).__name__} {rows} x {columns} {self.dtype.name}: {', '.join(parts)}>"

    def _notes(self) -> list[str]:
        """Return what a format adds to its ``repr``."""
        return []

    # ------------------------------------------------------------------ files

    def save(self, path: str | PathLike[str]) -> None:
        """Write the matrix to one safetensors file, whole or not at all.

        Raises
        ------
        TwellError
            If the file cannot be written; what stood there before is then untouched.
        """
        from twell_numba.formats.files import save

        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a matrix that ``save`` wrote.

        Raises
        ------
        TwellError
            If the file is missing, truncated, not a matrix of this format or not valid.
        """
        from twell_numba.formats.files import load_as

        return load_as(cls, path)


def device_of(array: Array) -> str:
    """Return the name of the device that holds an array."""
    return f"cuda:{array.gpu.id}" if is_on_gpu(array) else "cpu"


def widened_for_scipy(values: np.ndarray) -> np.ndarray:
    """Return values in a dtype that SciPy's sparse arrays take: float32 for those of 16 bits."""
    return values.astype(np.float32) if values.dtype.itemsize == 2 else values


def is_nonzero(values: np.ndarray) -> np.ndarray:
    """Return where values are not zero: neither 0.0 nor -0.0; NaN is not zero."""
    return values != values.dtype.type(0)


def _nonzero_coordinates(matrix: SparseMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the coordinates without stored zeros, values in float64, which holds all dtypes."""
    rows, columns, values = matrix.coordinates()
    kept = is_nonzero(values)
    return rows[kept], columns[kept], values[kept].astype(np.float64)


def _sum_duplicates(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, owner: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort entries by row and column, and add up those at the same place."""
    same_row = rows[1:] == rows[:-1]
    if np.all((rows[1:] > rows[:-1]) | (same_row & (columns[1:] > columns[:-1]))):
        return rows, columns, values
    order = np.lexsort((columns, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    is_first = np.ones(rows.size, bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    if is_first.all():
        return rows, columns, values
    first = np.flatnonzero(is_first)
    rows, columns = rows[first], columns[first]
    # inf - inf is NaN, as in a dense sum: a value, not a mistake.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduceat(values.astype(np.float64), first)
        narrowed = sums.astype(values.dtype)
    all_finite = np.logical_and.reduceat(np.isfinite(values.astype(np.float64)), first)
    overflowed = all_finite & ~np.isfinite(narrowed.astype(np.float64))
    if overflowed.any():
        place = int(np.flatnonzero(overflowed)[0])
        raise ValueError(
            f"{owner}: entries at row {rows[place]}, column {columns[place]} add up to "
            f"{sums[place]:g}, too large for {values.dtype.name}; give smaller values or a wider "
            "dtype"
        )
    return rows, columns, narrowed


def _readable_size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"
