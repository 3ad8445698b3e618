"""Requests side by side: each gets what it gets alone, and none disturbs another."""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from twell_numba.errors import UsageError
from twell_numba.infer import engine as engine_module
from twell_numba.infer.engine import Engine
from twell_numba.infer.generate import generate
from twell_numba.infer.request import GenerationSettings, Piece, Request
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

GREEDY = GenerationSettings(temperature=0.0, max_new_tokens=12)
PROMPTS = ["def ", "x", "grød 🙂", "a longer prompt than the others", "\x00"]


def encoded(prompt: str) -> np.ndarray:
    return ByteTokenizer().encode(prompt)


def make(model: Transformer, **sizes: int) -> Engine:
    """An engine in which pages hold NaN unless a sequence has written to them."""
    engine = Engine(model, ByteTokenizer(), **sizes)
    cache = engine._cache
    poison(cache, np.arange(cache.pages))
    give_back = cache.give_back

    def poison_and_give_back(table: np.ndarray) -> None:
        poison(cache, table)
        give_back(table)

    cache.give_back = poison_and_give_back  # type: ignore[method-assign]
    return engine


def poison(cache: engine_module.PagedKVCache, table: np.ndarray) -> None:
    for pages in cache.layers:
        for array in pages:
            array[table] = np.nan


def alone(model: Transformer, prompt: str, settings: GenerationSettings) -> list[int]:
    generation = generate(model, ByteTokenizer(), prompt, **vars(settings))
    for _ in generation:
        pass
    return generation.tokens


@pytest.mark.parametrize("path", ["auto", "dense", "twell"])
@pytest.mark.parametrize("prefill_chunk", [1, 7, 256])
def test_prompts_side_by_side_continue_as_alone(
    byte_model: Transformer, path: str, prefill_chunk: int
) -> None:
    byte_model.ffn_path = path
    engine = make(byte_model, prefill_chunk=prefill_chunk)
    requests = engine.generate([encoded(prompt) for prompt in PROMPTS], GREEDY)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.tokens == alone(byte_model, prompt, GREEDY)
        assert request.finish_reason == "length"
        assert request.error is None
    assert engine.cache_tokens_used == engine.running == engine.waiting == 0
    assert engine.generated_tokens == 12 * len(PROMPTS)
    assert engine.prompt_tokens == sum(len(encoded(prompt)) for prompt in PROMPTS)


def test_settings_of_their_own(byte_model: Transformer) -> None:
    """Every request has a seed and cuts of its own, whatever runs beside it."""
    all_settings = [
        GenerationSettings(max_new_tokens=20, seed=3),
        GenerationSettings(max_new_tokens=20, seed=4),
        GenerationSettings(max_new_tokens=20, temperature=0.0),
        GenerationSettings(max_new_tokens=20, seed=3, top_k=4, temperature=2.0),
        GenerationSettings(max_new_tokens=20, seed=3, top_p=0.5, temperature=3.0),
        GenerationSettings(max_new_tokens=20, seed=3, min_p=0.2, temperature=3.0),
        GenerationSettings(max_new_tokens=20, seed=3, repetition_penalty=1.5, logprobs=2),
    ]
    engine = make(byte_model)
    requests = [engine.submit(encoded("abc"), settings) for settings in all_settings]
    engine.run()
    texts = [tuple(request.tokens) for request in requests]
    assert texts == [tuple(alone(byte_model, "abc", settings)) for settings in all_settings]
    assert len(set(texts)) == len(texts)
    assert [len(request.token_logprobs) for request in requests] == [0] * 6 + [20]


def test_a_request_that_comes_later_changes_nothing(byte_model: Transformer) -> None:
    engine = make(byte_model)
    settings = GenerationSettings(max_new_tokens=20, seed=5)
    first = engine.submit(encoded("abc"), settings)
    for _ in range(3):
        assert engine.step()
    second = engine.submit(encoded("longer than abc"), settings)
    engine.run()
    assert first.tokens == alone(byte_model, "abc", settings)
    assert second.tokens == alone(byte_model, "longer than abc", settings)


