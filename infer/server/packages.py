"""What the server needs beside a base install; see the package for where it is imported."""

import importlib

from twell_numba.errors import TwellError

EXTRA = "pip install 'twell_numba[serve]'"


def require_packages() -> None:
    """Check that the packages of the extra ``serve`` are there.

    Raises
    ------
    TwellError
        If one is missing: one line that says what to install.
    """
    for package in ("starlette", "uvicorn"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise TwellError(
                f"serving needs the package {package}, which is not installed ({error}); "
                f"install it with: {EXTRA}"
            ) from error
