"""What a sparse forward pass hands to its backward pass: the activations that are not zero."""

from dataclasses import dataclass, field

import numpy as np

from twell_numba.formats import TwELLMatrix


@dataclass(slots=True)
class PackedActivations:
    """The hidden activations of a feedforward layer in TwELL's layout.

    Attributes
    ----------
    neurons : int
        F, the number of hidden units.
    tile : int
        T, neurons a tile.
    slots : int
        Entries a tile has room for. The tiles of a row lie one after another, so that an entry's
        place in its row is one number.
    values : ndarray, shape (M, tiles * slots)
        ``relu(g)`` of a gated layer (or its square), ``h`` of a two-matrix layer. Entries past a
        tile's count are arbitrary.
    columns : ndarray of uint16, shape (M, tiles * slots)
        Neuron of each entry, as an offset inside its tile.
    counts : ndarray of int32, shape (M, tiles)
        Entries in each tile; 0 in every tile of a row that is kept in the tail.
    up_values : ndarray, shape (M, tiles * slots), or None
        ``u`` at the same entries; None in a two-matrix layer.
    tail_rows : ndarray of int64, shape (R,)
        Ascending rows of which a tile overflows.
    tail_values, up_tail : ndarray, shape (R, F)
        Those rows of ``relu(g)`` (or ``h``) and of ``u``, dense.
    """

    neurons: int
    tile: int
    slots: int
    values: np.ndarray
    columns: np.ndarray
    counts: np.ndarray
    up_values: np.ndarray | None
    tail_rows: np.ndarray
    tail_values: np.ndarray
    up_tail: np.ndarray | None = field(default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """M and F."""
        return self.counts.shape[0], self.neurons

    def pattern(self) -> TwELLMatrix:
        """Return the matrix that decided which neurons fire, without copies."""
        return self._matrix(self.values, self.tail_values)

    def hidden(self) -> TwELLMatrix:
        """Return h: the pattern's values, times u in a gated layer."""
        if self.up_values is None or self.up_tail is None:
            return self.pattern()
        # Padding may hold anything, and is left as it is: its product could overflow, or be NaN.
        place_in_tile = np.arange(self.values.shape[1]) % self.slots
        stored = place_in_tile < np.repeat(self.counts, self.slots, axis=1)
        hidden = self.values.copy()
        np.multiply(hidden, self.up_values, out=hidden, where=stored)
        return self._matrix(hidden, self.tail_values * self.up_tail)

    def _matrix(self, values: np.ndarray, tail_values: np.ndarray) -> TwELLMatrix:
        tiles = (*self.counts.shape, self.slots)
        return TwELLMatrix(
            values.reshape(tiles),
            self.columns.reshape(tiles),
            self.counts,
            self.shape,
            tile=self.tile,
            tail_rows=self.tail_rows,
            tail_values=tail_values,
            validate=False,
        )