def test_pieces_make_the_text_and_hold_all_tokens(byte_model: Transformer) -> None:
    pieces: list[Piece] = []
    engine = make(byte_model)
    settings = GenerationSettings(max_new_tokens=30, temperature=3.0, logprobs=1)
    request = engine.submit(encoded("abc"), settings, pieces.append)
    engine.run()
    assert "".join(piece.text for piece in pieces) == request.text
    assert [token for piece in pieces for token in piece.tokens] == request.tokens
    assert [one for piece in pieces for one in piece.logprobs] == request.token_logprobs
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"
    assert request.text == bytes(request.tokens).decode(errors="replace")


def test_a_request_waits_until_there_is_room(byte_model: Transformer) -> None:
    """Of three that take two pages each, two fit into five pages."""
    engine = make(byte_model, cache_tokens=5 * 16)
    settings = replace(GREEDY, max_new_tokens=14)
    requests = [engine.submit(encoded("abcdef"), settings) for _ in range(3)]
    engine.step()
    assert (engine.running, engine.waiting, engine.cache_tokens_used) == (2, 1, 64)
    assert not requests[2].tokens
    engine.run()
    assert {tuple(request.tokens) for request in requests} == {
        tuple(alone(byte_model, "abcdef", settings))
    }


def test_at_most_so_many_run_at_once(byte_model: Transformer) -> None:
    engine = make(byte_model, max_sequences=2)
    for _ in range(5):
        engine.submit(encoded("abc"), GREEDY)
    seen = []
    while engine.step():
        seen.append(engine.running)
    assert max(seen) == 2


def test_a_long_prompt_does_not_stop_the_others(byte_model: Transformer) -> None:
    """While it is read, three tokens a step, another text grows by a token a step."""
    engine = make(byte_model, prefill_chunk=3)
    other = engine.submit(encoded("a"), replace(GREEDY, max_new_tokens=20))
    engine.step()
    long = engine.submit(encoded("b" * 30), GREEDY)
    for step in range(9):
        before = len(other.tokens)
        engine.step()
        assert len(other.tokens) == before + 1, step
        assert not long.tokens
    engine.step()
    assert long.tokens


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        (0, 5, "an empty prompt given"),
        (49, 0, "a prompt of 49 tokens and 0 new ones given, but the model's context has room "),
        (40, 10, "context has room for 48 tokens and the cache for 32: shorten the prompt or ask"),
        (30, 4, "the cache for 32: shorten the prompt, make the cache larger or ask for fewer"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    byte_model: Transformer, prompt: int, new: int, message: str
) -> None:
    engine = make(byte_model, cache_tokens=40)
    assert engine.cache_tokens == 32
    with pytest.raises(UsageError, match=message):
        engine.submit(np.zeros(prompt, np.int64), replace(GREEDY, max_new_tokens=new))
    assert engine.waiting == 0


@pytest.mark.parametrize("prompt", [1, 31, 32])
def test_what_just_fits_is_taken(byte_model: Transformer, prompt: int) -> None:
    engine = make(byte_model, cache_tokens=32)
    most = engine.most_new_tokens(prompt)
    assert most == 33 - prompt
    settings = replace(GREEDY, max_new_tokens=most)
    (request,) = engine.generate([np.full(prompt, 97)], settings)
    assert request.tokens == alone(byte_model, "a" * prompt, settings)
    assert len(request.tokens) == most


@pytest.mark.parametrize("token", [-1, 256])
def test_a_prompt_of_unknown_tokens_is_refused(byte_model: Transformer, token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} given in a prompt, 0 to 255 wanted"):
        make(byte_model).submit([1, token, 2], GREEDY)


@pytest.mark.parametrize("size", ["max_sequences", "prefill_chunk", "cache_tokens"])
def test_sizes_out_of_range_are_refused(byte_model: Transformer, size: str) -> None:
    with pytest.raises(UsageError, match=f"{size.replace('_', '-')} 0 given, at least"):
        Engine(byte_model, ByteTokenizer(), **{size: 0})


