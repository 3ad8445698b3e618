"""Text to train on, split into a training part and a held-out part.

A source is ``stdlib`` (the running Python's own library source: real text, on every machine, no
download), a text file, a folder of text files, or a ``.bin`` made by ``twell data prepare``.

In a folder, every 20th file is held out, chosen by a hash of its path, so that adding a file moves
no other from one part to the other. Where files are too few or too uneven for that, and in a
single file, the last twentieth of the text is held out.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twell_numba.errors import TwellError
from twell_numba.models.reading import exists, is_file, is_folder, unreadable
from twell_numba.models.tokenizer import ByteTokenizer, TextTokenizer

STDLIB = "stdlib"
HELD_OUT_EVERY = 20

# Folders of the standard library that are not library source: what users install, and tests, whose
# text is repetitive or deliberately malformed.
_NOT_LIBRARY_SOURCE = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_NOT_TEXT_FOLDERS = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True)
class TextCorpus:
    """Documents as bytes; each but an empty one ends with a line break.

    Attributes
    ----------
    name : str
        The source, for reports.
    files : int
        How many files the text came from.
    skipped : int
        How many files of the folder were not text.
    training, validation : sequence of bytes
        The documents to train on, and those held out.
    """

    name: str
    files: int
    training: Sequence[bytes]
    validation: Sequence[bytes]
    skipped: int = 0

    @property
    def byte_count(self) -> int:
        """Total size of both parts."""
        return sum(map(len, self.training)) + sum(map(len, self.validation))


@dataclass(frozen=True)
class TokenCorpus:
    """A corpus as token ids, ready for training.

    Attributes
    ----------
    name : str
        The source, for reports.
    files, byte_count : int
        How many files and bytes the tokens came from.
    tokenizer : ByteTokenizer or BPETokenizer
        Turns text into these ids and back.
    training, validation : ndarray of unsigned integers, shape (N,)
        May be memory-mapped and read-only.
    """

    name: str
    files: int
    byte_count: int
    tokenizer: TextTokenizer
    training: np.ndarray
    validation: np.ndarray


def absolute_source(source: str) -> str:
    """Return a source that means the same from every working directory."""
    return source if source == STDLIB else str(source_path(source).absolute())


def source_path(source: str | os.PathLike[str]) -> Path:
    """Return a source's path, with the home folder for a ``~`` or ``~user`` that it begins with.

    Raises
    ------
    TwellError
        If there is no such user.
    """
    try:
        return Path(source).expanduser()
    except RuntimeError:
        raise TwellError(
            f"{os.fspath(source)} given, but nobody's home folder is {Path(source).parts[0]}; "
            f"write the path without ~"
        ) from None


def load_text(source: str) -> TextCorpus:
    """Read a source of text: ``"stdlib"``, a file or a folder.

    Raises
    ------
    TwellError
        If the source is missing, empty, unreadable, or holds no text.
    """
    if source == STDLIB:
        return _load_stdlib(Path(sysconfig.get_path("stdlib")))
    path = source_path(source)
    if is_folder(path):
        return _load_folder(path)
    if is_file(path):
        return _load_file(path)
    if exists(path):
        raise TwellError(f"data {source} is neither a file nor a folder; give one of them")
    raise TwellError(f"no data at {source}; give stdlib, or a file or folder that exists")


def tokenize(corpus: TextCorpus, tokenizer: TextTokenizer) -> TokenCorpus:
    """Turn a corpus into token ids, in the narrowest unsigned dtype that holds the vocabulary."""
    return TokenCorpus(
        name=corpus.name,
        files=corpus.files,
        byte_count=corpus.byte_count,
        tokenizer=tokenizer,
        training=encode_documents(corpus.training, tokenizer),
        validation=encode_documents(corpus.validation, tokenizer),
    )


def encode_documents(documents: Sequence[bytes], tokenizer: TextTokenizer) -> np.ndarray:
    """Return the token ids of documents, one after another."""
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(b"".join(documents), np.uint8)
    dtype = token_dtype(tokenizer.vocab_size)
    encoded = [tokenizer.encode(decode_document(document)) for document in documents]
    return np.concatenate(
        [np.asarray(ids).astype(dtype) for ids in encoded] or [np.empty(0, dtype)]
    )


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest unsigned dtype, little-endian, that holds ids below ``vocab_size``.

    The largest id is ``vocab_size - 1``: a vocabulary of 65536 fits 16 bits, one of 65537 does not.

    Raises
    ------
    ValueError
        If ids would not fit 32 bits.
    """
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype).newbyteorder("<")
    raise ValueError(f"vocabulary of {vocab_size} given, at most {2**32} wanted")


