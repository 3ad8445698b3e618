import pytest

from twell_numba.infer.text_stream import TextStream, printable


@pytest.mark.parametrize("text", ["a🙂b", "ø", "日", "👩‍👩‍👧", "plain"])
def test_every_split_into_two(text: str) -> None:
    data = text.encode()
    for split in range(len(data) + 1):
        stream = TextStream()
        pieces = [stream.push(data[:split]), stream.push(data[split:])]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text
        assert stream.finish() == ""


def test_byte_by_byte() -> None:
    stream = TextStream()
    pieces = [stream.push(bytes([byte])) for byte in "🙂!".encode()]
    assert pieces == ["", "", "", "🙂", "!"]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_rest_of_a_character_at_the_end(kept: int) -> None:
    stream = TextStream()
    assert stream.push("🙂".encode()[:kept]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(b"a") == "a"


def test_bytes_that_are_no_character() -> None:
    stream = TextStream()
    assert stream.push(b"a\xffb") == "a\ufffdb"
    assert stream.push(b"\xf0\x9f") == ""
    assert stream.push(b"c") == "\ufffdc"


def test_control_characters_are_written_out() -> None:
    assert printable("\x1b[31mred\x07\r\x00") == r"\x1b[31mred\x07\x0d\x00"
    assert printable("\x7f\x80\x9b\x9f") == r"\x7f\x80\x9b\x9f"


def test_what_a_terminal_may_have_stays() -> None:
    text = "a\n\tb ~\xa0é日🙂\\x1b"
    assert printable(text) == text
