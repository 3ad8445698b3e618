"""Compilation for the GPU and its cache on disk; no GPU is needed."""

import os
import stat
import subprocess
import sys
import types

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (extra cuda)")

from twell_numba.device.gpu import cache, compile, language  # noqa: E402
from twell_numba.device.gpu.compile import Options, compile_kernel  # noqa: E402
from twell_numba.device.gpu.fingerprint import fingerprint  # noqa: E402
from twell_numba.device.gpu.language import (  # noqa: E402
    argument_type,
    cuda,
    device_function,
    global_thread,
    load,
    store,
)

KINDS = ("float32*", "float32*", "int")
FACTOR = 2.0


def scale(x, y, size):
    i = global_thread()
    if i < size:
        store(y, i, load(x, i) * FACTOR)


def types_of(*kinds):
    return tuple(argument_type(kind) for kind in kinds)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, on disk and in memory."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch):
    """A list that grows with each kernel that is really compiled."""
    built = []
    original = compile._build

    def build(*arguments):
        built.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(compile, "_build", build)
    return built


PLAIN = Options()


def build_scale(target="80", options=PLAIN, kinds=KINDS):
    return compile_kernel(scale, types_of(*kinds), target, options)


# ---------------------------------------------------------------------- the cache


def test_a_kernel_is_compiled_once_and_found_on_disk(folder, builds):
    first = build_scale()
    assert build_scale() == first
    cache.forget()
    assert build_scale() == first
    assert len(builds) == 1
    assert len(list(folder.glob("*.cubin"))) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"target": "90a"},
        {"options": Options(threads=128)},
        {"options": Options(max_registers=32)},
        {"options": Options(blocks_per_multiprocessor=2)},
        {"kinds": ("float64*", "float64*", "int")},
        {"kinds": ("bfloat16*", "float32*", "int")},
    ],
)
def test_what_else_changes_the_code_is_compiled_anew(folder, builds, other):
    code = build_scale()[0]
    assert build_scale(**other)[0] != code
    assert len(builds) == 2


def test_versions_are_part_of_the_key(folder, builds, monkeypatch):
    build_scale()
    monkeypatch.setattr(compile, "_versions", lambda: "others")
    build_scale()
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_a_damaged_file_is_built_anew(folder, builds, damage):
    code = build_scale()
    (path,) = folder.glob("*.cubin")
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[len(content) // 2] ^= 1
    path.write_bytes(
        {"cut": content[:-1], "changed": content, "empty": b"", "foreign": b"\x7fELF" * 100}[damage]
    )
    cache.forget()
    assert build_scale() == code
    assert len(builds) == 2
    cache.forget()
    assert build_scale() == code
    assert len(builds) == 2, "the mended file was not read"


def test_where_no_folder_can_be_written_kernels_stay_in_memory(tmp_path, monkeypatch, builds):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_in_memory", {})
    code = build_scale()
    assert build_scale() == code
    assert len(builds) == 1


def test_no_half_written_file_is_left(folder, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_room)
    assert cache.lookup("a key", lambda: (b"code", "entry")) == (b"code", "entry")
    assert list(folder.iterdir()) == []


LOOK_UP_OFTEN = """
import sys
from twell_numba.device.gpu import cache
code = sys.argv[1].encode() * 100_000
for i in range(50):
    cache.forget()
    found, entry = cache.lookup(f"key {i % 5}", lambda: (code, "entry"))
    assert len(set(found)) == 1 and len(found) == 100_000 and entry == "entry"
"""


def test_processes_share_a_folder(folder):
    processes = [
        subprocess.Popen([sys.executable, "-c", LOOK_UP_OFTEN, digit]) for digit in ("1", "2")
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]


def test_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache.sys, "platform", "linux")
    assert cache.folder() == tmp_path / "twell_numba" / "cuda"


def test_files_are_plain_files(folder):
    build_scale()
    (path,) = folder.glob("*.cubin")
    assert stat.S_ISREG(path.stat().st_mode)
    assert b"\x7fELF" in path.read_bytes()


