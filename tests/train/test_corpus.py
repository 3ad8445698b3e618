"""Sources of text, and how they are split."""

import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from twell_numba.errors import TwellError, UsageError
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.train import corpus as corpus_module
from twell_numba.train.corpus import absolute_source, load_text, token_dtype, tokenize
from twell_numba.train.tokenizer import make_tokenizer, train_bpe


def test_stdlib_is_the_running_pythons_own_source_without_tests():
    begin = time.perf_counter()
    text = load_text("stdlib")
    seconds = time.perf_counter() - begin
    assert seconds < 5, "a cold disk included"
    assert text.files == len(text.training) + len(text.validation)
    assert text.byte_count > 3_000_000
    documents = {*text.training, *text.validation}
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "argparse.py").read_bytes() in documents
    for test in library.glob("test/test_arg*.py"):
        assert test.read_bytes() not in documents
    share = sum(map(len, text.validation)) / text.byte_count
    assert 0.01 < share < 0.25


def test_stdlib_comes_in_one_order():
    assert load_text("stdlib") == load_text("stdlib")


def test_a_python_without_its_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(TwellError, match="library source is not on the disk"):
        load_text("stdlib")


def test_a_single_file_is_split_by_position(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"a" * 950 + b"b" * 50)
    text = load_text(str(file))
    assert text.training == [b"a" * 950]
    assert text.validation == [b"b" * 50]
    assert (text.files, text.byte_count) == (1, 1000)


@pytest.mark.parametrize("length", range(92, 101))
def test_a_split_never_falls_inside_a_character(tmp_path, length):
    file = tmp_path / "text.txt"
    content = ("x" * (length % 4) + "🎈" * length).encode()
    file.write_bytes(content)
    text = load_text(str(file))
    assert b"".join([*text.training, *text.validation]) == content
    for part in (*text.training, *text.validation):
        part.decode("utf-8")


def test_a_folder_of_many_files_is_split_by_file(tmp_path):
    contents = {f"part{n % 7}/file{n}.txt": f"document {n}\n".encode() * 20 for n in range(200)}
    for name, content in contents.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    text = load_text(str(tmp_path))
    assert text.files == 200
    assert {*text.training, *text.validation} == set(contents.values())
    assert 2 <= len(text.validation) <= 25

    (tmp_path / "one-more.txt").write_text("another document\n" * 20)
    held_out = set(load_text(str(tmp_path)).validation)
    assert set(text.validation) <= held_out


def test_a_folder_of_few_files_is_split_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 600)
    (tmp_path / "b.txt").write_text("b" * 398)
    text = load_text(str(tmp_path))
    assert text.training == [b"a" * 600 + b"\n" + b"b" * 349]
    assert text.validation == [b"b" * 49 + b"\n"]


def test_what_is_not_text_is_skipped_in_a_folder(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 100)
    (tmp_path / "binary").write_bytes(b"\x00\x01" * 50)
    (tmp_path / "latin1.txt").write_bytes("Ærø".encode("latin-1") * 50)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    text = load_text(str(tmp_path))
    assert (text.files, text.skipped) == (1, 2)
    assert b"secret" not in b"".join([*text.training, *text.validation])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("binary.txt", b"\x00" * 10, "is not UTF-8 text"),
        ("latin1.txt", "Ærø".encode("latin-1"), "is not UTF-8 text"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TwellError, match=message):
        load_text(str(tmp_path / name))


def test_missing_data_and_folders_without_text_are_refused(tmp_path):
    with pytest.raises(TwellError, match="no data at .*nowhere"):
        load_text(str(tmp_path / "nowhere"))
    with pytest.raises(TwellError, match="holds no text"):
        load_text(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\x00")
    with pytest.raises(TwellError, match="holds 1 file, which is not UTF-8 text"):
        load_text(str(tmp_path))
    (tmp_path / "another").write_bytes(b"\x00")
    with pytest.raises(TwellError, match="holds 2 files, none of them UTF-8 text"):
        load_text(str(tmp_path))
    with pytest.raises(TwellError, match="neither a file nor a folder"):
        load_text("/dev/null")


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("words")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TwellError, match=r"cannot read .*text.txt: Permission denied"):
        load_text(str(tmp_path))


