"""Prepared data: a corpus tokenized once into a file that is memory-mapped, not read.

Layout, all numbers little-endian:

==========================  ===========================================================
8 bytes                     ``TWELLBIN``
8 bytes                     length of the header, unsigned
header                      JSON: ``version``, ``name``, ``files``, ``bytes``,
                            ``vocab_size``, ``dtype``, ``training_tokens``,
                            ``validation_tokens``, ``tokenizer`` (the text of its
                            ``tokenizer.json``)
padding                     zeros up to a multiple of 64 bytes
tokens                      training tokens, then held-out tokens, in ``dtype``
==========================  ===========================================================

The dtype is the narrowest unsigned one that holds the vocabulary, so no id is ever cut off.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError
from twell_numba.models.checkpoint import resolve_checkpoint
from twell_numba.models.reading import exists, is_file, unreadable
from twell_numba.models.tokenizer import TextTokenizer, load_tokenizer
from twell_numba.train.config import require_bpe_vocab_size
from twell_numba.train.corpus import TokenCorpus, load_text, source_path, token_dtype, tokenize
from twell_numba.train.tokenizer import make_tokenizer

SUFFIX = ".bin"
_MAGIC = b"TWELLBIN"
_VERSION = 1
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 30
_COUNTS = (
    "files",
    "bytes",
    "vocab_size",
    "training_tokens",
    "validation_tokens",
)


def prepare(
    source: str,
    destination: str | os.PathLike[str],
    *,
    tokenizer: str = "byte",
    bpe_vocab_size: int = 4096,
    model: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Tokenize a source of text into a prepared file.

    Parameters
    ----------
    source : str
        ``"stdlib"``, a text file or a folder.
    destination : path
        Ends in ``.bin``; must not exist.
    tokenizer : {"byte", "bpe"}
        ``"bpe"`` is trained on the source's training part.
    model : path, optional
        A model whose own tokenizer is taken instead, to train it further.

    Returns
    -------
    dict
        As :func:`describe`.

    Raises
    ------
    TwellError
        If the source cannot be used, or the destination exists or cannot be written.
    UsageError
        If ``bpe_vocab_size`` is out of range.
    """
    path = Path(destination)
    if path.suffix != SUFFIX:
        raise TwellError(f"{path} given, a name that ends in {SUFFIX} wanted")
    if path.exists():
        raise TwellError(f"{path} exists already; delete it or name another file")
    if tokenizer == "bpe":
        require_bpe_vocab_size(bpe_vocab_size)
    chosen = None if model is None else load_tokenizer(resolve_checkpoint(model))
    text = load_text(source)
    corpus = tokenize(text, chosen or make_tokenizer(tokenizer, text, bpe_vocab_size))
    write_prepared(path, corpus)
    return describe(path)


def write_prepared(path: str | os.PathLike[str], corpus: TokenCorpus) -> None:
    """Write a tokenized corpus, atomically.

    Raises
    ------
    ValueError
        If a token id is not below the vocabulary's size.
    TwellError
        If the file system refuses.
    """
    vocab_size = corpus.tokenizer.vocab_size
    dtype = token_dtype(vocab_size)
    for tokens in (corpus.training, corpus.validation):
        if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
            raise ValueError(
                f"token ids from {tokens.min()} to {tokens.max()} given, "
                f"ids from 0 to {vocab_size - 1} wanted"
            )
    header = json.dumps(
        {
            "version": _VERSION,
            "name": corpus.name,
            "files": corpus.files,
            "bytes": corpus.byte_count,
            "vocab_size": vocab_size,
            "dtype": dtype.name,
            "training_tokens": len(corpus.training),
            "validation_tokens": len(corpus.validation),
            "tokenizer": _tokenizer_json(corpus.tokenizer),
        }
    ).encode()
    with write_file_atomically(path) as temporary, temporary.open("wb") as file:
        file.write(_MAGIC)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(bytes(_tokens_offset(len(header)) - file.tell()))
        for tokens in (corpus.training, corpus.validation):
            file.write(np.ascontiguousarray(tokens, dtype).data)