# ---------------------------------------------------------------------- what a key depends on


def with_global(function, **changes):
    """Return the same function, with other globals."""
    return types.FunctionType(function.__code__, function.__globals__ | changes, function.__name__)


def make_device_function(constant):
    def inner(value):
        return value * constant

    return device_function(inner)


HELPER = make_device_function(3.0)


def calls_helper(x, y, size):
    if size > 0:
        store(y, 0, HELPER(load(x, 0)))


def test_a_global_constant_is_part_of_the_key():
    assert fingerprint(with_global(scale, FACTOR=3.0)) != fingerprint(scale)
    assert fingerprint(with_global(scale, FACTOR=2)) != fingerprint(scale), "2 is not 2.0"
    assert fingerprint(with_global(scale, FACTOR=np.float32(2))) != fingerprint(scale)
    assert fingerprint(with_global(scale, FACTOR=2.0)) == fingerprint(scale)


def test_signed_zeros_and_nan_constants_differ():
    texts = {
        fingerprint(with_global(scale, FACTOR=value))
        for value in (0.0, -0.0, float("nan"), 0, False)
    }
    assert len(texts) == 5


def test_what_a_device_function_captures_is_part_of_the_key():
    other = with_global(calls_helper, HELPER=make_device_function(4.0))
    same = with_global(calls_helper, HELPER=make_device_function(3.0))
    assert fingerprint(other) != fingerprint(calls_helper)
    assert fingerprint(same) == fingerprint(calls_helper)


def test_a_helpers_helper_is_part_of_the_key():
    def outer_with(inner):
        def outer(value):
            return inner(value) + 1

        return device_function(outer)

    texts = [
        fingerprint(with_global(calls_helper, HELPER=outer_with(make_device_function(constant))))
        for constant in (3.0, 4.0)
    ]
    assert texts[0] != texts[1]


def test_an_intrinsic_is_part_of_the_key():
    assert fingerprint(with_global(scale, load=store)) != fingerprint(scale)


def test_what_an_intrinsic_calls_is_part_of_the_key(monkeypatch):
    before = fingerprint(scale)
    monkeypatch.setattr(language, "_round_to_bfloat16", lambda builder, value: value)
    assert fingerprint(scale) != before


def test_the_key_is_the_same_in_every_process():
    program = (
        "from twell_numba.device.gpu.fingerprint import fingerprint\n"
        "from twell_numba.kernels.cross_entropy.cuda import _forward\n"
        "print(fingerprint(_forward.function))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(texts) == 1


@pytest.mark.parametrize("value", [object(), {1, 2}])
def test_what_cannot_be_told_is_refused(value):
    with pytest.raises(TypeError, match="FACTOR of type .* given to a kernel"):
        fingerprint(with_global(scale, FACTOR=value))


def test_a_module_of_this_package_is_refused():
    with pytest.raises(TypeError, match="import what it uses by name"):
        fingerprint(with_global(scale, FACTOR=compile))


# ---------------------------------------------------------------------- the code


def test_options_reach_the_code(folder):
    library = compile._lower(scale, types_of(*KINDS), Options(threads=96))
    assert ".maxntid 96, 1, 1" in library.get_asm_str(cc=(8, 0))
    options = Options(threads=96, blocks_per_multiprocessor=3)
    library = compile._lower(scale, types_of(*KINDS), options)
    assert ".minnctapersm 3" in library.get_asm_str(cc=(8, 0))


def test_divisions_and_roots_are_rounded_and_subnormal_numbers_kept(folder):
    def divide(x, y, size):
        store(y, 0, load(x, 0) / load(x, 1))

    library = compile._lower(divide, types_of(*KINDS), Options())
    text = library.get_asm_str(cc=(8, 0))
    assert "div.rn.f32" in text
    assert ".ftz" not in text


def test_compiling_leaves_numba_as_it_was(folder):
    dispatcher = compile.compiler("dispatcher")
    before = dispatcher.get_current_device
    build_scale()
    assert dispatcher.get_current_device is before
    assert cuda.jit is not None
