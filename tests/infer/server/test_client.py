"""A server as its clients see it: OpenAI's own client, and plain HTTP."""

import http.client
import itertools
import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from twell_numba.infer.chat import plain_chat
from twell_numba.infer.engine import Engine
from twell_numba.infer.request import GenerationSettings
from twell_numba.models.checkpoint import load_model

KEY = {"Authorization": "Bearer secret"}
LONG = {"prompt": "x", "max_tokens": 30_000, "temperature": 0}  # longer than any test


@pytest.fixture(scope="module")
def server(start: Any) -> Any:
    """One for all tests that need nothing special."""
    return start("--cache-tokens", 200_000)


@pytest.fixture(scope="module")
def strict(start: Any) -> Any:
    """One that takes little: a key is asked for, requests are short, and so is their time."""
    options = ("--max-request-bytes", 2000, "--timeout", 2, "--chat-tokens", 33)
    return start(*options, "--model-name", "mine/little", TWELL_API_KEY="secret")


@pytest.fixture(scope="module")
def narrow(start: Any) -> Any:
    """One that makes one text at a time, while one more waits."""
    return start("--max-sequences", 1, "--queue", 1)


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    """The same model here: what the server's answers are compared with."""
    model, tokenizer = load_model(model_folder)
    return Engine(model, tokenizer, cache_tokens=40_000)


def alone(engine: Engine, prompt: str, **settings: Any) -> str:
    """Return the text of a prompt, generated here and beside nothing else."""
    tokens = engine.tokenizer.encode(prompt)
    (request,) = engine.generate([tokens], GenerationSettings(**settings))
    return request.text


def complete(client: openai.OpenAI, prompt: Any = "Once", **fields: Any) -> Any:
    fields = {"max_tokens": 24, "temperature": 0, **fields}
    return client.completions.create(model="little", prompt=prompt, **fields)


# completions


def test_a_completion_is_the_models_own_text(client: openai.OpenAI, engine: Engine) -> None:
    answer = complete(client)
    (choice,) = answer.choices
    assert choice.text == alone(engine, "Once", max_new_tokens=24, temperature=0.0)
    assert len(choice.text) == 24
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "little")
    assert abs(answer.created - time.time()) < 60
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28,
    }  # fmt: skip


def test_without_max_tokens_a_completion_has_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="little", prompt="a", temperature=0)
    assert answer.usage.completion_tokens == 16


def test_prompts_come_as_text_or_tokens_one_or_many(client: openai.OpenAI) -> None:
    apart = [complete(client, prompt).choices[0].text for prompt in ("ab", "c")]
    assert apart[0] != apart[1]
    for prompts in (["ab", "c"], [[97, 98], [99]]):
        answer = complete(client, prompts)
        assert [choice.text for choice in answer.choices] == apart
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == 3
    assert complete(client, [97, 98]).choices[0].text == apart[0]


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    text = complete(client, "ab").choices[0].text
    assert complete(client, "ab", echo=True).choices[0].text == f"ab{text}"
    assert complete(client, [97, 98], echo=True).choices[0].text == f"ab{text}"
    stream = complete(client, ["ab", "c"], echo=True, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0] == f"ab{text}"
    assert texts[1].startswith("c")


def test_the_same_seed_gives_the_same_text_and_choices_have_seeds_in_a_row(
    client: openai.OpenAI, engine: Engine
) -> None:
    def sampled(**fields: Any) -> list[str]:
        answer = complete(client, temperature=1.5, max_tokens=40, **fields)
        return [choice.text for choice in answer.choices]

    choices = sampled(seed=5, n=3)
    assert len(set(choices)) == 3
    assert choices == [sampled(seed=seed)[0] for seed in (5, 6, 7)]
    assert choices[0] == alone(engine, "Once", max_new_tokens=40, temperature=1.5, seed=5)
    assert sampled(seed=-(2**63), n=2) == sampled(seed=-(2**63), n=2)
    assert sampled() != sampled()


def test_cuts_and_penalties_arrive_at_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    for given in ({"top_k": 1}, {"min_p": 1.0}, {"repetition_penalty": 1.8}):
        got = complete(client, temperature=1, seed=1, extra_body=given).choices[0].text
        expected = alone(engine, "Once", max_new_tokens=24, temperature=1.0, seed=1, **given)
        assert got == expected
    narrow = complete(client, temperature=2, seed=1, top_p=1e-9).choices[0].text
    assert narrow == complete(client).choices[0].text


