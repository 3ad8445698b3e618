"""What an activation-sparse forward pass on a GPU hands to its backward pass."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from twell_numba.device.gpu import DeviceArray
from twell_numba.formats import TwELLMatrix


class TailSource(NamedTuple):
    """What rows of the tail are computed anew from, as it is when they are asked for.

    Attributes
    ----------
    x : DeviceArray, shape (M, D)
        Kept as long as the activations are.
    weight : DeviceArray, shape (F, D)
        That decides which neurons fire.
    state : DeviceArray of int32, shape (2,)
        Zeros, which the kernels count with.
    """

    x: DeviceArray
    weight: DeviceArray
    state: DeviceArray


class HotNeurons(NamedTuple):
    """Neurons that fire for so many tokens that their weight gradients are dense products.

    Attributes
    ----------
    neurons : DeviceArray of int32, shape (H,)
        Ascending.
    is_hot : DeviceArray of int32, shape (F,)
        1 for each of them, otherwise 0.
    """

    neurons: DeviceArray
    is_hot: DeviceArray


@dataclass(slots=True)
class DeviceActivations:
    """The hidden activations of a feedforward layer in TwELL's layout, on a GPU.

    A row of which a tile overflows is in the *tail*: it is read from the dense product that decided
    which neurons fire, or computed anew. So nothing has to be known about the tail on the host, and
    nothing can fail to fit.

    Attributes
    ----------
    neurons : int
        F, the number of hidden units.
    tile, slots : int
        T, neurons a tile, and entries it has room for.
    gated : bool
    values : DeviceArray, shape (M, tiles * slots)
        ``relu(g)`` of a gated layer, ``h`` of a two-matrix layer. Entries past a tile's count are
        arbitrary.
    columns : DeviceArray of uint16, shape (M, tiles * slots)
        Neuron of each entry, as an offset inside its tile.
    counts : DeviceArray of int32, shape (M, tiles)
        Entries in each tile; 0 in every tile of a row in the tail.
    up_values : DeviceArray, shape (M, tiles * slots)
        ``u`` at the same entries; without elements in a two-matrix layer.
    tail_rows : DeviceArray of int32, shape (M,)
        Ascending rows of which a tile overflows, ``tail_count`` of them; then anything.
    tail_count : DeviceArray of int32, shape (1,)
    tail_values : DeviceArray, shape (M, F), or (tail_count, F) if ``is_compact``
        Products before the ReLU or after it: of all rows (those of the tail are read), or of the
        tail's. Without elements if there is a ``tail_source``.
    is_compact : bool
    row_nonzeros : DeviceArray of int32, shape (M,)
        Entries of each row of h that are not 0.
    row_absolute_sums : DeviceArray of float32 or float64, shape (M,)
        Sum of |h| of each row.
    fired : DeviceArray of bool, shape (F,)
        Whether the neuron's h was not 0 for at least one row.
    overflows : DeviceArray of int32, shape (ceil(M / 32),), or None
        A bit a row: whether it is in the tail. None after decoding.
    tail_source : TailSource or None
        What the tail is computed anew from.
    token_order : DeviceArray of int32, shape (M,), or None
        All tokens, in the order of the blocks that share their neurons; None if none do. Blocks
        that cannot are in the tail.
    hot : HotNeurons or None
        Neurons whose weight gradients are to be dense products; None if none are.
    """

    is_on_gpu: ClassVar[bool] = True

    neurons: int
    tile: int
    slots: int
    gated: bool
    values: DeviceArray
    columns: DeviceArray
    counts: DeviceArray
    up_values: DeviceArray
    tail_rows: DeviceArray
    tail_count: DeviceArray
    tail_values: DeviceArray
    is_compact: bool
    row_nonzeros: DeviceArray
    row_absolute_sums: DeviceArray
    fired: DeviceArray
    overflows: DeviceArray | None = None
    tail_source: TailSource | None = None
    token_order: DeviceArray | None = None
    hot: HotNeurons | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """M and F."""
        return self.counts.shape[0], self.neurons

    @property
    def tiles(self) -> int:
        """Tiles a row."""
        return self.counts.shape[1]

    def pattern(self) -> TwELLMatrix:
        """Return a copy, in the host's memory, of the matrix that decided which neurons fire."""
        count = int(self.tail_count.to_numpy()[0])
        rows = self.tail_rows.to_numpy()[:count].astype(np.int64)
        tail = self._tail(rows)
        places = (*self.counts.shape, self.slots)
        return TwELLMatrix(
            self.values.to_numpy().reshape(places),
            self.columns.to_numpy().reshape(places),
            self.counts.to_numpy(),
            self.shape,
            tile=self.tile,
            tail_rows=rows,
            tail_values=np.where(tail <= 0, tail.dtype.type(0), tail),
            validate=False,
        )

    def _tail(self, rows: np.ndarray) -> np.ndarray:
        if self.tail_source is not None:
            from twell_numba.kernels.twell.dense_tail import positive_rows

            x, weight, state = self.tail_source
            listed = (self.tail_rows, self.tail_count, state)
            return positive_rows(x, weight, *listed, rows.size).to_numpy()[:, : self.neurons]
        tail = self.tail_values.to_numpy()
        return tail if self.is_compact else tail[rows]
