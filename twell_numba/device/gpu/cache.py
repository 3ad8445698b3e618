"""Compiled kernels on disk: a file for each, named by the hash of all it depends on.

A file holds what it needs to be trusted: a checksum, so that one cut short or changed is built
anew. Files are written under another name first, so that two processes never see half of one. Where
no folder can be written, kernels are kept for the process alone.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER_VARIABLE = "TWELL_CUDA_CACHE_DIR"
_MAGIC = b"twell cubin 1\n"

# A compiled kernel: machine code, and its entry's name.
Entry = tuple[bytes, str]

_in_memory: dict[str, Entry] = {}


def folder() -> Path:
    """Return where compiled kernels are kept: ``TWELL_CUDA_CACHE_DIR``, or the user's cache."""
    chosen = os.environ.get(FOLDER_VARIABLE, "").strip()
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "twell_numba" / "cuda"


def lookup(key: str, build: Callable[[], Entry]) -> Entry:
    """Return the kernel of this key: from this process, from the disk, or from ``build()``.

    Parameters
    ----------
    key : str
        Of everything the kernel depends on; of any length.
    """
    name = hashlib.sha256(key.encode()).hexdigest()
    entry = _in_memory.get(name)
    if entry is None:
        entry = _read(name)
    if entry is None:
        entry = build()
        _write(name, entry)
    _in_memory[name] = entry
    return entry


def forget() -> None:
    """Forget what this process holds, as if it had just begun; files stay."""
    _in_memory.clear()


def _path(name: str) -> Path:
    return folder() / f"{name}.cubin"


def _read(name: str) -> Entry | None:
    try:
        content = _path(name).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    magic, checksum, rest = content[: len(_MAGIC)], *_split(content[len(_MAGIC) :], 32)
    if magic != _MAGIC or hashlib.sha256(rest).digest() != checksum:
        return None
    header, code = _split(rest, 4 + int.from_bytes(rest[:4], "little"))
    try:
        fields = json.loads(header[4:])
        return code, str(fields["entry"])
    except (ValueError, KeyError, TypeError):
        return None


def _write(name: str, entry: Entry) -> None:
    code, entry_name = entry
    header = json.dumps({"entry": entry_name}).encode()
    rest = len(header).to_bytes(4, "little") + header + code
    temporary = None
    try:
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-", suffix=".cubin")
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(rest).digest() + rest)
        os.replace(temporary, path)
    except (OSError, RuntimeError):  # the process keeps the kernel in memory
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _split(content: bytes, position: int) -> tuple[bytes, bytes]:
    return content[:position], content[position:]
