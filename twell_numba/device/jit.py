"""How CPU kernels are compiled.

``jit`` is ``numba.njit`` with the settings every kernel of this package shares:

- ``nogil``: kernels work on a range of rows and are run by several threads at once
  (:mod:`twell_numba.device.threads`), which needs the interpreter lock released.
- ``cache``: compiled code is kept on disk, so that a second process starts at once.
- ``fastmath`` limited to reassociation and contraction: sums may be vectorized, but NaN, infinities
  and signed zeros keep their meaning (full fast-math would let ``isnan`` be optimized away).
- ``error_model="numpy"``: a division by zero gives inf or NaN, never an exception in a thread.
"""

import functools

import numba

jit = functools.partial(
    numba.njit,
    nogil=True,
    cache=True,
    fastmath={"reassoc", "contract"},
    error_model="numpy",
)