def test_a_stop_text_ends_the_text_and_is_not_in_it(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=60).choices[0].text
    stop = text[10:13]
    expected = text[: text.index(stop)]
    for given in (stop, ["no such text", stop]):
        (choice,) = complete(client, max_tokens=60, stop=given).choices
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        stream = list(complete(client, max_tokens=60, stop=given, stream=True))
        assert "".join(chunk.choices[0].text for chunk in stream) == expected
        assert stream[-1].choices[0].finish_reason == "stop"


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    (choice,) = complete(client, logprobs=3).choices
    given = choice.logprobs
    assert "".join(given.tokens) == choice.text
    assert given.text_offset == list(range(24))
    assert len(given.token_logprobs) == len(given.top_logprobs) == 24
    for token, logprob, likeliest in zip(
        given.tokens, given.token_logprobs, given.top_logprobs, strict=True
    ):
        assert len(likeliest) == 3
        # greedy: the token drawn is the likeliest
        assert likeliest[token] == logprob == max(likeliest.values()) <= 0
        assert sum(map(math.exp, likeliest.values())) <= 1 + 1e-6
    assert complete(client).choices[0].logprobs is None
    (none_beside,) = complete(client, logprobs=0).choices
    assert none_beside.logprobs.token_logprobs == pytest.approx(given.token_logprobs, abs=1e-4)


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    whole = complete(client, ["ab", "c"], n=2, seed=1, temperature=1, logprobs=1, max_tokens=30)
    stream = list(
        complete(client, ["ab", "c"], n=2, seed=1, temperature=1, logprobs=1, max_tokens=30,
                 stream=True, stream_options={"include_usage": True})
    )  # fmt: skip
    *chunks, last = stream
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage.prompt_tokens == 3
    assert len({chunk.id for chunk in stream}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        assert [part.finish_reason for part in own][-1] == choice.finish_reason
        assert {part.finish_reason for part in own[:-1]} <= {None}
        tokens = [token for part in own for token in part.logprobs.tokens]
        assert tokens == choice.logprobs.tokens
        offsets = [offset for part in own for offset in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset


def test_a_stream_is_server_sent_events(server: Any) -> None:
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    answer = server.request("/v1/completions", body)
    assert answer.headers.get_content_type() == "text/event-stream"
    assert answer.headers["Cache-Control"] == "no-cache"
    events = answer.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith("data: {")
        assert "usage" not in json.loads(event[6:])


def test_a_stream_comes_while_the_text_is_made(client: openai.OpenAI, server: Any) -> None:
    stream = complete(client, max_tokens=20_000, stream=True)
    for _ in itertools.islice(stream, 3):
        assert server.metric("twell_requests_running") == 1
    stream.close()
    server.wait_until_idle()


# chat

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]


def test_a_chat_goes_on_from_the_messages(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.chat.completions.create(
        model="little", messages=MESSAGES, max_completion_tokens=20, temperature=0
    )
    prompt = plain_chat([MESSAGES[0], {"role": "user", "content": "Hello"}])
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == alone(engine, prompt, max_new_tokens=20, temperature=0.0)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(prompt)
    # the answer can be sent back as it is
    again = [*MESSAGES, choice.message, {"role": "user", "content": "More"}]
    client.chat.completions.create(model="little", messages=again, max_tokens=2)


def test_a_chat_stream_with_logprobs_is_the_same_in_pieces(client: openai.OpenAI) -> None:
    fields: Any = {
        "model": "little", "messages": MESSAGES, "max_tokens": 20, "n": 2, "seed": 3,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        entries = [entry for part in own for entry in part.logprobs.content]
        assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]
        data = bytes(byte for entry in entries for byte in entry.bytes)
        assert data.decode(errors="replace") == choice.message.content
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert own[-1].finish_reason == choice.finish_reason == "length"


def test_a_chat_without_a_limit_has_the_servers(strict: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    choice = strict.request("/v1/chat/completions", body, KEY).json["choices"][0]
    assert len(choice["message"]["content"]) == 33
    assert choice["finish_reason"] == "length"


# what there is


def test_models_are_listed_and_shown(client: openai.OpenAI, server: Any, strict: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("little", "model")
    assert client.models.retrieve("little") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")
    answer = strict.request("/v1/models/mine/little", headers=KEY)
    assert answer.json["id"] == "mine/little"


def test_health(server: Any, strict: Any) -> None:
    assert server.request("/health").json == {"status": "ok"}
    assert strict.request("/health").status == 200  # a key is not needed


SAMPLE = re.compile(r'([a-z_]+)(?:\{([a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*)\})? (\S+)')


def families(text: str) -> dict[str, str]:
    """Check the text format, and return the types by name."""
    types: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in types
        elif line.startswith("# TYPE "):
            assert line.split()[2] == name
            types[name] = line.split()[3]
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            float(found[3])
            suffixes = ("_bucket", "_sum", "_count") if types[name] == "histogram" else ("",)
            assert found[1] in {name + suffix for suffix in suffixes}
            assert name.endswith("_total") == (types[name] == "counter")
    return types


def test_metrics_are_prometheus_text_and_count(client: openai.OpenAI, server: Any) -> None:
    def numbers() -> dict[str, float]:
        text = server.request("/metrics").body.decode()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
                for line in text.splitlines() if not line.startswith("#")}  # fmt: skip

    complete(client, "warm")
    before = numbers()
    complete(client, "four", max_tokens=10, n=2)
    after = numbers()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['twell_http_requests_total{endpoint="/v1/completions",status="200"}'] == 1
    assert grown['twell_texts_finished_total{reason="length"}'] == 2
    assert grown["twell_generated_tokens_total"] == 20
    assert grown["twell_prompt_tokens_total"] in (4, 8)
    assert grown["twell_time_to_first_token_seconds_count"] == 2
    assert grown["twell_time_per_token_seconds_count"] == 2
    assert after["twell_cache_tokens"] == 200_000
    answer = server.request("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    types = families(answer.body.decode())
    assert types["twell_requests_running"] == types["twell_requests_waiting"] == "gauge"
    assert types["twell_cache_tokens_used"] == types["twell_cache_tokens"] == "gauge"
    assert types["twell_time_per_token_seconds"] == "histogram"


# refusals


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"1" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "a", "n": 1e30}',
        b'{"prompt": ""}',
        b'{"prompt": [256]}',
        b'{"prompt": "a", "max_tokens": 40000}',
        b'{"prompt": "a", "n": 129, "max_tokens": 1}',
        json.dumps({"prompt": "a" * 40_000}).encode(),
        json.dumps({"prompt": ["a"] * 1000}).encode(),
        json.dumps({"prompt": "a", "stop": "\ud800" * 2000}).encode(),
    ],
)
def test_a_wrong_body_is_one_clear_error(server: Any, body: bytes) -> None:
    answer = server.request("/v1/completions", body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert len(answer.error["message"]) < 250


def test_an_empty_prompt_is_named(server: Any) -> None:
    for prompt in ("", ["a", ""]):
        error = server.request("/v1/completions", {"prompt": prompt}).error
        assert "an empty prompt given" in error["message"]
        assert (error["param"], error["code"]) == ("prompt", None)


def test_a_small_body_that_asks_for_millions_of_texts_costs_nothing(server: Any) -> None:
    def resident() -> int:
        # The most that the process has ever held, on Linux.
        status = Path(f"/proc/{server.process.pid}/status")
        if not status.exists():
            return 0
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0])

    before = resident()
    body = json.dumps({"prompt": ["a"] * 100_000, "n": 128}).encode()
    answer = server.request("/v1/completions", body)
    assert answer.status == 400
    assert "a call for 12800000 texts given, at most 128 wanted" in answer.error["message"]
    assert resident() - before < 200_000