def test_generate_takes_all_or_nothing(byte_model: Transformer) -> None:
    engine = make(byte_model)
    with pytest.raises(UsageError, match="token 300"):
        engine.generate([[1, 2], [300]], GREEDY)
    assert not engine.step()
    assert engine.generated_tokens == 0


def test_no_new_tokens(byte_model: Transformer) -> None:
    pieces: list[Piece] = []
    engine = make(byte_model)
    settings = replace(GREEDY, max_new_tokens=0)
    request = engine.submit(encoded("abc"), settings, pieces.append)
    assert not engine.step()
    assert (request.tokens, request.finish_reason) == ([], "length")
    assert pieces == [Piece("", finish_reason="length")]


def test_cancelling_a_running_and_a_waiting_request(byte_model: Transformer) -> None:
    engine = make(byte_model, max_sequences=1)
    pieces: list[Piece] = []
    running, waiting, other = (
        engine.submit(encoded("abc"), GREEDY, pieces.append) for _ in range(3)
    )
    engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    engine.step()
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert [piece.finish_reason for piece in pieces].count("cancelled") == 2
    assert (len(running.tokens), waiting.tokens) == (2, [])
    engine.run()
    assert other.tokens == alone(byte_model, "abc", GREEDY)
    engine.cancel(other)
    engine.run()
    assert other.finish_reason == "length"


def test_a_request_cancelled_while_the_queue_is_looked_through_is_not_lost(
    byte_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(byte_model, max_sequences=1)
    pieces: list[Piece] = []
    engine.submit(encoded("abc"), GREEDY)
    waiting = engine.submit(encoded("abc"), GREEDY, pieces.append)

    def looked_at(request: Request) -> bool:
        answer = original(request)
        if request is waiting:
            engine.cancel(request)  # as another thread may at any moment
        return answer

    original = engine_module._needs_no_work
    monkeypatch.setattr(engine_module, "_needs_no_work", looked_at)
    engine.run()
    assert [piece.finish_reason for piece in pieces] == ["cancelled"]
    assert engine.waiting == 0


def test_a_request_for_nothing_that_comes_in_the_middle_of_a_step(
    byte_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(byte_model)
    late: list[Request] = []

    def submit_and_admit() -> None:
        if not late:
            settings = replace(GREEDY, max_new_tokens=0)
            late.append(engine.submit(encoded("x" * 17), settings))  # one more than a page
        admit()

    admit = engine._admit
    monkeypatch.setattr(engine, "_admit", submit_and_admit)
    request = engine.submit(encoded("abc"), GREEDY)
    engine.run()
    assert (late[0].tokens, late[0].finish_reason) == ([], "length")
    assert request.tokens == alone(byte_model, "abc", GREEDY)


def test_cancelling_from_a_callback_and_submitting_from_one(byte_model: Transformer) -> None:
    engine = make(byte_model)
    more: list[Request] = []

    def on_piece(piece: Piece) -> None:
        if not more:
            more.append(engine.submit(encoded("later"), GREEDY))
        engine.cancel(request)

    request = engine.submit(encoded("abc"), replace(GREEDY, max_new_tokens=40), on_piece)
    engine.run()
    assert request.finish_reason == "cancelled"
    assert more[0].tokens == alone(byte_model, "later", GREEDY)


def test_a_callback_that_fails_ends_its_request_only(byte_model: Transformer) -> None:
    calls: list[Piece] = []

    def fail(piece: Piece) -> None:
        calls.append(piece)
        raise RuntimeError("the client\nhas gone")

    engine = make(byte_model)
    failing = engine.submit(encoded("abc"), GREEDY, fail)
    other = engine.submit(encoded("abc"), GREEDY)
    engine.run()
    assert failing.finish_reason == "error"
    assert failing.error == "the callback of the request failed: RuntimeError: the client has gone"
    assert len(calls) == 1
    assert other.tokens == alone(byte_model, "abc", GREEDY)
    assert engine.cache_tokens_used == 0


def change_logits(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray, np.ndarray], None]
) -> None:
    """Let ``change(logits, tokens)`` alter the logits of every decoding pass in place."""

    def changed(model, cache, tokens, positions, tables):  # type: ignore[no-untyped-def]
        logits = original(model, cache, tokens, positions, tables)
        change(logits, positions)
        return logits

    original = engine_module.decode_logits
    monkeypatch.setattr(engine_module, "decode_logits", changed)


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "the largest logit is nan"), (-np.inf, "every logit is -inf, which forbids all")],
)
def test_logits_to_choose_nothing_from_end_their_request_only(
    byte_model: Transformer, monkeypatch: pytest.MonkeyPatch, value: float, message: str
) -> None:
    def spoil(logits: np.ndarray, positions: np.ndarray) -> None:
        if len(logits) == 2 and positions[0] == 5:
            logits[0, :] = value

    change_logits(monkeypatch, spoil)
    pieces: list[Piece] = []
    engine = make(byte_model)
    spoiled = engine.submit(encoded("abc"), GREEDY, pieces.append)
    other = engine.submit(encoded("x"), GREEDY)
    engine.run()
    assert spoiled.finish_reason == pieces[-1].finish_reason == "error"
    assert spoiled.error is not None
    assert message in spoiled.error
    assert spoiled.tokens == alone(byte_model, "abc", GREEDY)[:3]
    assert other.tokens == alone(byte_model, "x", GREEDY)


