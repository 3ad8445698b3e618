r"""How byte-level vocabularies split a text into words, by the names that GGUF files have for it.

Merges never go over the border of a word, so another split gives other tokens. The expressions are
those of the models' own ``tokenizer.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordSplit:
    """How a text is split.

    Attributes
    ----------
    expressions : tuple of str
        Regular expressions, applied one after the other: each match is a word of its own.
    single_digits : bool
        Whether first each digit is split off.
    composes : bool
        Whether characters written as a letter and an accent become one (Unicode's NFC).
    ignores_merges : bool
        Whether a word that is a token becomes that token, whatever the merges say.
    adds_bos : bool
        Whether a text begins with the model's first token where a file does not say.
    """

    expressions: tuple[str, ...]
    single_digits: bool = False
    composes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def set_up(self, tokenizer: Tokenizer) -> None:
        """Let a tokenizer split texts this way."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        for expression in self.expressions:
            steps.append(pre_tokenizers.Split(Regex(expression), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if self.composes:
            tokenizer.normalizer = normalizers.NFC()


_LLAMA3_SPLIT = WordSplit((_LLAMA3,), ignores_merges=True, adds_bos=True)
_QWEN2_SPLIT = WordSplit((_QWEN2,), composes=True)
_GPT2_SPLIT = WordSplit((_GPT2,))
_DIGITS_SPLIT = WordSplit((_GPT2,), single_digits=True)

WORD_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "smaug-bpe": WordSplit((_LLAMA3,)),
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "smollm": _DIGITS_SPLIT,
    "starcoder": _DIGITS_SPLIT,
    "refact": _DIGITS_SPLIT,
    "codeshell": _DIGITS_SPLIT,
    "gpt-2": _GPT2_SPLIT,
    "olmo": _GPT2_SPLIT,
    "mpt": _GPT2_SPLIT,
    "phi-2": _GPT2_SPLIT,
    "tekken": WordSplit((_TEKKEN,), ignores_merges=True, adds_bos=True),
    # What llama.cpp does for files that do not say.
    "default": WordSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def name_of_split(content: Mapping[str, Any]) -> str:
    """Return the name of how a ``tokenizer.json`` splits texts; ``default`` if it has none."""
    split = _split_of(content)
    for name, known in WORD_SPLITS.items():
        if (
            known.expressions == split.expressions
            and known.single_digits == split.single_digits
            and known.composes == split.composes
            and known.ignores_merges == split.ignores_merges
        ):
            return name
    return "default"


def _split_of(content: Mapping[str, Any]) -> WordSplit:
    step = content["pre_tokenizer"]
    steps = step["pretokenizers"] if step and step["type"] == "Sequence" else [step]
    expressions: list[str] = []
    single_digits = False
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated"}:
                expressions.append(expression)
            case {"type": "Digits", "individual_digits": True}:
                single_digits = True
            case {"type": "ByteLevel", "use_regex": True}:
                expressions.append(_GPT2)
    return WordSplit(
        tuple(expressions),
        single_digits,
        content["normalizer"] == {"type": "NFC"},
        bool(content["model"].get("ignore_merges")),
    )
