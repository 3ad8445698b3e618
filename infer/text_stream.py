"""Bytes to text as they come, never half a character."""

import codecs


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