def test_a_token_that_the_tokenizer_does_not_know_ends_its_request_only(
    byte_model: Transformer,
) -> None:
    class Tokenizer(ByteTokenizer):
        def decode_bytes(self, tokens: list[int], **options: bool) -> bytes:  # type: ignore[override]
            if tokens == [unknown]:
                raise ValueError(f"token {unknown} given, one of the vocabulary wanted")
            return super().decode_bytes(tokens)

    expected = {prompt: alone(byte_model, prompt, GREEDY) for prompt in ("abc", "x")}
    unknown = next(t for t in expected["abc"] if t not in expected["x"])
    engine = Engine(byte_model, Tokenizer())
    first, second = engine.generate([encoded("abc"), encoded("x")], GREEDY)
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert f"token {unknown} given" in str(first.error)
    assert second.tokens == expected["x"]


def test_a_pass_that_fails_ends_what_runs_and_gives_the_pages_back(
    byte_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(logits: np.ndarray, positions: np.ndarray) -> None:
        if positions[0] == 5:
            raise MemoryError("no room")

    change_logits(monkeypatch, fail)
    engine = make(byte_model, max_sequences=2)
    requests = [engine.submit(encoded("abc"), GREEDY) for _ in range(2)]
    waiting = engine.submit(encoded("x" * 20), GREEDY)
    with pytest.raises(MemoryError):
        engine.run()
    assert [request.finish_reason for request in requests] == ["error", "error"]
    assert requests[0].error == "MemoryError: no room"
    assert (engine.running, engine.cache_tokens_used) == (0, 0)
    engine.run()
    assert waiting.tokens == alone(byte_model, "x" * 20, GREEDY)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_token_that_ends_a_text(byte_model: Transformer, ignore_eos: bool) -> None:
    """It counts as a token, and gives no text."""
    whole = alone(byte_model, "abc", GREEDY)
    end = whole.index(whole[4])  # the first place where this token comes

    class Tokenizer(ByteTokenizer):
        eos_tokens = (300, whole[4])

    engine = Engine(byte_model, Tokenizer())
    settings = replace(GREEDY, ignore_eos=ignore_eos)
    (request,) = engine.generate([encoded("abc")], settings)
    if ignore_eos:
        assert (request.tokens, request.finish_reason) == (whole, "length")
    else:
        assert (request.tokens, request.finish_reason) == (whole[: end + 1], "stop")
        assert request.text == bytes(whole[:end]).decode(errors="replace")


class Script:
    """Makes a model write given texts, byte by byte: the text of a prompt's first byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]) -> None:
        self.data = {ord(key): text.encode() for key, text in texts.items()}

        def logits_of(request: Request) -> np.ndarray:
            logits = np.zeros(256, np.float32)
            data = self.data[int(request.prompt_tokens[0])]
            logits[data[len(request.tokens) % len(data)]] = 9
            return logits

        def advance(sequences, logits):  # type: ignore[no-untyped-def]
            return original(sequences, np.stack([logits_of(own.request) for own in sequences]))

        original = engine_module.advance
        monkeypatch.setattr(engine_module, "advance", advance)


def test_stop_texts_of_several_tokens(
    byte_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may become a stop text is withheld, and nothing of one is ever given out."""
    Script(monkeypatch, {"a": "one END two", "b": "one ENE EN", "c": "one END two"})
    engine = make(byte_model)
    pieces: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    settings = GenerationSettings(temperature=0.0, max_new_tokens=10, stop=("END", "🙂"))
    requests = {
        key: engine.submit(
            encoded(key),
            replace(settings, stop=()) if key == "c" else settings,
            lambda piece, key=key: pieces[key].append(piece.text),
        )
        for key in pieces
    }
    engine.run()
    assert (requests["a"].text, requests["a"].finish_reason) == ("one ", "stop")
    assert len(requests["a"].tokens) == len("one END")
    assert (requests["b"].text, requests["b"].finish_reason) == ("one ENE EN", "length")
    assert pieces["b"] == [*"one ", "EN", "E ", "EN"]
    assert (requests["c"].text, requests["c"].finish_reason) == ("one END tw", "length")


def test_submitting_and_cancelling_from_other_threads(byte_model: Transformer) -> None:
    engine = make(byte_model, max_sequences=4, cache_tokens=160)
    settings = GenerationSettings(max_new_tokens=10, seed=1)
    expected = alone(byte_model, "abc", settings)
    finished: list[Request] = []

    def client(number: int) -> None:
        for turn in range(5):
            done = threading.Event()

            def on_piece(piece: Piece, done: threading.Event = done) -> None:
                if piece.finish_reason:
                    done.set()

            request = engine.submit(encoded("abc"), settings, on_piece)
            if (number + turn) % 3 == 0:
                engine.cancel(request)
            assert done.wait(30)
            finished.append(request)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    while any(thread.is_alive() for thread in clients):
        engine.step()
    assert len(finished) == 40
    for request in finished:
        assert request.finish_reason in ("length", "cancelled")
        assert request.tokens == expected[: len(request.tokens)]
    assert engine.cache_tokens_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_over_a_small_cache(byte_model: Transformer, seed: int) -> None:
    """Each gets exactly the text that it gets alone, or its beginning; and no page is lost."""
    rng = np.random.default_rng(seed)
    engine = make(byte_model, cache_tokens=7 * 16, max_sequences=5, prefill_chunk=11)
    requests: list[Request] = []
    while len(requests) < 40 or engine.step():
        for _ in range(rng.integers(0, 4)):
            if len(requests) < 40:
                prompt = rng.integers(0, 128, rng.integers(1, 49))
                settings = GenerationSettings(
                    max_new_tokens=int(rng.integers(0, 50 - len(prompt))),
                    temperature=float(rng.choice([0.0, 1.0])),
                    top_k=int(rng.choice([0, 5])),
                    repetition_penalty=float(rng.choice([1.0, 1.2])),
                    seed=int(rng.integers(100)),
                    stop=("e", "🙂a") if rng.random() < 0.3 else (),
                )
                requests.append(engine.submit(prompt, settings))
        if rng.random() < 0.2 and requests:
            engine.cancel(requests[rng.integers(len(requests))])
        engine.step()
    assert (engine.running, engine.waiting, engine.cache_tokens_used) == (0, 0, 0)
    cancelled = 0
    for request in requests:
        prompt = bytes(request.prompt_tokens.tolist()).decode()
        expected = alone(byte_model, prompt, request.settings)
        if request.finish_reason == "cancelled":
            cancelled += 1
            expected = expected[: len(request.tokens)]
        assert request.tokens == expected
        assert request.finish_reason in ("length", "stop", "cancelled")
    assert 0 < cancelled < 20
