"""Tokenizers in the shapes that models come with, trained on a few lines."""

import functools
import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "the cat and the dog said: def return self, 12345 is it's we've I'LL\n",
    "rødgrød med fløde på øen; naïve café, ½ kilo, ٣٤٥, Ⅷ. Æbler!\n",
    "日本語のテキスト、中文文本。Привет мир, как дела? שלום עולם नमस्ते\n",
    "🙂👩‍👩‍👧 <html> {'a': [1, 2]}    four blanks\t\ttabs \r\n",
] * 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(kind: str) -> Tokenizer:
    """Return one of ``gpt-2``, ``smollm``, ``llama-bpe`` or ``qwen2``.

    Special tokens stand before the others in ``gpt-2`` and ``smollm``, behind them in the other
    two, with ids left out between them in ``llama-bpe``.
    """
    ignore_merges = kind == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = {
        "gpt-2": with_regex,
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), with_regex]
        ),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), plain]
        ),
        "qwen2": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"), plain]
        ),
    }[kind]
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    first = list(SPECIAL) if kind in ("gpt-2", "smollm") else []
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=first,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    if not first:
        tokenizer = _with_specials_behind(tokenizer, holes=kind == "llama-bpe")
        bos = tokenizer.token_to_id("<|endoftext|>")
        if kind == "llama-bpe":
            tokenizer.post_processor = processors.Sequence(
                [
                    processors.ByteLevel(trim_offsets=False),
                    processors.TemplateProcessing(
                        single="<|endoftext|> $A",
                        pair="<|endoftext|> $A <|endoftext|>:1 $B:1",
                        special_tokens=[("<|endoftext|>", bos)],
                    ),
                ]
            )
    return tokenizer


def _with_specials_behind(tokenizer: Tokenizer, holes: bool) -> Tokenizer:
    """Add special tokens, and one that is not special."""
    content = json.loads(tokenizer.to_str())
    size = len(content["model"]["vocab"])
    places = (10, 11, 14, 20) if holes else (0, 1, 2, 3)
    added = dict(zip((*SPECIAL, "<tool>"), places, strict=True))
    content["added_tokens"] = [
        {
            "id": size + place,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text != "<tool>",
        }
        for text, place in added.items()
    ]
    if holes:
        content["model"]["vocab"] |= {text: size + place for text, place in added.items()}
    return Tokenizer.from_str(json.dumps(content))


def sentencepiece(kind: str = "legacy") -> Tokenizer:
    """Return a BPE with byte fallback: ``legacy`` (Llama 2), ``first`` (newer), ``plain`` (Gemma).

    The first two put a blank in front of a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, limit_alphabet=60)
    tokenizer.train_from_iterator(LINES, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merged = [left + right for left, right in model["merges"]]
    texts += merged + sorted(set(model["vocab"]) - set(merged))
    vocabulary = {text: token for token, text in enumerate(texts)}
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    elif kind == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if kind != "plain":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


BYTE_LEVEL = ("gpt-2", "smollm", "llama-bpe", "qwen2")
SENTENCEPIECE = ("legacy", "first", "plain")


def tokenizer_of(kind: str) -> Tokenizer:
    """Return a tokenizer of its own each time, the same in one process: training is at random."""
    return Tokenizer.from_str(_json_of(kind))


@functools.cache
def _json_of(kind: str) -> str:
    tokenizer = byte_level(kind) if kind in BYTE_LEVEL else sentencepiece(kind)
    return tokenizer.to_str()
