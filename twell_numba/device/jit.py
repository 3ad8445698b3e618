"""How CPU kernels are compiled.

``jit`` is ``numba.njit`` with the settings every kernel of this package shares:

- ``nogil``: kernels work on a range of rows and are run by several threads at once
  (:mod:`twell_numba.device.threads`), which needs the interpreter lock released.
- ``cache``: compiled code is kept on disk, so that a second process starts at once; where no folder
  for it can be written, kernels are compiled anew in each process.
- ``fastmath`` limited to reassociation and contraction: sums may be vectorized, but NaN,
  infinities and signed zeros keep their meaning (full fast-math would let ``isnan`` be optimized
  away).
- ``error_model="numpy"``: a division by zero gives inf or NaN, never an exception in a thread.

A kernel made by an outer function may refer to that function's numbers, not to compiled helpers of
it: Numba would take them for others in every process, and compile and save the kernel anew. Such a
helper stands in the module, takes the number as an argument, and says ``literally(number)`` first,
so that it is a constant to the compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

import numba
from numba import literally as literally

_SETTINGS = {
    "nogil": True,
    "fastmath": {"reassoc", "contract"},
    "error_model": "numpy",
}


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function on its first call; a decorator, with or without Numba's options."""
    if function is None:
        return functools.partial(jit, **options)
    try:
        return numba.njit(cache=True, **_SETTINGS, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return numba.njit(**_SETTINGS, **options)(function)
