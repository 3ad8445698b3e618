"""Tokenizers to train with: bytes as they are, or byte-pair encoding trained on the corpus."""

from collections.abc import Iterable

from twell_numba.models.tokenizer import BPETokenizer, ByteTokenizer
from twell_numba.train.config import require_bpe_vocab_size
from twell_numba.train.corpus import TextCorpus, decode_document


def make_tokenizer(
    kind: str, corpus: TextCorpus, bpe_vocab_size: int
) -> ByteTokenizer | BPETokenizer:
    """Return a byte tokenizer, or a BPE tokenizer trained on the corpus's training part."""
    if kind == "byte":
        return ByteTokenizer()
    return train_bpe(map(decode_document, corpus.training), bpe_vocab_size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train byte-level byte-pair encoding, offline; the same texts give the same tokenizer.

    Parameters
    ----------
    texts : iterable of str
    vocab_size : int
        Ids wanted, the 256 bytes included; a short text may yield fewer.

    Returns
    -------
    BPETokenizer
        Any text can be encoded, as every byte has an id of its own.

    Raises
    ------
    UsageError
        If ``vocab_size`` is out of range; the library would end the process if it is far too large.
    """
    require_bpe_vocab_size(vocab_size)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BPETokenizer(tokenizer)
