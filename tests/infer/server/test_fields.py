"""JSON of strangers."""

import json
from typing import Any

import pytest

from twell_numba.infer.server.errors import ApiError
from twell_numba.infer.server.fields import Fields, parse_json_object, shown


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[1, 2]", "[1, 2], a JSON object wanted"),
        (b"null", "null, a JSON object wanted"),
        (b'"text"', "a JSON object wanted"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json_object(body)
    assert caught.value.status == 400
    assert message in caught.value.message
    assert len(caught.value.message) < 200
    assert "\n" not in caught.value.message


def test_a_json_object_is_returned() -> None:
    content = {"text": "ø\n", "list": [1, 2.5, None, True]}
    assert parse_json_object(json.dumps(content).encode()) == content


@pytest.mark.parametrize("value", [True, "1", 1.5, [], {}, -1, 10, 1e30, 10**40])
def test_a_whole_number_is_whole_and_in_range(value: Any) -> None:
    with pytest.raises(ApiError, match="a whole number from 0 to 9 wanted") as caught:
        Fields({"n": value}, "part.").whole("n", 0, 9)
    assert caught.value.field == "part.n"
    assert shown(value) in caught.value.message


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert Fields({"n": 3.0}).whole("n", 0, 9) == 3
    assert Fields({"n": None}).whole("n", 0, 9) is None


@pytest.mark.parametrize("value", [False, "0.5", [], float("inf"), 2.5, 0, 10**400])
def test_a_number_is_in_range(value: Any) -> None:
    with pytest.raises(ApiError, match="p .* given, a number above 0, up to 2 wanted"):
        Fields({"p": value}).number("p", 1.0, 0, 2, above_low=True)


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_a_flag_is_true_or_false(value: Any) -> None:
    with pytest.raises(ApiError, match="true or false wanted"):
        Fields({"stream": value}).flag("stream")


def test_a_field_left_over_is_refused_with_the_one_that_was_meant() -> None:
    fields = Fields({"temprature": 1})
    fields.number("temperature", 1.0, 0, 2)
    with pytest.raises(ApiError, match="did you mean 'temperature'") as caught:
        fields.finish()
    assert caught.value.field == "temprature"


def test_a_neutral_value_is_not_one_that_equals_it_in_python() -> None:
    Fields({"penalty": 0.0}).refuse({"penalty": (0,)})
    for value in (False, "", [], 0.1):
        with pytest.raises(ApiError, match="penalty .* not supported"):
            Fields({"penalty": value}).refuse({"penalty": (0,)})


def test_shown_values_are_short_and_on_one_line() -> None:
    assert shown("a\nb") == '"a\\nb"'
    assert len(shown("x" * 1000)) == 60
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a nested list"
