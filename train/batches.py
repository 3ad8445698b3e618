"""Windows of tokens: random ones to train on, fixed ones to validate on."""

from typing import Any

import numpy as np

from twell_numba.errors import TwellError


class BatchSampler:
    """Draws windows at random positions, with a generator of its own.

    Parameters
    ----------
    tokens : ndarray of integers, shape (N,)
        May be memory-mapped; only the windows drawn are read.
    context_length : int
        S; a window is S + 1 tokens: S inputs and, shifted by one, S targets.
    rng : numpy.random.Generator
        Used by nothing else, so that its state is the sampler's position in the data.

    Raises
    ------
    TwellError
        If there are fewer than ``context_length + 1`` tokens.
    """

    def __init__(self, tokens: np.ndarray, context_length: int, rng: np.random.Generator) -> None:
        require_window(tokens, context_length, "training")
        self._tokens = tokens
        self._context_length = context_length
        self._rng = rng
        # The windows that were looked at before they are drawn, and the state before that.
        self._ahead: tuple[np.ndarray, dict[str, Any]] | None = None

    def draw(self, count: int) -> np.ndarray:
        """Return windows, int64 of shape (count, S + 1)."""
        windows = self.peek(count)
        self._ahead = None
        return windows

    def peek(self, count: int) -> np.ndarray:
        """Return what the next :meth:`draw` will return; both of as many windows."""
        if self._ahead is None:
            state = self.state_dict()
            self._ahead = self._draw(count), state
        return self._ahead[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, made of numbers and strings that JSON can hold."""
        if self._ahead is not None:
            return self._ahead[1]
        return self._rng.bit_generator.state  # type: ignore[return-value]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on drawing from where :meth:`state_dict` was taken."""
        self._ahead = None
        self._rng.bit_generator.state = state

    def _draw(self, count: int) -> np.ndarray:
        starts = self._rng.integers(0, len(self._tokens) - self._context_length, size=count)
        return _windows(self._tokens, starts, self._context_length)


def validation_windows(tokens: np.ndarray, context_length: int, count: int) -> np.ndarray:
    """Return the same windows at every call: evenly spaced, no target in two of them.

    Parameters
    ----------
    tokens : ndarray of integers, shape (N,)
    context_length : int
        S.
    count : int
        How many windows are wanted; as many as fit if that is fewer.

    Returns
    -------
    ndarray of int64, shape (windows, S + 1)

    Raises
    ------
    TwellError
        If not even one window fits.
    """
    require_window(tokens, context_length, "held-out")
    fitting = (len(tokens) - 1) // context_length
    count = min(count, fitting)
    starts = np.arange(count) * fitting // count * context_length
    return _windows(tokens, starts, context_length)


def require_window(tokens: np.ndarray, context_length: int, which: str) -> None:
    """Refuse tokens that do not hold one window of ``context_length + 1``.

    Raises
    ------
    TwellError
    """
    if len(tokens) < context_length + 1:
        raise TwellError(
            f"{len(tokens)} {which} tokens given, at least context_length + 1 = "
            f"{context_length + 1} wanted; give more text or a smaller context_length"
        )


def _windows(tokens: np.ndarray, starts: np.ndarray, context_length: int) -> np.ndarray:
    positions = starts[:, None] + np.arange(context_length + 1)
    return tokens[positions].astype(np.int64)
