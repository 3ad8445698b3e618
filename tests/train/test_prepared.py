"""Prepared data files."""

import os
import sys
from itertools import islice, product

import numpy as np
import pytest
import tokenizers

from twell_numba.errors import TwellError, UsageError
from twell_numba.models.tokenizer import BPETokenizer, ByteTokenizer, byte_alphabet
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


def tokenizer_of_size(vocab_size):
    """Return a tokenizer of the single bytes, and of pairs and triples of them up to that many."""
    alphabet = byte_alphabet()
    texts = ("".join(part) for length in (1, 2, 3) for part in product(alphabet, repeat=length))
    vocabulary = {text: token for token, text in enumerate(islice(texts, vocab_size))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return BPETokenizer(tokenizer)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_large_ids_survive(tmp_path, vocab_size, dtype):
    """Faults 9 and 10."""
    ids = np.array([0, 1, vocab_size - 1], np.int64)
    corpus = TokenCorpus("name", 1, 3, tokenizer_of_size(vocab_size), ids, ids[::-1])
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
        b"TWELLBIN" + (100_000).to_bytes(8, "little") + b"[" * 100_000 + bytes(100),
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
    with pytest.raises(TwellError, match="not a regular file.*'twell data prepare'"):
        open_prepared(tmp_path / "folder.bin")


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
@pytest.mark.timeout(20)
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.bin")
    for function in (open_prepared, describe):
        with pytest.raises(TwellError, match="not a regular file"):
            function(tmp_path / "pipe.bin")


def test_damaged_tokens_of_the_held_out_part_are_named(tmp_path, text_file):
    path = tmp_path / "data.bin"
    prepare(str(text_file), path, tokenizer="bpe", bpe_vocab_size=280)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b"\x18\x01")  # 280
    for function in (open_prepared, describe):
        with pytest.raises(TwellError, match="token 280 in its held-out part.*vocabulary's 280"):
            function(path)
    path.write_bytes(whole[:-2] + b"\x17\x01")
    assert open_prepared(path).validation[-1] == 279


def test_a_header_that_its_tokenizer_does_not_fit_is_refused(tmp_path, text_file):
    path = tmp_path / "data.bin"
    prepare(str(text_file), path, tokenizer="bpe", bpe_vocab_size=280)
    path.write_bytes(path.read_bytes().replace(b'"vocab_size": 280', b'"vocab_size": 999'))
    with pytest.raises(TwellError, match="damaged header: a vocabulary of 999 recorded"):
        open_prepared(path)


def test_a_vocabulary_far_too_large_is_refused(tmp_path, text_file):
    with pytest.raises(UsageError, match="at most 1048576 wanted"):
        prepare(str(text_file), tmp_path / "x.bin", tokenizer="bpe", bpe_vocab_size=10**12)
    assert not (tmp_path / "x.bin").exists()


def test_nothing_that_exists_is_overwritten(tmp_path, text_file):
    path = tmp_path / "data.bin"
    path.write_text("precious")
    with pytest.raises(TwellError, match="exists already"):
        prepare(str(text_file), path)
    assert path.read_text() == "precious"
    with pytest.raises(TwellError, match=r"ends in \.bin wanted"):
        prepare(str(text_file), tmp_path / "data.txt")
