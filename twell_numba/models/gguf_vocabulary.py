"""The metadata of a tokenizer in a GGUF file; :mod:`.gguf_tokenizer` reads it.

The ``tokenizer.json`` itself is kept, from which this package reads the same tokenizer again, and
beside it what other tools go by.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from twell_numba.models.bpe_tokenizer import FILE_NAME
from twell_numba.models.gguf_tokenizer import (
    BYTE,
    CHAT_TEMPLATE,
    CONTROL,
    EOS_TOKENS,
    HUGGINGFACE_JSON,
    KEYS_OF_IDS,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from twell_numba.models.pre_tokenizers import name_of_split
from twell_numba.models.token_bytes import is_byte_level, token_bytes
from twell_numba.models.tokenizer import TextTokenizer


def vocabulary_metadata(tokenizer: TextTokenizer, vocab_size: int) -> dict[str, Any]:
    """Return what a file says about a tokenizer.

    Parameters
    ----------
    tokenizer : TextTokenizer
    vocab_size : int
        Of the model, which may have more rows than there are tokens: the list is filled up.

    Returns
    -------
    dict
        Texts, whole numbers, truth values, and lists of them or of numbers, by their key.
    """
    text = _json_of(tokenizer)
    library_tokenizer = Tokenizer.from_str(text)
    content = json.loads(text)
    vocabulary = {**content["model"]["vocab"]}
    vocabulary |= {each["content"]: each["id"] for each in content["added_tokens"]}
    texts, types = _tokens(content, vocabulary, vocab_size)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    metadata: dict[str, Any] = {"tokens": texts, "token_type": types}
    if is_byte_level(library_tokenizer):
        metadata |= {"model": "gpt2", "pre": name_of_split(content)}
        metadata |= {"merges": merges} if merges else {}  # the format has no empty lists
    else:
        metadata["model"] = "llama"
        metadata["scores"] = _scores(texts, types, merges)
        metadata["add_space_prefix"] = token_bytes(library_tokenizer).blanks_put_in_front > 0
    metadata |= _ids(tokenizer, vocabulary)
    metadata["add_bos_token"] = bool(tokenizer.encode("", add_special_tokens=True).size)
    result = {PREFIX + key: value for key, value in metadata.items()}
    result[HUGGINGFACE_JSON] = text
    if tokenizer.eos_tokens:
        result[EOS_TOKENS] = list(tokenizer.eos_tokens)
    if tokenizer.chat_template is not None:
        result[CHAT_TEMPLATE] = tokenizer.chat_template
    return result


def _json_of(tokenizer: TextTokenizer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return Path(folder, FILE_NAME).read_text(encoding="utf-8")


def _tokens(
    content: Mapping[str, Any], vocabulary: Mapping[str, int], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Return each token's text and type; ids without one get a text that is not used."""
    texts = [f"[PAD{token}]" for token in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, token in vocabulary.items():
        texts[token] = text
        is_byte = content["model"].get("byte_fallback") and _is_byte(text)
        types[token] = BYTE if is_byte else NORMAL
    for each in content["added_tokens"]:
        types[each["id"]] = CONTROL if each["special"] else USER_DEFINED
    unknown = content["model"].get("unk_token")
    if unknown in vocabulary:
        types[vocabulary[unknown]] = UNKNOWN
    return texts, types


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _scores(texts: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> list[float]:
    """Return a score for each token, the higher the earlier merges make it."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    never = len(merges)
    return [
        -float(rank.get(text, never)) if kind in (NORMAL, USER_DEFINED) else 0.0
        for text, kind in zip(texts, types, strict=True)
    ]


def _ids(tokenizer: TextTokenizer, vocabulary: Mapping[str, int]) -> dict[str, int]:
    ids: dict[str, int | None] = {"bos": tokenizer.bos_token}
    ids |= dict(zip(("eos", "eot", "eom"), tokenizer.eos_tokens, strict=False))
    for name, text in tokenizer.named_tokens.items():
        if name in KEYS_OF_IDS:
            ids.setdefault(KEYS_OF_IDS[name], vocabulary.get(text))
    return {f"{key}_token_id": token for key, token in ids.items() if token is not None}
