"""Whether results must be the same bits in every run on the same GPU.

The kernels of this package always add up in a fixed order. A library may have a faster algorithm
that does not (cuDNN's backward attention): it is taken only where a program says that it may be.
"""

_is_required = True


def is_required() -> bool:
    """Return whether the same input must give the same bits; so it is unless said otherwise."""
    return _is_required


def require(required: bool) -> None:
    """Ask for the same bits in every run, or let libraries use faster algorithms.

    Work recorded in a graph keeps to what was asked for when it was recorded.

    Parameters
    ----------
    required : bool
    """
    global _is_required
    _is_required = required
