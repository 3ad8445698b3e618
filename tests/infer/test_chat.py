"""Conversations: prompts of messages, and what is kept of a long history."""

from typing import Any

import numpy as np
import pytest

from twell_numba.errors import TwellError, UsageError
from twell_numba.infer.chat import Conversation, chat_prompt, plain_chat
from twell_numba.infer.engine import Engine
from twell_numba.infer.request import GenerationSettings
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
GREEDY = GenerationSettings(max_new_tokens=4, temperature=0)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation(model: Transformer, settings: GenerationSettings = GREEDY, **options: Any) -> Any:
    """Return a conversation by a short template, whose notices are kept as ``notices``."""
    engine = Engine(model, ByteTokenizer(TEMPLATE), max_sequences=1)
    notices: list[str] = []
    talk = Conversation(engine, settings, on_notice=notices.append, **options)
    talk.notices = notices  # type: ignore[attr-defined]
    return talk


def test_without_a_template_messages_are_plain_text() -> None:
    messages = [
        said("user", "Hi"), said("system", "Be kind."), said("assistant", " Hello"),
        said("user", "Why?"),
    ]  # fmt: skip
    text = "Be kind.\n\nUser: Hi\nAssistant: Hello\nUser: Why?\nAssistant:"
    assert plain_chat(messages) == text
    prompt = chat_prompt(ByteTokenizer(), messages)
    assert bytes(prompt.tokens.tolist()).decode() == text
    assert prompt.stop == ("\nUser:",)


def test_a_template_writes_the_messages_and_its_tokens_end_them() -> None:
    prompt = chat_prompt(ByteTokenizer(TEMPLATE), [said("system", "S"), said("user", "U")])
    assert bytes(prompt.tokens.tolist()) == b"<s>S<u>U<a>"
    assert prompt.stop == ()


def test_an_answer_is_what_the_model_goes_on_with(byte_model: Transformer) -> None:
    talk = conversation(byte_model, system="S")
    pieces: list[str] = []
    answer = talk.ask("Hi", pieces.append)
    engine = Engine(byte_model, ByteTokenizer())
    (request,) = engine.generate([list(b"<s>S<u>Hi<a>")], GREEDY)
    assert answer == "".join(pieces) == request.text
    assert talk.messages == [said("user", "Hi"), said("assistant", answer.strip())]
    assert talk.notices == []


def test_the_history_is_part_of_the_next_prompt(byte_model: Transformer) -> None:
    talk = conversation(byte_model)
    first = talk.ask("a").strip()
    second = talk.ask("b")
    engine = Engine(byte_model, ByteTokenizer())
    prompt = f"<u>a<a>{first}<u>b<a>".encode()
    (request,) = engine.generate([list(prompt)], GREEDY)
    assert second == request.text
    talk.reset()
    assert talk.ask("a").strip() == first


def test_a_long_conversation_forgets_its_oldest_turns_and_says_so(byte_model: Transformer) -> None:
    talk = conversation(byte_model, system="S")
    for number in range(12):
        talk.ask(f"m{number}")
        contents = [message["content"] for message in talk.messages]
        assert contents[-2] == f"m{number}"  # the newest is always there
        assert [m["role"] for m in talk.messages] == ["user", "assistant"] * (len(contents) // 2)
        prompt = chat_prompt(ByteTokenizer(TEMPLATE), [said("system", "S"), *talk.messages[:-1]])
        assert len(prompt.tokens) + GREEDY.max_new_tokens <= 48
    assert talk.notices
    assert set(talk.notices) <= {
        f"The context of 48 tokens is full: the oldest {count} messages are forgotten."
        for count in (2, 4)
    }


@pytest.mark.parametrize("length", [*range(33, 46), 300])
def test_messages_around_the_longest_possible(byte_model: Transformer, length: int) -> None:
    talk = conversation(byte_model)
    talk.ask("a")
    before = list(talk.messages)
    # <u> and <a> are 6 tokens, and 4 stay free for the answer.
    if length <= 48 - 6 - 4:
        assert talk.ask("x" * length)
        assert talk.messages[0]["content"] == "x" * length
        return
    with pytest.raises(UsageError, match=f"{length + 6} tokens given .* at most 44") as caught:
        talk.ask("x" * length)
    assert "\n" not in str(caught.value)
    assert talk.messages == before
    assert talk.ask("b")


def test_an_answer_that_fills_the_context_says_so(byte_model: Transformer) -> None:
    talk = conversation(byte_model, GenerationSettings(max_new_tokens=1000, temperature=0))
    talk.ask("x")
    assert talk.notices == ["The context of 48 tokens is full."]


def test_seeds_give_the_same_conversation_and_each_answer_another(byte_model: Transformer) -> None:
    def answers(seed: int) -> list[str]:
        settings = GenerationSettings(max_new_tokens=6, temperature=1.5, seed=seed)
        talk = conversation(byte_model, settings)
        first = talk.ask("a")
        talk.reset()
        return [first, talk.ask("a")]

    assert answers(1) == answers(1)
    assert answers(1)[0] != answers(1)[1]
    assert answers(1) != answers(2)


def test_an_answer_can_be_stopped_and_what_was_said_stays(byte_model: Transformer) -> None:
    talk = conversation(byte_model, GenerationSettings(max_new_tokens=25, temperature=0))
    whole = talk.ask("a")
    talk.reset()
    pieces: list[str] = []
    answer = talk.ask("a", pieces.append, is_interrupted=lambda: len(pieces) >= 2)
    assert answer == "".join(pieces)
    assert whole.startswith(answer.removesuffix("\ufffd"))
    assert len(answer) < len(whole)
    assert talk.messages[-1] == said("assistant", answer.strip())
    assert talk.ask("b")


def test_a_model_that_has_diverged_leaves_the_history_as_it_was(byte_model: Transformer) -> None:
    talk = conversation(byte_model)
    talk.ask("a")
    before = list(talk.messages)
    weight = byte_model.parameters()["model.norm.weight"].value
    kept = weight.copy()
    weight[:] = np.nan
    with pytest.raises(TwellError, match="diverged"):
        talk.ask("b")
    weight[:] = kept
    assert talk.messages == before
    assert talk.ask("c")


def test_an_error_of_the_display_is_not_taken_for_the_models(byte_model: Transformer) -> None:
    talk = conversation(byte_model)

    def show(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        talk.ask("a", show)
    assert talk.messages == []
    assert talk.ask("a")


def test_settings_are_checked_at_once(byte_model: Transformer) -> None:
    with pytest.raises(UsageError, match="temperature"):
        conversation(byte_model, GenerationSettings(temperature=-1))
