"""What works on the GPUs of this machine, what does not, why it matters and what to do.

The parts of the report of ``twell doctor`` on the GPU, as dictionaries that can be written as JSON.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from twell_numba.device.choice import best_device
from twell_numba.device.gpu_packages import EXTRA, PackageState, package_states
from twell_numba.device.nvidia import Driver, VisibleGPU, ask_driver, driver_version
from twell_numba.errors import TwellError

_UNTRIED = {"works": None, "problem": None}


def describe_gpus() -> dict[str, Any]:
    """Return what the driver offers, which packages are there, and what was tried on a GPU.

    Compiles a kernel and multiplies small matrices on the first GPU that can be used: seconds the
    first time.

    Returns
    -------
    dict
        ``driver_version``, ``driver_cuda_version``, ``devices``, ``packages`` (name, version,
        wanted, fits, purpose), ``auto`` (what ``--device auto`` means here), ``kernels``,
        ``products`` and ``attention`` (each with ``works``, None where it was not tried, and
        ``problem``; the latter two with ``path``: what computes them), and ``problems``: one line
        each, with its remedy.
    """
    driver, packages = ask_driver(), package_states()
    auto, note = best_device(driver)
    report: dict[str, Any] = {
        "driver_version": driver_version(),
        "driver_cuda_version": driver.cuda_version,
        "devices": [_describe(gpu) for gpu in driver.gpus],
        "packages": [
            {
                "name": state.package.name,
                "version": state.version,
                "wanted": state.package.wanted,
                "fits": state.fits,
                "purpose": state.package.purpose,
            }
            for state in packages
        ],
        "auto": auto,
        "kernels": dict(_UNTRIED),
        "products": {"path": None, **_UNTRIED},
        "attention": {"path": None, **_UNTRIED},
    }
    if auto != "cpu":
        report["kernels"] = _try(_kernels, auto)
        if report["kernels"]["works"]:
            report["products"] = _products(auto)
            report["attention"] = _attention(auto)
    report["problems"] = _problems(driver, packages, report, note)
    return report


def _describe(gpu: VisibleGPU) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "compute_capability": gpu.capability_text,
        "memory_bytes": gpu.memory_bytes,
        "new_enough": gpu.is_new_enough,
    }


# ---- What is tried


def _try(attempt: Callable[[str], bool], device: str) -> dict[str, Any]:
    """Return whether an attempt succeeds, and otherwise why not."""
    try:
        works = attempt(device)
    except Exception as error:  # whatever fails here is what the report is about
        name = "" if isinstance(error, TwellError) else f"{type(error).__name__}: "
        return {"works": False, "problem": f"{name}{' '.join(str(error).split())}"}
    return {"works": works, "problem": None if works else "the result is wrong"}


def _kernels(device: str) -> bool:
    from twell_numba.device.gpu import choose
    from twell_numba.device.gpu.self_test import kernels_compute

    return kernels_compute(choose(device))


def _products(device: str) -> dict[str, Any]:
    """Try cuBLASLt, and the kernel that stands in for it where it fails."""
    cublas = _try(lambda device: _product_is_right(device, "cublas"), device)
    if cublas["works"]:
        return {"path": "cublas", **cublas}
    tiled = _try(lambda device: _product_is_right(device, "tiled"), device)
    return {
        "path": "tiled",
        "works": tiled["works"],
        "problem": cublas["problem"] if tiled["works"] else tiled["problem"],
    }


def _product_is_right(device: str, path: str) -> bool:
    from twell_numba.device.gpu import choose, from_numpy
    from twell_numba.device.gpu.gemm import matmul

    stream = choose(device).stream
    a = np.arange(64 * 32, dtype=np.float32).reshape(64, 32) % 7
    b = np.arange(32 * 48, dtype=np.float32).reshape(32, 48) % 5
    product = matmul(from_numpy(a, stream), from_numpy(b, stream), path=path)
    return np.array_equal(product.to_numpy(), a @ b)  # small whole numbers: exact


def _attention(device: str) -> dict[str, Any]:
    """Try cuDNN; where it fails, attention is computed by the package's own kernels."""
    cudnn = _try(_attention_is_right, device)
    return {
        "path": "cudnn" if cudnn["works"] else "own",
        "works": True,
        "problem": cudnn["problem"],
    }


def _attention_is_right(device: str) -> bool:
    """Compare cuDNN in both directions; what one of them lacks is the reason that is given."""
    from twell_numba.device.gpu import choose, cudnn, empty, from_numpy
    from twell_numba.kernels.attention import reference

    stream = choose(device).stream
    shape = batch, tokens, heads, _ = (1, 64, 1, 64)
    host = np.random.default_rng(0).standard_normal((4, *shape)).astype(np.float16)
    q, k, v, dy = (from_numpy(array, stream) for array in host)
    y, dq, dk, dv = (empty(shape, np.float16, stream) for _ in range(4))
    log_sum_exp = empty((batch, heads, tokens), np.float32, stream)
    obstacle = cudnn.forward(q, k, v, y, log_sum_exp, tokens)
    obstacle = obstacle or cudnn.backward(dy, q, k, v, y, log_sum_exp, dq, dk, dv)
    if obstacle:
        raise TwellError(obstacle)
    q64, k64, v64, dy64 = host.astype(np.float64)
    y64, log_sum_exp64 = reference.causal_attention(q64, k64, v64)
    gradients = reference.causal_attention_backward(dy64, q64, k64, v64, y64, log_sum_exp64)
    return all(
        bool(np.linalg.norm(actual.to_numpy() - wanted) < 5e-3 * np.linalg.norm(wanted))
        for actual, wanted in zip((y, dq, dk, dv), (y64, *gradients), strict=True)
    )


# ---- What is wrong


def _problems(
    driver: Driver, packages: list[PackageState], report: dict[str, Any], note: str | None
) -> list[str]:
    problems = [] if driver.problem is None else [driver.problem]
    problems += _package_problems(packages)
    if report["auto"] == "cpu" and note is not None and not problems:
        problems.append(note)
    if report["kernels"]["problem"] is not None:
        problems.append(
            f"kernels do not work on {report['auto']}, so nothing does: "
            f"{report['kernels']['problem']}"
        )
    for part in ("products", "attention"):
        if report[part]["problem"] is not None:
            what = "DO NOT WORK" if not report[part]["works"] else "are slower than they could be"
            problems.append(f"{_TITLES[part]} {what}: {report[part]['problem']}")
    return problems


_TITLES = {"products": "dense products", "attention": "16-bit attention kernels"}


def _package_problems(packages: list[PackageState]) -> list[str]:
    missing = [
        state.package
        for state in packages
        if state.version is None and not state.package.has_substitute
    ]
    problems = []
    if missing:
        names = ", ".join(package.name for package in missing)
        effect = (
            "no GPU is used"
            if any(package.is_required for package in missing)
            else "dense products or attention are slower on a GPU"
        )
        problems.append(f"not installed: {names}; without them {effect}; get them with: {EXTRA}")
    # Without numba-cuda no GPU is used, and then any numpy will do.
    if any(state.version for state in packages if state.package.name == "numba-cuda"):
        problems += [
            f"{state.package.name} {state.version} is installed, {state.package.wanted} wanted "
            f"({state.package.purpose}); get it with: {EXTRA}"
            for state in packages
            if state.version is not None and not state.fits
        ]
    return problems