def test_the_client_library_raises_what_the_status_says(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature 3 given") as caught:
        complete(client, temperature=3)
    assert caught.value.param == "temperature"
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="little", messages=MESSAGES, tools=[tool])
    with pytest.raises(openai.BadRequestError, match="32768") as caught:
        complete(client, max_tokens=40_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="'little' is the one") as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"


def test_lone_surrogates_are_taken_as_replacement_characters(server: Any) -> None:
    body = {"prompt": "a\ud800", "max_tokens": 1, "echo": True}
    assert server.request("/v1/completions", body).json["choices"][0]["text"][:2] == "a\ufffd"
    answer = server.request("/v1/completions", {"prompt": "a", "model": "\udfff"})
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models/little", 405),
    ],
)
def test_what_is_not_there(server: Any, method: str, path: str, status: int) -> None:
    answer = server.request(path, b"{}" if method == "POST" else None, method=method)
    assert answer.status == status
    assert answer.error["message"]
    assert ("Allow" in answer.headers) == (status == 405)


def test_a_browser_cannot_be_made_to_talk_to_it(server: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for media_type in ("text/plain", "application/x-www-form-urlencoded"):
        answer = server.request("/v1/completions", body, {"Content-Type": media_type})
        assert answer.status == 415
        assert answer.error["message"].endswith("application/json wanted")
    answer = server.request("/v1/completions", body, {"Content-Type": "Application/JSON; a=b"})
    assert answer.status == 200
    assert server.request("/v1/models", headers={"Host": "evil.example"}).status == 403
    port = server.address[1]
    assert server.request("/v1/models", headers={"Host": f"localhost:{port}"}).status == 200


def test_a_key_is_asked_for(strict: Any) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            answer = strict.request(path, headers=headers)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.error["code"] == "invalid_api_key"
    client = openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert strict.request("/v1/models", headers=KEY).status == 200


def test_a_body_that_is_too_long_is_refused_whatever_its_header_says(strict: Any) -> None:
    body = {"prompt": "a", "user": "x" * 3000}
    answer = strict.request("/v1/completions", body, KEY)
    assert answer.status == 413
    assert "2000 bytes" in answer.error["message"]

    connection = http.client.HTTPConnection(*strict.address, timeout=20)
    chunks = (b"x" * 500 for _ in range(1000))  # no length is told
    headers = {"Content-Type": "application/json", **KEY}
    connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()

    # Only announced: refused before any of it comes.
    with socket.create_connection(strict.address, timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                    b"Authorization: Bearer secret\r\nContent-Type: application/json\r\n"
                    b"Content-Length: 9999999999\r\n\r\n")  # fmt: skip
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")
    fits = {"prompt": "a", "max_tokens": 1, "user": "x" * 1900}
    assert strict.request("/v1/completions", fits, KEY).status == 200


def test_a_body_that_does_not_come_is_not_waited_for(strict: Any) -> None:
    with socket.create_connection(strict.address, timeout=20) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                    b"Authorization: Bearer secret\r\nContent-Type: application/json\r\n"
                    b"Content-Length: 100\r\n\r\n{")  # fmt: skip
        assert raw.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00",  # TLS
        b"GET / HTTP/one\r\n\r\n",
        b"\r\n" * 1000,
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /" + b"x" * 100_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000
        + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\n\r\nxyz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        b"Content-Type: application/json\r\n\r\n{",
    ],
)  # fmt: skip
def test_what_is_no_request_disturbs_nothing(server: Any, data: bytes) -> None:
    with socket.create_connection(server.address, timeout=20) as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while part := raw.recv(1 << 16):
                answer += part
    assert answer[:12] in (b"", b"HTTP/1.1 400")
    assert server.request("/health").status == 200


