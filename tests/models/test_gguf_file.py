"""Damaged and hostile files: one line, no hang, and no more memory than the file has bytes."""

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.models.gguf_file import open_gguf

HUGE = 2**63 - 1


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def description(
    name: str, dimensions: tuple[int, ...], kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    rank = len(dimensions) if rank is None else rank
    return (
        text(name)
        + struct.pack("<I", rank)
        + struct.pack(f"<{len(dimensions)}Q", *dimensions)
        + struct.pack("<IQ", kind, offset)
    )


def header(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    tensor_count = len(tensors) if tensor_count is None else tensor_count
    key_count = len(keys) if key_count is None else key_count
    start = magic + struct.pack("<IQQ", version, tensor_count, key_count)
    return start + b"".join(keys) + b"".join(tensors)


def padded(content: bytes, data: bytes = b"") -> bytes:
    return content + bytes(-len(content) % 32) + data


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    keys = (
        key("u8", 0, b"\xff"),
        key("i8", 1, b"\xff"),
        key("u16", 2, b"\xff\xff"),
        key("i16", 3, b"\xff\xff"),
        key("u32", 4, b"\xff\xff\xff\xff"),
        key("i32", 5, b"\xff\xff\xff\xff"),
        key("f32", 6, struct.pack("<f", 1e-5)),
        key("yes", 7, b"\x01"),
        key("text", 8, text("grød")),
        key("u64", 10, struct.pack("<Q", 2**64 - 1)),
        key("i64", 11, struct.pack("<q", -(2**63))),
        key("f64", 12, struct.pack("<d", 0.1)),
        key("texts", 9, struct.pack("<IQ", 8, 2) + text("") + text("🙂")),
        key("numbers", 9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
        key("flags", 9, struct.pack("<IQ", 7, 2) + b"\x00\x01"),
        key("not utf-8", 8, struct.pack("<Q", 2) + b"a\xff"),
    )
    data = np.arange(6, dtype="<f4").tobytes()
    (tmp_path / "a.gguf").write_bytes(padded(header(keys, (description("w", (3, 2)),)), data))
    file = open_gguf(tmp_path / "a.gguf")
    values = dict(file.metadata)
    np.testing.assert_array_equal(values.pop("numbers"), [1, -2, 3])
    np.testing.assert_array_equal(values.pop("flags"), [False, True])
    assert values == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 2**32 - 1, "i32": -1, "f32": 1e-5,
        "yes": True, "text": "grød", "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1,
        "texts": ["", "🙂"], "not utf-8": "a\ufffd",
    }  # fmt: skip
    tensor = file.tensors["w"]
    assert (tensor.shape, tensor.type.name, tensor.nbytes, tensor.row_nbytes) == (
        (2, 3), "F32", 24, 12,
    )  # fmt: skip
    assert (tmp_path / "a.gguf").read_bytes()[tensor.offset :] == data


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "another kind": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "only the magic": (b"GGUF", "damaged or truncated"),
    "version 1": (header(version=1), "of version 1, little-endian of version 2 or 3 wanted"),
    "version 99": (header(version=99), "of version 99"),
    "big-endian": (header(version=3 << 24), "is big-endian"),
    "many keys": (header(key_count=HUGE), f"keys {HUGE}"),
    "many tensors": (header(tensor_count=HUGE), f"tensors {HUGE}"),
    "many tensors in a long file": (
        padded(header(tensor_count=300_000), bytes(24 * 300_000)),
        "300000 tensors",
    ),
    "a long key": (header((struct.pack("<Q", HUGE) + bytes(20),)), "damaged"),
    "a long text": (header((key("a", 8, struct.pack("<Q", HUGE)),)), "damaged"),
    "a long array": (header((key("a", 9, struct.pack("<IQ", 4, HUGE)),)), "numbers"),
    "a long list of texts": (header((key("a", 9, struct.pack("<IQ", 8, HUGE)),)), "texts"),
    "texts that end early": (
        header((key("a", 9, struct.pack("<IQ", 8, 3) + text("b") + text("c") + text("")[:7]),)),
        "damaged",
    ),
    "a text beyond the end": (
        header((key("a", 9, struct.pack("<IQ", 8, 2) + text("b") + struct.pack("<Q", HUGE)),)),
        "beyond the file's end",
    ),
    "an array of arrays": (
        header((key("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0)),)),
        "an array of type 9",
    ),
    "an unknown type of value": (header((key("a", 77, b""),)), "type 77"),
    "a key twice": (header((key("a", 0, b"1"), key("a", 0, b"2"))), "'a' occurs twice"),
    "alignment 0": (header((key("general.alignment", 4, bytes(4)),)), "alignment 0"),
    "alignment 3": (header((key("general.alignment", 4, b"\x03\0\0\0"),)), "alignment 3"),
    "alignment of text": (header((key("general.alignment", 8, text("x")),)), "whole number"),
    "many dimensions": (
        header((), (description("w", (1,), rank=2**32 - 1),)) + bytes(100),
        "4294967295 dimensions",
    ),
    "no dimensions": (header((), (description("w", ()),)), "0 dimensions"),
    "a huge tensor": (header((), (description("w", (2**62, 2**62)),)), "ends at byte"),
    "a huge offset": (header((), (description("w", (1,), offset=2**64 - 1),)), "ends at byte"),
    "an empty tensor": (header((), (description("w", (0, 4)),)), "shape"),
    "half a block": (header((), (description("w", (33,), kind=8),)), "shape"),
    "a tensor twice": (
        padded(header((), (description("w", (1,)), description("w", (1,)))), bytes(8)),
        "occurs twice",
    ),
    "an unknown type": (header((), (description("w", (1,), kind=12345),)), "type 12345"),
    "data that ends early": (
        padded(header((), (description("w", (8,)),)), bytes(31)),
        "ends at byte",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_one_line(tmp_path: Path, name: str) -> None:
    content, message = DAMAGED[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(TwellError, match=message) as caught:
        open_gguf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5
    assert peak < 2e6 + 10 * len(content)


def small_file() -> bytes:
    keys = (
        key("general.alignment", 4, struct.pack("<I", 64)),
        key("texts", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("🙂")),
        key("numbers", 9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
    )
    tensors = (description("w", (3, 2)), description("v", (32,), kind=8, offset=64))
    content = header(keys, tensors)
    return content + bytes(-len(content) % 64 + 64 + 34)


def test_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    content = small_file()
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert set(open_gguf(path).tensors) == {"w", "v"}
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(TwellError):
            open_gguf(path)


def test_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    content = small_file()
    path = tmp_path / "a.gguf"
    for place in range(len(content) - 100):
        for value in (0, 1, 0x7F, 0xFF):
            changed = bytearray(content)
            changed[place] = value
            path.write_bytes(changed)
            try:
                open_gguf(path)
            except TwellError as error:
                assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("made", ["missing", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, made: str) -> None:
    if made == "folder":
        (tmp_path / "a.gguf").mkdir()
    with pytest.raises(TwellError, match="is missing: a GGUF file wanted"):
        open_gguf(tmp_path / "a.gguf")
