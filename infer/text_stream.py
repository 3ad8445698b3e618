"""Bytes to text as they come, never half a character; and text that a terminal can be shown."""

import codecs

# C0 and C1 controls and DEL. A terminal acts on them: it moves the cursor, or takes what follows
# for a command.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    r"""Return a text with its control characters, but line breaks and tabs, written as ``\x1b``."""
    return text.translate(_CONTROLS)


class TextStream:
    """Decodes UTF-8 in pieces of any length.

    A character that is not complete yet is kept back. Bytes that cannot be a part of a character
    become U+FFFD, the replacement character.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        """Take bytes and return the text that they complete, which may be empty."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what was kept back, as U+FFFD, and start anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