# load, time, and clients that go


def open_stream(
    server: Any, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> http.client.HTTPConnection:
    """Start a stream and return its connection once the first piece is here."""
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    given = {"Content-Type": "application/json", **(headers or {})}
    connection.request("POST", path, json.dumps({**body, "stream": True}), given)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return connection


def wait_for_metric(server: Any, name: str, value: float) -> None:
    end = time.monotonic() + 20
    while (found := server.metric(name)) != value:
        assert time.monotonic() < end, f"{name} is {found}"
        time.sleep(0.02)


def start_waiting(server: Any) -> http.client.HTTPConnection:
    """Send a request that has to wait, and return its connection."""
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
    wait_for_metric(server, "twell_requests_waiting", 1)
    return connection


def test_a_full_queue_is_refused_and_frees_itself(narrow: Any) -> None:
    connections = [open_stream(narrow, "/v1/completions", LONG), start_waiting(narrow)]
    short = {"prompt": "q", "max_tokens": 2}
    for fields in ({}, {"stream": True}):
        answer = narrow.request("/v1/completions", {**short, **fields})
        assert answer.status == 429
        assert answer.error["code"] == "queue_full"
        assert int(answer.headers["Retry-After"]) >= 1
    many = narrow.request("/v1/completions", {**short, "n": 3})
    assert many.status == 400  # could never run, however long the client waits
    assert "at most 2 wanted" in many.error["message"]
    for connection in connections:
        connection.close()
    narrow.wait_until_idle()
    assert narrow.request("/v1/completions", {**short, "n": 2}).status == 200


def test_a_whole_answer_whose_time_is_over_is_an_error(strict: Any) -> None:
    answer = strict.request("/v1/completions", LONG, KEY)
    assert answer.status == 408
    assert answer.error["code"] == "timeout"
    assert "longer than 2 seconds" in answer.error["message"]
    strict.wait_until_idle(KEY)


def test_a_stream_whose_time_is_over_ends_in_an_error(strict: Any) -> None:
    strict.wait_until_idle(KEY)
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="secret", max_retries=0) as client:
        stream = client.completions.create(
            model="mine/little", prompt="x", max_tokens=30_000, stream=True
        )
        started, texts = time.monotonic(), []
        with pytest.raises(openai.APIError, match="longer than 2 seconds"):
            texts.extend(chunk.choices[0].text for chunk in stream)
    assert 1 < time.monotonic() - started < 15
    assert len("".join(texts)) > 10
    strict.wait_until_idle(KEY)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_a_client_no_longer_waits_for_is_not_made(
    server: Any, path: str, stream: bool
) -> None:
    server.wait_until_idle()
    body: dict[str, Any] = {**LONG, "stream": stream, "n": 2}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    wait_for_metric(server, "twell_requests_running", 2)
    connection.close()
    server.wait_until_idle(seconds=5)


