import json
import os
from pathlib import Path

import pytest

from twell_numba.errors import TwellError
from twell_numba.infer.questions import read_questions

GOOD = {"context": "2 + 2 =", "choices": ["4", "5", "6"], "answer": 0}
EXAMPLES = Path(__file__).parents[2] / "examples" / "questions.jsonl"


def write(path: Path, *lines: object) -> Path:
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(written), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "questions.jsonl"


def test_fields(file: Path) -> None:
    write(file, GOOD, {"question": "é?", "choices": ["a", "b"], "answer": "b", "id": 7, "more": []})
    first, second = read_questions(file)
    assert (first.context, first.choices, first.answer) == ("2 + 2 =", ("4", "5", "6"), 0)
    assert (second.context, second.choices, second.answer) == ("é?", ("a", "b"), 1)
    assert first.name == f"{file} line 1"
    assert second.name == f"{file} line 2 (id 7)"


def test_blank_lines_and_a_byte_order_mark_are_passed_over(file: Path) -> None:
    write(file, "\ufeff" + json.dumps(GOOD), "", "  \r", GOOD, "")
    assert [question.name[-6:] for question in read_questions(file)] == ["line 1", "line 4"]


def test_a_limit_leaves_the_rest_unread(file: Path) -> None:
    write(file, GOOD, GOOD, "damaged")
    assert len(read_questions(file, limit=2)) == 2
    with pytest.raises(TwellError, match="line 3"):
        read_questions(file, limit=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": None}, "context None given, a text of at least one character wanted"),
        ({"context": ""}, "context '' given"),
        ({"question": "too"}, "both context and question given, one of them wanted"),
        ({"choices": "4"}, "choices '4' given, a list of 2 to 26 texts wanted"),
        ({"choices": ["4"]}, r"choices \['4'\] given, a list of 2 to 26"),
        ({"choices": []}, r"choices \[\] given"),
        ({"choices": ["4", ""]}, "choice 1 is '', a text that is not blank wanted"),
        ({"choices": [4, "5"]}, "choice 0 is 4, a text"),
        ({"answer": 3}, "answer 3 given, an index from 0 to 2 or a letter from A to C wanted"),
        ({"answer": -1}, "answer -1 given"),
        ({"answer": True}, "answer True given"),
        ({"answer": "D"}, "answer 'D' given"),
        ({"answer": "1"}, "answer '1' given"),
        ({"answer": "AB"}, "answer 'AB' given"),
        ({"answer": ""}, "answer '' given"),
        ({"answer": 1.0}, "answer 1.0 given"),
        ({"id": [1]}, r"id \[1\] given, a text or a whole number wanted"),
    ],
)
def test_damaged_fields(file: Path, changes: dict[str, object], message: str) -> None:
    write(file, GOOD, GOOD | changes)
    with pytest.raises(TwellError, match=f"questions.jsonl line 2: {message}"):
        read_questions(file)


@pytest.mark.parametrize("missing", ["context", "choices", "answer"])
def test_missing_fields(file: Path, missing: str) -> None:
    write(file, {name: value for name, value in GOOD.items() if name != missing})
    with pytest.raises(TwellError, match=f"line 1: (no|neither) {missing}.* given, .* wanted"):
        read_questions(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[1]", "an object with context, choices and answer wanted"),
    ],
)
def test_damaged_lines(file: Path, line: str, message: str) -> None:
    with pytest.raises(TwellError, match=f"line 1: .*{message}"):
        read_questions(write(file, line))


def test_text_of_another_encoding(file: Path) -> None:
    file.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\n")
    with pytest.raises(TwellError, match="line 2: it is not UTF-8"):
        read_questions(file)


def test_files_that_hold_no_question(tmp_path: Path, file: Path) -> None:
    with pytest.raises(TwellError, match="holds no question"):
        read_questions(write(file, "", " "))
    with pytest.raises(TwellError, match="cannot read .*: Is a directory; give a file"):
        read_questions(tmp_path)
    with pytest.raises(TwellError, match="cannot read .*missing.jsonl"):
        read_questions(tmp_path / "missing.jsonl")


def test_a_text_that_stands_there_twice_is_right_twice(file: Path) -> None:
    (question,) = read_questions(write(file, GOOD | {"choices": ["4", "5", "4"]}))
    assert [question.is_right(choice) for choice in range(3)] == [True, False, True]


def test_the_questions_that_are_shipped() -> None:
    questions = read_questions(EXAMPLES)
    assert len(questions) >= 40
    assert len({question.context for question in questions}) == len(questions)
    # No letter is right so often that always taking it would be a good guess.
    answers = [question.answer for question in questions]
    assert max(map(answers.count, answers)) <= len(questions) // 3
    assert os.path.getsize(EXAMPLES) < 20_000