def open_prepared(path: str | os.PathLike[str]) -> TokenCorpus:
    """Map a prepared file's tokens into memory, read-only.

    Held-out tokens, a twentieth of the file, are read once to check them; training tokens are left
    to who draws them.

    Raises
    ------
    TwellError
        If the file is missing, truncated, damaged, or not a prepared file.
    """
    file = source_path(path)
    header, offset = _read_header(file)
    dtype = np.dtype(header["dtype"]).newbyteorder("<")
    count = header["training_tokens"] + header["validation_tokens"]
    expected = offset + count * dtype.itemsize
    size = file.stat().st_size
    if size != expected:
        raise TwellError(
            f"{file} is {size} bytes long, {expected} wanted: it was cut off or added to; "
            f"make it again with 'twell data prepare'"
        )
    tokens = np.memmap(file, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)
    validation = tokens[header["training_tokens"] :]
    _require_known_tokens(file, validation, header["vocab_size"])
    return TokenCorpus(
        name=header["name"],
        files=header["files"],
        byte_count=header["bytes"],
        tokenizer=_tokenizer_from_json(file, header["tokenizer"], header["vocab_size"]),
        training=tokens[: header["training_tokens"]],
        validation=validation,
    )


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a prepared file holds: its header, without the tokenizer's text.

    Raises
    ------
    TwellError
        As :func:`open_prepared`.
    """
    open_prepared(path)
    header, _ = _read_header(source_path(path))
    del header["tokenizer"]
    return {"path": str(path)} | header


def _tokens_offset(header_length: int) -> int:
    end = len(_MAGIC) + 8 + header_length
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the checked header and where the tokens begin."""
    foreign = f"{path} is not a file made by 'twell data prepare'"
    if exists(path) and not is_file(path):
        # Opening a pipe would wait for somebody to write into it.
        raise TwellError(
            f"cannot read {path}: it is not a regular file, and a name that ends in {SUFFIX} "
            f"stands for one made by 'twell data prepare'; make one, or use another name"
        )
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise TwellError(f"{foreign}; give one, or a text file with another ending")
            length = int.from_bytes(file.read(8), "little")
            # A damaged length must not make us ask for memory that is not there.
            written = file.read(length) if length <= _LARGEST_HEADER else b""
    except FileNotFoundError:
        raise TwellError(f"no prepared data at {path}; make it with 'twell data prepare'") from None
    except OSError as error:
        raise unreadable(path, error) from error
    header = _parsed(written) if len(written) == length else {}
    if not _is_header(header):
        raise TwellError(
            f"{path} has a damaged header or was cut off; make it again with 'twell data prepare'"
        )
    if header["version"] != _VERSION:
        raise TwellError(
            f"{path} has version {header['version']}, version {_VERSION} wanted; "
            f"make it again with 'twell data prepare'"
        )
    return header, _tokens_offset(length)


def _parsed(written: bytes) -> dict[str, Any]:
    try:
        content = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_header(header: dict[str, Any]) -> bool:
    return (
        isinstance(header.get("version"), int)
        and isinstance(header.get("name"), str)
        and isinstance(header.get("tokenizer"), str)
        and all(isinstance(header.get(key), int) and header[key] >= 0 for key in _COUNTS)
        and 1 <= header["vocab_size"] <= 2**32
        and header.get("dtype") == token_dtype(header["vocab_size"]).name
    )


def _require_known_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    if vocab_size > np.iinfo(tokens.dtype).max or not len(tokens):
        return  # whatever the file holds is an id
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise TwellError(
            f"{path} holds token {largest} in its held-out part, ids below the vocabulary's "
            f"{vocab_size} wanted: it is damaged, make it again with 'twell data prepare'"
        )


def require_same_tokenizer(data: str, corpus: TokenCorpus, tokenizer: TextTokenizer) -> None:
    """Refuse prepared data of which a model's tokenizer would have made other tokens.

    Raises
    ------
    TwellError
    """
    if not same_tokenizer(corpus.tokenizer, tokenizer):
        raise TwellError(
            f"{data} was prepared with another tokenizer than the model's; "
            f"give the text that it was made from"
        )


def same_tokenizer(first: TextTokenizer, second: TextTokenizer) -> bool:
    """Say whether two tokenizers give the same ids, as their ``tokenizer.json`` is the same."""
    return _tokenizer_json(first) == _tokenizer_json(second)


def _tokenizer_json(tokenizer: TextTokenizer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return Path(folder, "tokenizer.json").read_text(encoding="utf-8")


def _tokenizer_from_json(path: Path, text: str, vocab_size: int) -> TextTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(text, encoding="utf-8", errors="replace")
        try:
            tokenizer = load_tokenizer(Path(folder))
        except TwellError as error:
            raise TwellError(f"{path} holds a damaged tokenizer: {error}") from error
    if tokenizer.vocab_size != vocab_size:
        raise TwellError(
            f"{path} has a damaged header: a vocabulary of {vocab_size} recorded, a tokenizer of "
            f"{tokenizer.vocab_size} found; make it again with 'twell data prepare'"
        )
    return tokenizer
