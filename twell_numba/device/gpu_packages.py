"""Which packages a GPU needs, in which versions, and which of them are there.

Looked up in the installed packages' metadata: nothing is imported. The versions are those of the
extra ``cuda``; a test holds the two together.
"""

import importlib.metadata
import itertools
from dataclasses import dataclass

EXTRA = "pip install 'twell_numba[cuda]'"


@dataclass(frozen=True)
class GPUPackage:
    """A package of the extra ``cuda``, or one that these bring.

    Attributes
    ----------
    name : str
    wanted : str
        Its versions, as pip writes them: ``>=1.0,<2``. Empty where any will do.
    purpose : str
        What it is for.
    is_required : bool
        Whether nothing works on a GPU without it. Without the others a kernel of this package's
        own does their work, slower.
    has_substitute : bool
        Whether a CUDA toolkit of the machine may do as well.
    """

    name: str
    wanted: str
    purpose: str
    is_required: bool = True
    has_substitute: bool = False


GPU_PACKAGES = (
    GPUPackage("numpy", "<2.5", "arrays; numba-cuda fails on newer ones"),
    GPUPackage("numba-cuda", "==0.30.*", "compiles kernels"),
    GPUPackage("cuda-bindings", "==13.*", "calls the driver"),
    GPUPackage("cuda-core", ">=1.0,<2", "launches kernels"),
    GPUPackage("nvidia-nvvm", "==13.0.*", "compiles kernels", False, has_substitute=True),
    GPUPackage("nvidia-nvjitlink", "==13.0.*", "links kernels", False, has_substitute=True),
    GPUPackage("nvmath-python", ">=1.0,<2", "fast dense products", is_required=False),
    GPUPackage("nvidia-cublas", ">=13.0,<13.2", "fast dense products", is_required=False),
    GPUPackage("nvidia-cudnn-frontend", ">=1.27,<1.29", "fast attention", is_required=False),
    GPUPackage("nvidia-cudnn-cu13", ">=9.19,<9.20", "fast attention", is_required=False),
)


@dataclass(frozen=True)
class PackageState:
    """A package as it is installed here.

    Attributes
    ----------
    package : GPUPackage
    version : str or None
        None where it is missing.
    """

    package: GPUPackage
    version: str | None

    @property
    def fits(self) -> bool:
        """Whether it is there, in a version that is wanted."""
        return self.version is not None and version_fits(self.version, self.package.wanted)


def package_states() -> list[PackageState]:
    """Return the state of each package a GPU needs."""
    return [PackageState(package, installed_version(package.name)) for package in GPU_PACKAGES]


def installed_version(name: str) -> str | None:
    """Return the installed version of a package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages() -> list[str]:
    """Return the names of required packages that are not installed."""
    return [
        state.package.name
        for state in package_states()
        if state.package.is_required and state.version is None
    ]


def version_fits(version: str, wanted: str) -> bool:
    """Return whether a version is among those wanted: ``==A.*``, ``>=A`` and ``<B`` with commas."""
    numbers = _numbers(version)
    for clause in filter(None, wanted.split(",")):
        operator = clause.rstrip("0123456789.*")
        bound = _numbers(clause.removeprefix(operator))
        if operator == "==":
            fits = numbers[: len(bound)] == bound
        elif operator in (">=", "<"):
            # (1,) and (1, 0) are the same version
            length = max(len(numbers), len(bound))
            left, right = (part + (0,) * (length - len(part)) for part in (numbers, bound))
            fits = left >= right if operator == ">=" else left < right
        else:
            raise ValueError(f"version clause {clause!r} given, ==A.*, >=A or <B wanted")
        if not fits:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers a version starts with: (2, 4, 6) of ``2.4.6`` and of ``2.4.6rc1``."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
