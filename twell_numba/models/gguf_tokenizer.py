"""A tokenizer from the metadata of a GGUF file.

Files have one of two kinds of vocabulary. ``gpt2`` is a byte-level BPE: tokens, merges, and the
name of how texts are split into words. ``llama`` is sentencepiece's: tokens with scores, and the
pair whose token has the highest score is merged first. Files of this package, and some others, also
hold the ``tokenizer.json`` itself, which then is what counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from twell_numba.errors import TwellError, shown
from twell_numba.models.bpe_tokenizer import BPETokenizer
from twell_numba.models.gguf_file import GGUFFile
from twell_numba.models.pre_tokenizers import WORD_SPLITS
from twell_numba.models.token_bytes import METASPACE
from twell_numba.models.tokenizer import ByteTokenizer, tokenizer_from_json
from twell_numba.models.tokenizer_settings import TokenizerSettings

PREFIX = "tokenizer.ggml."
HUGGINGFACE_JSON = "tokenizer.huggingface.json"
CHAT_TEMPLATE = "tokenizer.chat_template"
# All tokens that end a text; the format has room for three.
EOS_TOKENS = "twell.eos_token_ids"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

KEYS_OF_IDS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "eot_token": "eot",
    "eom_token": "eom",
    "unk_token": "unknown",
    "pad_token": "padding",
}
# Longer tokens are not made by merges; sentencepiece makes none beyond 16 unless it is told to.
LONGEST_MERGED = 256
# What ends an answer where a file names another token, or none, as the end of a text.
_ENDS_OF_ANSWERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a file: texts and types by their id, and ids by their text."""

    texts: list[str]
    types: np.ndarray
    ids: dict[str, int]


def tokenizer_from_gguf(file: GGUFFile) -> ByteTokenizer | BPETokenizer:
    """Return the tokenizer that a file's metadata describes.

    Raises
    ------
    TwellError
        If it is of a kind that is not supported, or does not make sense: one line.
    """
    try:
        tokens = _tokens(file)
        if HUGGINGFACE_JSON in file.metadata:
            settings = _settings(file, tokens, adds_bos=None)
            return tokenizer_from_json(
                file.text(HUGGINGFACE_JSON), HUGGINGFACE_JSON, lambda _: settings
            )
        kind = file.text(PREFIX + "model")
        if kind == "gpt2":
            tokenizer, adds_bos = _byte_level(file, tokens)
        elif kind == "llama":
            tokenizer, adds_bos = _sentencepiece(file, tokens), True
        else:
            raise TwellError(
                f"a tokenizer of kind {shown(kind)} given, gpt2 or llama wanted: others are not "
                f"supported"
            )
        _add_special_tokens(tokenizer, tokens)
        settings = _settings(file, tokens, adds_bos)
        if settings.adds_bos and settings.bos_token is not None:
            _begin_texts_with(tokenizer, tokens.texts[settings.bos_token], settings.bos_token)
        return BPETokenizer(tokenizer, settings)
    except TwellError as error:
        if str(error).startswith(str(file.path)):
            raise
        raise TwellError(f"{file.path}: {error}") from error
    except Exception as error:  # the library raises nothing more special
        reason = " ".join(str(error).split())
        raise TwellError(
            f"{file.path} has a tokenizer that makes no sense: {reason}; fetch it again"
        ) from error


def _tokens(file: GGUFFile) -> _Tokens:
    texts = file.texts(PREFIX + "tokens")
    types = np.full(len(texts), NORMAL)
    if PREFIX + "token_type" in file.metadata:
        types = file.numbers(PREFIX + "token_type")
    if len(types) != len(texts):
        raise TwellError(f"{len(types)} token types given for {len(texts)} tokens")
    ids: dict[str, int] = {}
    for token, text in enumerate(texts):
        ids.setdefault(text, token)  # of a text that occurs twice, the first
    ids.pop("", None)
    if not ids:
        raise TwellError("a tokenizer without tokens given")
    return _Tokens(texts, types, ids)


