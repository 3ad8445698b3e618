"""Ending a text at a stop text that may come in several pieces."""

from collections.abc import Sequence


class StopTextFilter:
    """Lets a text through up to the first stop text, whatever pieces it comes in.

    What may be the beginning of a stop text is kept back until it is clear. The stop text that is
    complete first counts; of several that end at one place, the longest.

    Parameters
    ----------
    stop : sequence of str
        None of them empty.

    Attributes
    ----------
    is_stopped : bool
        Whether a stop text has come. Nothing more is let through then.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.is_stopped = False
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text and return what is certain not to belong to a stop text."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop]
        found = [place for place in found if place[1] >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        kept = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """Return what was kept back: the text has ended without a stop text."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text begin a stop text, but are not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
