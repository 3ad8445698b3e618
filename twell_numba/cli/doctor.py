"""``twell doctor``: what this machine has, what works, what does not and why."""

import json
import platform
from typing import Any

import click

from twell_numba import __version__
from twell_numba.cli.options import common_options, json_option
from twell_numba.cli.text import bytes_text, print_table


@click.command("doctor")
@common_options
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Show versions, CPU, BLAS, Numba and GPU, and say what does not work and why.

    For a GPU: the driver, the packages it needs and whether their versions fit, and what works on
    it, tried with small kernels. A machine without a GPU is no failure. Exits with 1 if kernels
    cannot be compiled and run here, or not as the environment asks.

    \b
    Example:
      twell doctor
    """
    from twell_numba.device import machine
    from twell_numba.infer.gpu_report import describe_gpus

    machine.require_numba_threads()
    report: dict[str, Any] = {
        "twell_numba": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": machine.package_versions(),
        "cpu": machine.describe_cpu(),
        "blas": machine.describe_blas(),
        "numba": machine.describe_compiler(),
        "kernels": machine.check_compilation(),
        "gpu": describe_gpus(),
        "environment": machine.settings_in_environment(),
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print_report(report)
    gpu_fails = report["gpu"]["kernels"]["works"] is False  # and --device auto would take it
    if not report["kernels"]["works"] or report["cpu"]["problem"] or gpu_fails:
        context.exit(1)


def _print_report(report: dict[str, Any]) -> None:
    cpu, numba, kernels = report["cpu"], report["numba"], report["kernels"]
    memory = f", {bytes_text(cpu['memory_bytes'])} memory" if cpu["memory_bytes"] else ""
    threads = "NOT usable" if cpu["threads"] is None else f"{cpu['threads']} used"
    rows = [
        ("twell_numba", report["twell_numba"]),
        ("Python", f"{report['python']} on {report['platform']}"),
        *((name, version or "MISSING") for name, version in report["packages"].items()),
        ("CPU", f"{cpu['name']} ({cpu['architecture']}{memory})"),
        ("threads", f"{threads}; {cpu['usable_cores']} of {cpu['cores']} cores usable"),
        *(("BLAS", _blas_text(library)) for library in report["blas"]),
        ("Numba target", f"{numba['target_cpu']} ({', '.join(numba['simd']) or 'no SIMD'})"),
        ("compiled kernels", "work" if kernels["works"] else "DO NOT WORK"),
        ("kernel cache", _cache_text(kernels)),
        *_gpu_rows(report["gpu"]),
        *(("environment", f"{name}={value}") for name, value in report["environment"].items()),
    ]
    print_table(None, rows)
    if cpu["problem"]:
        click.echo(f"\nThreads: {cpu['problem']}.")
    if kernels["problem"]:
        click.echo(f"\nKernels: {kernels['problem']}.")
    for problem in report["gpu"]["problems"]:
        click.echo(f"\nGPU: {problem}.")


def _cache_text(kernels: dict[str, Any]) -> str:
    if not kernels["works"]:
        return "none: kernels do not work"
    if kernels["cache_folder"] is None:
        return "NONE: kernels are compiled anew in each process"
    state = "writable" if kernels["cache_writable"] else "NOT writable"
    return f"{kernels['cache_folder']} ({state})"


def _blas_text(library: dict[str, Any]) -> str:
    kernels = f", {library['kernels']} kernels" if library["kernels"] else ""
    return f"{library['library']} {library['version']}{kernels}, {library['threads']} threads"


def _gpu_rows(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (
            f"GPU {number}",
            f"{device['name']}, compute capability {device['compute_capability']}, "
            f"{bytes_text(device['memory_bytes'])}{'' if device['new_enough'] else ' (TOO OLD)'}",
        )
        for number, device in enumerate(gpu["devices"])
    ] or [("GPU", "none that can be used")]
    rows.append(("GPU driver", _driver_text(gpu)))
    if any(package["version"] for package in gpu["packages"] if package["name"] != "numpy"):
        rows += [(f"  {package['name']}", _package_text(package)) for package in gpu["packages"]]
    else:
        rows.append(("GPU packages", "not installed"))
    if gpu["kernels"]["works"] is not None:
        rows.append(("GPU kernels", "work" if gpu["kernels"]["works"] else "DO NOT WORK"))
    for part in ("products", "attention"):
        if gpu[part]["works"] is not None:
            text = f"by {_LIBRARIES[gpu[part]['path']]}" if gpu[part]["works"] else "DO NOT WORK"
            rows.append((f"GPU {part}", text))
    rows.append(("--device auto", f"means {gpu['auto']} here"))
    return rows


_LIBRARIES = {
    "cublas": "cuBLASLt",
    "tiled": "our own kernel (slower)",
    "cudnn": "cuDNN",
    "own": "our own kernels (slower)",
}


def _driver_text(gpu: dict[str, Any]) -> str:
    if gpu["driver_cuda_version"] is None:
        return "none, or it offers no GPU"
    version = gpu["driver_version"] or "version unknown"
    return f"{version}, for CUDA up to {gpu['driver_cuda_version']}"


def _package_text(package: dict[str, Any]) -> str:
    if package["version"] is None:
        return f"not installed ({package['purpose']})"
    return package["version"] + ("" if package["fits"] else f" ({package['wanted']} WANTED)")