def _byte_level(file: GGUFFile, tokens: _Tokens) -> tuple[Tokenizer, bool]:
    name = file.text(PREFIX + "pre", "default")
    if name not in WORD_SPLITS:
        raise TwellError(
            f"a tokenizer that splits texts by {shown(name)} given, one of "
            f"{', '.join(WORD_SPLITS)} wanted: others are not supported"
        )
    split = WORD_SPLITS[name]
    merges = []
    for merge in file.texts(PREFIX + "merges"):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        # the library refuses merges of what is no token
        if left in tokens.ids and right in tokens.ids and left + right in tokens.ids:
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(tokens.ids, merges, ignore_merges=split.ignores_merges))
    split.set_up(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _sentencepiece(file: GGUFFile, tokens: _Tokens) -> Tokenizer:
    scores = file.numbers(PREFIX + "scores").tolist()
    if len(scores) != len(tokens.texts):
        raise TwellError(f"{len(scores)} scores given for {len(tokens.texts)} tokens")
    mergeable = {
        text: scores[token]
        for text, token in tokens.ids.items()
        if tokens.types[token] in (NORMAL, USER_DEFINED)
    }
    unknown = np.flatnonzero(tokens.types == UNKNOWN)
    tokenizer = Tokenizer(
        models.BPE(
            tokens.ids,
            merges_of_scores(mergeable, tokens.ids),
            unk_token=tokens.texts[unknown[0]] if unknown.size else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace_blanks = normalizers.Replace(" ", METASPACE)
    steps = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag(PREFIX + "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(METASPACE), replace_blanks]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace_blanks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_of_scores(
    scores: Mapping[str, float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the merges of a BPE that merges as sentencepiece does: best token first.

    Parameters
    ----------
    scores : dict of str to float
        The tokens that merges may make.
    vocabulary : dict of str to int

    Returns
    -------
    list of (str, str)
        All ways to make each token of two; of equal scores the longer first part first, as in the
        converters of Hugging Face's transformers.
    """
    merges = []
    for text, score in scores.items():
        if len(text) > LONGEST_MERGED:
            continue
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, tokens: _Tokens) -> None:
    """Let texts of control tokens, and of those that a user defined, be found in a text."""
    added = []
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    for token in np.flatnonzero(np.isin(tokens.types, kinds)).tolist():
        text = tokens.texts[token]
        # one of blanks, in a vocabulary of sentencepiece, is found by its merges
        if METASPACE not in text and tokens.ids.get(text) == token:
            is_special = bool(tokens.types[token] != USER_DEFINED)
            added.append(AddedToken(text, normalized=False, special=is_special))
    tokenizer.add_tokens(added)


def _begin_texts_with(tokenizer: Tokenizer, text: str, token: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", text, "$B:1"], special_tokens=[(text, token)]
    )


def _settings(file: GGUFFile, tokens: _Tokens, adds_bos: bool | None) -> TokenizerSettings:
    ids = {
        name: _token_id(file, f"{PREFIX}{key}_token_id", tokens)
        for name, key in KEYS_OF_IDS.items()
    }
    ends = [ids["eos_token"], ids["eot_token"], ids["eom_token"]]
    if EOS_TOKENS in file.metadata:
        numbers = file.numbers(EOS_TOKENS)
        ends = [int(token) for token in numbers if token in range(len(tokens.texts))]
    else:
        known = [tokens.ids.get(text) for text in _ENDS_OF_ANSWERS]
        ends += [token for token in known if token is not None and tokens.types[token] == CONTROL]
    if PREFIX + "add_bos_token" in file.metadata:
        adds_bos = file.flag(PREFIX + "add_bos_token")
    return TokenizerSettings(
        bos_token=ids["bos_token"],
        eos_tokens=tuple(dict.fromkeys(token for token in ends if token is not None)),
        adds_bos=adds_bos,
        chat_template=file.text(CHAT_TEMPLATE) if CHAT_TEMPLATE in file.metadata else None,
        named_tokens={
            name: tokens.texts[token]
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := ids[name]) is not None
        },
    )


def _token_id(file: GGUFFile, key: str, tokens: _Tokens) -> int | None:
    """Return the id under a key; None where there is none, or no such token."""
    if key not in file.metadata:
        return None
    token = file.integer(key)
    return token if 0 <= token < len(tokens.texts) else None
