"""What a client may ask for."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_numba.infer.request import GenerationSettings
from twell_numba.infer.server.errors import ApiError
from twell_numba.infer.server.schemas import parse_chat, parse_completion

HELLO = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "x", **fields})


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": HELLO, **fields})


def test_defaults_are_openais() -> None:
    call = completion()
    assert call.settings == GenerationSettings()
    assert (call.n, call.max_tokens, call.seed, call.stream, call.echo) == (
        1,
        16,
        None,
        False,
        False,
    )
    assert chat().max_tokens is None


def test_null_is_not_given() -> None:
    names = ("model", "n", "max_tokens", "stop", "seed", "logprobs", "stream", "stream_options",
             "temperature", "top_p", "tools", "logit_bias", "user")  # fmt: skip
    assert completion(**dict.fromkeys(names)) == completion()


def test_every_setting_arrives() -> None:
    call = completion(
        model="m", n=3, max_tokens=5, seed=-7, stream=True, stream_options={"include_usage": True},
        temperature=0, top_p=0.5, top_k=4, min_p=0.1, repetition_penalty=1.1, stop=["a", "b"],
        ignore_eos=True, logprobs=2, best_of=3,
    )  # fmt: skip
    assert call.settings == GenerationSettings(
        temperature=0.0, top_p=0.5, top_k=4, min_p=0.1, repetition_penalty=1.1, stop=("a", "b"),
        ignore_eos=True, logprobs=2,
    )  # fmt: skip
    assert (call.model, call.n, call.max_tokens, call.seed) == ("m", 3, 5, -7)
    assert (call.stream, call.include_usage) == (True, True)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_are_texts_or_tokens(given: Any, prompts: Any) -> None:
    assert completion(prompt=given).prompts == prompts


@pytest.mark.parametrize(
    "given", [None, 1, [], [[]], [[1], []], ["a", 1], [1, "a"], [True], [1.0], [-1], [2**31], {}]
)
def test_other_prompts_are_refused(given: Any) -> None:
    with pytest.raises(ApiError, match="a list of such lists, wanted") as caught:
        completion(prompt=given)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"model": 3}, "model"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"suffix": "end"}, "suffix"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"guided_json": {}}, "guided_json"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_name(fields: dict[str, Any], field: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(ApiError) as caught:
            parse(**fields)
        assert caught.value.status == 400
        assert caught.value.field == field
        assert field in caught.value.message


def test_what_cannot_change_the_answer_is_ignored() -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True,
    }  # fmt: skip
    assert completion(**harmless) == completion()
    assert chat(**harmless) == chat()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_fields_of_completions(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.field == field


def test_fields_of_chat() -> None:
    assert chat(logprobs=True).settings.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).settings.logprobs == 3
    assert chat(logprobs=False).settings.logprobs is None
    assert chat(max_tokens=3).max_tokens == chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    for wrong in ({"logprobs": 2}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21},
                  {"max_tokens": 3, "max_completion_tokens": 4}, {"prompt": "x"},
                  {"echo": True}):  # fmt: skip
        with pytest.raises(ApiError):
            chat(**wrong)


def test_messages_are_texts_or_text_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    # as a client library gives an answer back
    sent_back = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": [],
                 "audio": None}  # fmt: skip
    call = chat(messages=[{"role": "developer", "content": "Be kind"}, sent_back,
                          {"role": "user", "content": parts}])  # fmt: skip
    assert call.messages == (
        {"role": "system", "content": "Be kind"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Hello"},
    )


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("Hello", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "audio": "y"}]},
         "messages[1].content"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[1].name"),
    ],
)  # fmt: skip
def test_other_messages_are_refused_by_their_place(message: Any, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[*HELLO, message])
    assert caught.value.field == field


@pytest.mark.parametrize("messages", [None, [], "Hello", {}])
def test_there_is_at_least_one_message(messages: Any) -> None:
    with pytest.raises(ApiError, match="at least one message"):
        chat(messages=messages)


FIELDS = [
    "model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stream", "stream_options",
    "logprobs", "top_logprobs", "echo", "best_of", "ignore_eos", "tools", "logit_bias", "user",
    "response_format", "frequency_penalty", "role", "content", "type", "text", "include_usage",
]  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(["user", "assistant", "text", 0, 1, 2]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
@settings(max_examples=150, deadline=None)
def test_whatever_comes_is_a_call_or_one_clear_error(content: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        result = parsed(parse, content)
        if isinstance(result, ApiError):
            assert result.status == 400
            assert 0 < len(result.message) < 300
            assert result.field is not None
        else:
            result.settings.validate()


def parsed(parse: Any, content: dict[str, Any]) -> Any:
    """Return the call, or the error."""
    try:
        return parse(content)
    except ApiError as error:
        return error
