"""Random pushes of the weights of dead neurons, reproducible wherever they are computed."""

from twell_numba.kernels.dispatch import by_device
from twell_numba.kernels.revival import reference

revive_rows = by_device(reference.revive_rows, "twell_numba.kernels.revival.cuda")

__all__ = ["revive_rows"]
