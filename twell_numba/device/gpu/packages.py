"""The optional packages of the GPU, imported here and nowhere else, when they are first needed.

An absent package or driver raises one line that says what to install.
"""

import functools
import importlib
import os
from types import ModuleType
from typing import Any

from twell_numba.device.gpu_packages import EXTRA
from twell_numba.errors import TwellError


@functools.cache
def import_package(module: str, package: str) -> ModuleType:
    """Import ``module``, which belongs to the distribution ``package`` of the extra ``cuda``.

    Raises
    ------
    TwellError
        If it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise TwellError(
            f"the GPU needs the package {package}, which is not installed ({error}); "
            f"install it with: {EXTRA}"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise TwellError(
            f"the package {package} cannot be loaded: {reason}; install it anew with: {EXTRA}"
        ) from error


def compiler(module: str = "") -> Any:
    """Return ``numba.cuda`` (of the package numba-cuda), or a module of it by its short name."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        raise TwellError(
            "NUMBA_ENABLE_CUDASIM is set, but kernels here need the compiler; unset it"
        )
    # numba's own, older numba.cuda answers to the same name where numba-cuda is missing
    import_package("numba_cuda", "numba-cuda")
    return import_package(f"numba.cuda{'.' if module else ''}{module}", "numba-cuda")


def core() -> Any:
    """Return ``cuda.core``: devices, streams, memory pools and launches."""
    return import_package("cuda.core", "cuda-core")


def bindings() -> Any:
    """Return ``cuda.bindings.driver``: NVIDIA's driver, function by function."""
    return import_package("cuda.bindings.driver", "cuda-bindings")