def test_a_client_that_goes_while_it_waits_leaves_no_request(narrow: Any) -> None:
    running = open_stream(narrow, "/v1/completions", LONG)
    waiting = start_waiting(narrow)
    waiting.close()
    wait_for_metric(narrow, "twell_requests_waiting", 0)
    assert narrow.metric("twell_requests_running") == 1
    running.close()
    narrow.wait_until_idle()


def test_more_connections_than_a_server_has_use_for_are_refused(narrow: Any) -> None:
    with ExitStack() as stack:
        for _ in range(270):
            stack.enter_context(socket.create_connection(narrow.address, timeout=20))
        assert narrow.request("/health").status == 503
    end = time.monotonic() + 10
    while narrow.request("/health").status != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_client_that_does_not_read_holds_up_nobody(server: Any, client: openai.OpenAI) -> None:
    server.wait_until_idle()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(server.address)
        body = json.dumps({**LONG, "max_tokens": 1500, "stream": True, "logprobs": 20}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        lazy.sendall(head.encode() + body)
        server_answers = [complete(client, max_tokens=50).choices[0].text for _ in range(3)]
        assert len(set(server_answers)) == 1
        # The text is finished though nobody reads it, and all of it is there in the end.
        server.wait_until_idle(seconds=30)
        lazy.settimeout(20)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = lazy.recv(1 << 16)
            assert part
            received += part
    assert b"data: [DONE]" in received
    texts = re.findall(rb'"text":"((?:[^"\\]|\\.)*)"', received)
    assert len(json.loads(b'"' + b"".join(texts) + b'"')) == 1500


def test_many_streams_at_once_keep_their_own_text(server: Any, engine: Engine) -> None:
    prompts = [f"{number} is" for number in range(12)]
    expected = [alone(engine, p, max_new_tokens=60, temperature=0.0) for p in prompts]
    assert len(set(expected)) == len(prompts)
    together = threading.Barrier(len(prompts))

    def stream(prompt: str) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            together.wait(20)
            return "".join(
                chunk.choices[0].text
                for chunk in complete(client, prompt, max_tokens=60, stream=True)
            )

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(stream, prompts)) == expected


def test_nothing_was_logged(server: Any, strict: Any, narrow: Any) -> None:
    """No fault showed up in any test before."""
    for process in (server, strict, narrow):
        lines = process.stderr.read_text().splitlines()
        assert [line for line in lines if "chat template" not in line] == []
