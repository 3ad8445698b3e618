"""The bytes that each token of a vocabulary stands for, by the vocabulary's kind."""

from collections.abc import Mapping

# Bytes of which printable text is made, in UTF-8. The others are control characters, bytes that
# UTF-8 never has, and the first bytes of planes in which no character is assigned; vocabularies
# that were trained on real text may lack them.
PRINTABLE_BYTES = (9, 10, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))


def byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte, by byte value.

    A byte that prints stands for itself; the others take the characters from U+0100 on
    (``bytes_to_unicode`` of GPT-2).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level_bytes(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """Return the bytes by token id where each character of a token stands for a byte.

    A token that has another character stands for its own text, as in the ``tokenizers`` library.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    bytes_of = {}
    for text, token in vocabulary.items():
        values = [byte_of.get(character) for character in text]
        bytes_of[token] = text.encode() if None in values else bytes(values)  # type: ignore[arg-type]
    return bytes_of
