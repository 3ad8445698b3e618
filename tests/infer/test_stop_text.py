import itertools

import pytest

from twell_numba.infer.stop_text import StopTextFilter


def split(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    ways = []
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces = [text[0]]
        for character, is_cut in zip(text[1:], cuts, strict=True):
            if is_cut:
                pieces.append(character)
            else:
                pieces[-1] += character
        ways.append(pieces)
    return ways


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["END"], "an ENEND.", "an EN"),
        (["abab"], "xabaabab", "xaba"),
        (["aa", "b"], "caaab", "c"),
        (["abcd", "bc"], "xabcdy", "xa"),  # the one that is complete first
        (["abc", "bc"], "xabcy", "x"),  # of two that are complete at once, the longer
        (["🙂🙂"], "a🙂b🙂🙂", "a🙂b"),
        (["END"], "an EN", None),
        ([], "any text", None),
        (["x"], "x", ""),
    ],
)
def test_the_text_is_the_same_whatever_its_pieces(
    stop: list[str], text: str, expected: str | None
) -> None:
    for pieces in split(text):
        stop_filter = StopTextFilter(stop)
        given = [stop_filter.push(piece) for piece in pieces]
        assert stop_filter.is_stopped == (expected is not None)
        if expected is None:
            given.append(stop_filter.finish())
        assert "".join(given) == (text if expected is None else expected)
        assert stop_filter.finish() == ""


def test_only_what_may_become_a_stop_text_is_kept_back() -> None:
    stop_filter = StopTextFilter(["END", "ENGINE"])
    assert [stop_filter.push(piece) for piece in ("a E", "N", "GEN", "X")] == [
        "a ",
        "",
        "ENG",
        "ENX",
    ]
    assert stop_filter.finish() == ""


def test_nothing_comes_after_a_stop_text() -> None:
    stop_filter = StopTextFilter(["."])
    assert stop_filter.push("a.b") == "a"
    assert stop_filter.push("c") == ""
