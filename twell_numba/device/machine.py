"""What this machine has: processor, threads, BLAS, Numba's target and kernel cache, GPU.

Each function describes one of them as a dictionary that can be written as JSON. What is absent is
``None``, with the reason and the remedy under ``"problem"`` where there is one.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.device.gpu_packages import installed_version
from twell_numba.device.threads import requested_thread_count, thread_count
from twell_numba.errors import UsageError, shown

REQUIRED_PACKAGES = (
    "numpy",
    "scipy",
    "numba",
    "llvmlite",
    "click",
    "rich",
    "safetensors",
    "ml_dtypes",
    "tokenizers",
    "threadpoolctl",
)

# Vector instruction sets worth naming, widest first, as LLVM calls them.
SIMD_FEATURES = (
    "amx-bf16", "avx512bf16", "avx512f", "avx2", "fma", "f16c", "avx", "sse4.2", "sve", "neon",
)  # fmt: skip

# Settings in the environment that change which code runs or how fast: worth seeing in a report.
SETTING_PREFIXES = ("TWELL_", "NUMBA_", "OPENBLAS_", "MKL_", "OMP_", "VECLIB_", "CUDA_VISIBLE_")

_NEEDS_COMPILATION = "NUMBA_DISABLE_JIT is set, but this package needs compiled kernels; unset it"


def require_usable_environment() -> None:
    """Refuse settings in the environment with which nothing can be computed.

    Quick: Numba is not imported.

    Raises
    ------
    UsageError
    """
    requested_thread_count()
    try:
        jit_disabled = int(os.environ.get("NUMBA_DISABLE_JIT", "0")) != 0
    except ValueError:  # Numba warns of it, and compiles
        jit_disabled = False
    if jit_disabled:
        raise UsageError(_NEEDS_COMPILATION)
    require_numba_threads()


def require_numba_threads() -> None:
    """Refuse what NUMBA_NUM_THREADS says if Numba cannot be imported, or warns of it at length.

    Raises
    ------
    UsageError
    """
    written = os.environ.get("NUMBA_NUM_THREADS", "").strip()
    if written and not _is_thread_count(written):
        raise UsageError(
            f"NUMBA_NUM_THREADS={shown(written)} given in the environment, a whole number above 0 "
            "wanted by Numba; unset it: kernels here go by TWELL_NUM_THREADS"
        )


def _is_thread_count(written: str) -> bool:
    """Return whether Numba takes a value of NUMBA_NUM_THREADS."""
    try:
        return int(written) > 0
    except ValueError:
        return False


def package_versions() -> dict[str, str | None]:
    """Return the installed version of each required package; ``None`` where it is missing."""
    return {name: installed_version(name) for name in REQUIRED_PACKAGES}


def settings_in_environment() -> dict[str, str]:
    """Return the environment variables that steer this package, Numba, BLAS or the GPU driver."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(SETTING_PREFIXES)
    }


def describe_cpu() -> dict[str, Any]:
    """Return the processor's name, its cores, those this process may use, and the threads used.

    ``threads`` is None, and ``problem`` says why, where the number asked for cannot be.
    """
    threads, problem = None, None
    try:
        threads = thread_count()
    except UsageError as error:
        problem = str(error)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": _cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "threads": threads,
        "memory_bytes": _memory_bytes(),
        "problem": problem,
    }


def describe_blas() -> list[dict[str, Any]]:
    """Return the BLAS libraries NumPy and SciPy have loaded: name, version, kernels, threads."""
    from threadpoolctl import ThreadpoolController

    np.dot(np.ones((2, 2)), np.ones((2, 2)))  # a library may be loaded at its first use
    return [
        {
            "library": library.internal_api,
            "version": library.version,
            "kernels": getattr(library, "architecture", None),
            "threads": library.num_threads,
            "threading": getattr(library, "threading_layer", None),
            "file": Path(library.filepath).name,
        }
        for library in ThreadpoolController().select(user_api="blas").lib_controllers
    ]


def describe_compiler() -> dict[str, Any]:
    """Return the processor Numba compiles for and its vector instruction sets."""
    import llvmlite.binding as llvm
    from numba.core import config

    features = llvm.get_host_cpu_features()
    return {
        "target_cpu": config.CPU_NAME or llvm.get_host_cpu_name(),
        "simd": [name for name in SIMD_FEATURES if features.get(name)],
        "jit_disabled": bool(config.DISABLE_JIT),
    }


def check_compilation() -> dict[str, Any]:
    """Compile a small kernel, compare its result with NumPy's, and see where kernels are cached.

    Returns
    -------
    dict
        ``works`` (bool), ``cache_folder`` (str; None where kernels are compiled anew in each
        process), ``cache_writable`` (bool), ``problem``.
    """
    from numba.core import config

    result: dict[str, Any] = {
        "works": False,
        "cache_folder": None,
        "cache_writable": False,
        "problem": None,
    }
    if config.DISABLE_JIT:
        result["problem"] = _NEEDS_COMPILATION
        return result
    try:
        kernel = _self_test_kernel()
        x = np.arange(-8, 9, dtype=np.float32)
        result["works"] = float(kernel(x)) == float(np.maximum(x, 0).sum())
        if not result["works"]:
            result["problem"] = (
                "a compiled kernel gave a wrong sum; clear the kernel cache and reinstall numba"
            )
    except Exception as error:  # whatever fails here is what the report is about
        result["problem"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return result
    folder = getattr(getattr(kernel, "stats", None), "cache_path", None)
    result["cache_folder"] = folder
    result["cache_writable"] = folder is not None and _is_writable(Path(folder))
    if not result["cache_writable"] and result["problem"] is None:
        where = "in any folder that Numba tries" if folder is None else f"in {folder}"
        result["problem"] = (
            f"kernels cannot be cached {where}, so every process compiles them anew; "
            "set NUMBA_CACHE_DIR to a folder that can be written"
        )
    return result


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode == 0:
            return answer.stdout.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _self_test_kernel() -> Any:
    """Decorated in a function: where no cache folder can be had, decorating is what raises."""
    from twell_numba.device.jit import jit

    return jit(_sum_of_positives)


def _sum_of_positives(x: np.ndarray) -> float:
    total = 0.0
    for value in x:
        if value > 0:
            total += value
    return total


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