def test_folders_that_cannot_be_listed_are_named(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("words " * 100)
    (tmp_path / "closed").mkdir()
    listed = os.scandir

    def refuse(path):
        if str(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for folder in (tmp_path, tmp_path / "closed"):
        refused = str(folder)
        with pytest.raises(TwellError, match=f"cannot read {folder}: Permission denied; get perm"):
            load_text(str(tmp_path))
    refused = ""
    assert load_text(str(tmp_path)).files == 1


def test_a_file_that_the_system_does_not_show_is_named(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("words " * 100)
    stat = os.stat

    def refuse(path, *arguments, **more):
        if str(path).endswith("text.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", refuse)
    for source in (tmp_path, tmp_path / "text.txt"):
        with pytest.raises(TwellError, match=r"cannot read .*text.txt: Permission denied"):
            load_text(str(source))


@pytest.mark.parametrize("source", ["~nosuchuser/text.txt", "~nosuchuser"])
def test_the_home_folder_of_nobody_is_refused(source):
    for function in (load_text, absolute_source):
        with pytest.raises(TwellError, match="nobody's home folder is ~nosuchuser; write"):
            function(source)


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME" if os.name == "posix" else "USERPROFILE", str(tmp_path))
    (tmp_path / "text.txt").write_text("words " * 100)
    assert load_text("~/text.txt").byte_count == 600
    assert absolute_source("~/text.txt") == str(tmp_path / "text.txt")


def test_byte_tokens_are_the_bytes():
    text = corpus_module.TextCorpus("name", 2, [b"ab\n", b"\xff\n"], [b"c\n"])
    tokens = tokenize(text, ByteTokenizer())
    assert tokens.training.dtype == np.uint8
    assert tokens.training.tobytes() == b"ab\n\xff\n"
    assert tokens.validation.tobytes() == b"c\n"
    assert (tokens.files, tokens.byte_count) == (2, 7)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, np.uint8),
        (256, np.uint8),
        (257, np.uint16),
        (65_535, np.uint16),
        (65_536, np.uint16),
        (65_537, np.uint32),
        (2**32, np.uint32),
    ],
)
def test_ids_are_as_wide_as_the_largest_needs(vocab_size, dtype):
    """Faults 9 and 10: 65536 ids fit 16 bits, 65537 do not."""
    assert token_dtype(vocab_size) == dtype
    assert vocab_size - 1 <= np.iinfo(token_dtype(vocab_size)).max


def test_ids_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match="at most 4294967296 wanted"):
        token_dtype(2**32 + 1)


TEXTS = ["def function(argument):\n    return argument\n" * 20, "Ærøskøbing 🎈\n" * 20]


def test_bpe_training_is_deterministic_and_round_trips():
    first, second = train_bpe(TEXTS, 280), train_bpe(TEXTS, 280)
    ids = first.encode(TEXTS[0])
    np.testing.assert_array_equal(ids, second.encode(TEXTS[0]))
    assert first.vocab_size == 280
    assert len(ids) < len(TEXTS[0]) / 2
    unseen = "日本語 \x00 “quotes”\r\n"
    assert first.decode_bytes(first.encode(unseen)).decode() == unseen


def test_a_vocabulary_that_would_end_the_process_is_refused():
    with pytest.raises(UsageError, match="at most 1048576 wanted"):
        train_bpe(TEXTS, 10**15)


def test_bpe_is_trained_on_the_training_part_alone():
    text = corpus_module.TextCorpus("name", 2, [b"abcabcabc\n" * 50], [b"zyzyzyzy\n" * 50])
    tokenizer = make_tokenizer("bpe", text, 270)
    tokens = tokenize(text, tokenizer)
    assert tokens.training.dtype == np.uint16
    assert len(tokens.training) < 500 / 2
    assert len(tokens.validation) == 450
