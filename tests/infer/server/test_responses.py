"""Pieces as OpenAI's objects."""

import json
import math

import pytest

from twell_numba.infer.request import Piece, TokenLogprob
from twell_numba.infer.server.responses import ChatAnswer, CompletionAnswer, event, usage
from twell_numba.models.tokenizer import ByteTokenizer

SMILE = "🙂".encode()


def logprobs_of(data: bytes) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(byte, -1.0, ((byte, -1.0), (65, -math.inf))) for byte in data)


def test_an_event_is_one_line_whatever_the_text() -> None:
    text = 'a\nb\r\u2028"\x00 ø \ud800'
    data = event({"text": text})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert b"\n" not in data[:-2]
    assert b"\r" not in data
    assert json.loads(data[6:]) == {"text": text.replace("\ud800", "?")}


def test_parts_of_characters_are_told_apart_and_offsets_are_those_of_the_text() -> None:
    data = b"a" + SMILE + b"b"
    answer = CompletionAnswer("m", ByteTokenizer(), True, [""])
    logprobs = logprobs_of(data)
    # in two chunks, cut within the character
    first = answer.chunk(0, Piece("a", tuple(data[:3]), logprobs[:3]))
    second = answer.chunk(0, Piece("🙂b", tuple(data[3:]), logprobs[3:], "stop"))
    parts = [chunk["choices"][0]["logprobs"] for chunk in (first, second)]
    tokens = parts[0]["tokens"] + parts[1]["tokens"]
    assert tokens == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", "b"]
    assert parts[0]["text_offset"] + parts[1]["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert parts[0]["top_logprobs"][1] == {"bytes:\\xf0": -1.0, "A": -9999.0}


def test_a_chat_token_has_its_bytes() -> None:
    answer = ChatAnswer("m", ByteTokenizer(), True, 1)
    piece = Piece("", (SMILE[0],), logprobs_of(SMILE[:1]))
    (choice,) = answer.chunk(0, piece)["choices"]
    (token,) = choice["logprobs"]["content"]
    assert token["bytes"] == [0xF0]
    assert [entry["bytes"] for entry in token["top_logprobs"]] == [[0xF0], [65]]
    assert choice["delta"] == {}
    json.dumps(token, allow_nan=False)


def test_a_token_that_the_tokenizer_does_not_know_has_no_bytes() -> None:
    answer = ChatAnswer("m", ByteTokenizer(), True, 1)
    piece = Piece("a", (97,), (TokenLogprob(97, -1.0, ((300, -0.5),)),))
    (choice,) = answer.whole([piece], usage(1, 1))["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["bytes"] == []


@pytest.mark.parametrize("prefix", ["", "Say: "])
def test_an_echo_comes_first(prefix: str) -> None:
    answer = CompletionAnswer("m", ByteTokenizer(), False, [prefix])
    whole = answer.whole([Piece("hi", (1, 2), (), "stop")], usage(3, 2))
    assert whole["choices"][0]["text"] == prefix + "hi"
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    chunks = [*answer.first_chunks(), answer.chunk(0, Piece("hi"))]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prefix + "hi"