def decode_document(document: bytes) -> str:
    """Return a document as text; bytes that are not UTF-8 become replacement characters."""
    return document.decode("utf-8", errors="replace")


def _load_stdlib(root: Path) -> TextCorpus:
    # Files named in one order on every machine, whatever order the file system lists them in.
    paths = _walk(root, skip_folders=_NOT_LIBRARY_SOURCE) if is_folder(root) else iter(())
    files = [path for path in paths if path.suffix == ".py"]
    documents = {path: _as_document(_read(root / path)) for path in files}
    documents = {path: document for path, document in documents.items() if document}
    if not documents:
        raise TwellError(
            f"this Python's library source is not on the disk (looked in {root}); "
            f"give a file or folder of text with --data"
        )
    name = f"{STDLIB} (Python {platform.python_version()})"
    training, validation = _hold_out(documents)
    return TextCorpus(name, len(documents), training, validation)


def _load_folder(root: Path) -> TextCorpus:
    documents = {}
    skipped = 0
    for path in _walk(root, skip_folders=_NOT_TEXT_FOLDERS):
        content = _read(root / path)
        if not _is_text(content):
            skipped += 1
        elif content:
            documents[path] = _as_document(content)
    if not documents:
        found = "no text"
        if skipped:
            found = "1 file, which is not" if skipped == 1 else f"{skipped} files, none of them"
            found += " UTF-8 text"
        raise TwellError(f"folder {root} holds {found}; give a folder with text files in it")
    training, validation = _hold_out(documents)
    return TextCorpus(str(root), len(documents), training, validation, skipped)


def _load_file(path: Path) -> TextCorpus:
    content = _read(path)
    if not content:
        raise TwellError(f"data file {path} is empty; give a file with text in it")
    if not _is_text(content):
        raise TwellError(f"data file {path} is not UTF-8 text; give a text file")
    training, validation = _split_by_position(content)
    return TextCorpus(str(path), 1, [training], [validation])


def _walk(root: Path, skip_folders: frozenset[str]) -> Iterator[Path]:
    """Yield paths relative to ``root`` of all files that are not hidden, sorted.

    A folder that cannot be listed is an error: its text would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename or root, error) from error

    found = []
    for parent, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [
            name for name in folders if name not in skip_folders and not name.startswith(".")
        ]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    relative = [path.relative_to(root) for path in found if is_file(path)]
    return iter(sorted(relative, key=Path.as_posix))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _as_document(content: bytes) -> bytes:
    """End the last line, so that joined documents do not run into each other."""
    return content if not content or content.endswith(b"\n") else content + b"\n"


def _hold_out(documents: dict[Path, bytes]) -> tuple[list[bytes], list[bytes]]:
    held_out = {path for path in documents if _path_hash(path) % HELD_OUT_EVERY == 0}
    training = [text for path, text in documents.items() if path not in held_out]
    validation = [text for path, text in documents.items() if path in held_out]
    share = sum(map(len, validation)) / sum(map(len, documents.values()))
    if 0.01 <= share <= 0.25:
        return training, validation
    first, last = _split_by_position(b"".join(documents.values()))
    return [first], [last]


def _path_hash(path: Path) -> int:
    return int.from_bytes(hashlib.sha256(os.fsencode(path.as_posix())).digest()[:8], "little")


def _split_by_position(content: bytes) -> tuple[bytes, bytes]:
    """Cut off the last twentieth, at the start of a character."""
    cut = len(content) - -(-len(content) // HELD_OUT_EVERY)
    while cut > 0 and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return content[:cut], content[cut:]
