"""Prepared data files."""

import numpy as np
import pytest

from twell_numba.errors import TwellError
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.train.corpus import TokenCorpus, load_text, tokenize
from twell_numba.train.prepared import describe, open_prepared, prepare, write_prepared
from twell_numba.train.tokenizer import make_tokenizer


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. 🎈\n" * 100)
    return file


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_prepared_file_holds_the_corpus(tmp_path, text_file, tokenizer):
    path = tmp_path / "data.bin"
    description = prepare(str(text_file), path, tokenizer=tokenizer, bpe_vocab_size=280)
    text = load_text(str(text_file))
    expected = tokenize(text, make_tokenizer(tokenizer, text, 280))
    read = open_prepared(path)
    np.testing.assert_array_equal(read.training, expected.training)
    np.testing.assert_array_equal(read.validation, expected.validation)
    assert read.training.dtype == expected.training.dtype
    assert (read.name, read.files, read.byte_count) == (str(text_file), 1, text.byte_count)
    sentence = "the lazy 🎈"
    np.testing.assert_array_equal(
        read.tokenizer.encode(sentence), expected.tokenizer.encode(sentence)
    )
    assert type(read.tokenizer) is type(expected.tokenizer)
    assert description["training_tokens"] == len(expected.training)
    assert description == describe(path)


def test_tokens_are_mapped_not_read_and_cannot_be_written(tmp_path, text_file):
    prepare(str(text_file), tmp_path / "data.bin")
    tokens = open_prepared(tmp_path / "data.bin").training
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable


class TokenizerOfSize(ByteTokenizer):
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_large_ids_survive(tmp_path, vocab_size, dtype):
    """Faults 9 and 10."""
    ids = np.array([0, 1, vocab_size - 1], np.int64)
    corpus = TokenCorpus("name", 1, 3, TokenizerOfSize(vocab_size), ids, ids[::-1])
    write_prepared(tmp_path / "data.bin", corpus)
    read = open_prepared(tmp_path / "data.bin")
    np.testing.assert_array_equal(read.training, ids)
    np.testing.assert_array_equal(read.validation, ids[::-1])
    assert describe(tmp_path / "data.bin")["dtype"] == dtype


@pytest.mark.parametrize("wrong", [-1, 256, 65_536])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, wrong):
    ids = np.array([1, wrong], np.int64)
    corpus = TokenCorpus("name", 1, 2, ByteTokenizer(), ids, ids[:1])
    with pytest.raises(ValueError, match="ids from 0 to 255 wanted"):
        write_prepared(tmp_path / "data.bin", corpus)
    assert not (tmp_path / "data.bin").exists()


def test_truncated_files_are_refused_wherever_they_end(tmp_path, text_file):
    """Fault 68: a loader notices that a file was cut off."""
    path = tmp_path / "data.bin"
    prepare(str(text_file), path)
    whole = path.read_bytes()
    for length in (0, 5, 8, 12, 16, 100, len(whole) - 4000, len(whole) - 1, len(whole) + 1):
        path.write_bytes((whole + b"x")[:length])
        with pytest.raises(TwellError) as caught:
            open_prepared(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"just some text" * 10,
        b"TWELLBIN" + b"\xff" * 100,
        b"TWELLBIN" + (2).to_bytes(8, "little") + b"{}" + bytes(100),
        b"TWELLBIN" + (4).to_bytes(8, "little") + b"nope" + bytes(100),
        b"TWELLBIN" + (13).to_bytes(8, "little") + b'{"version":1}' + bytes(100),
    ],
)
def test_foreign_and_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    with pytest.raises(TwellError, match="twell data prepare"):
        open_prepared(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(TwellError, match="no prepared data at"):
        open_prepared(tmp_path / "none.bin")
    (tmp_path / "folder.bin").mkdir()
    with pytest.raises(TwellError, match="cannot read"):
        open_prepared(tmp_path / "folder.bin")


def test_nothing_that_exists_is_overwritten(tmp_path, text_file):
    path = tmp_path / "data.bin"
    path.write_text("precious")
    with pytest.raises(TwellError, match="exists already"):
        prepare(str(text_file), path)
    assert path.read_text() == "precious"
    with pytest.raises(TwellError, match=r"ends in \.bin wanted"):
        prepare(str(text_file), tmp_path / "data.txt")
