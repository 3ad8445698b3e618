"""Counters, gauges and histograms, in the text format that Prometheus reads.

https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4). All are used from the
event loop's thread alone.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Counter:
    """A number that only grows, for every combination of its labels that has come up."""

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, amount: float, *labels: str) -> None:
        """Add to the number of these labels."""
        if len(labels) != len(self._labels):
            raise ValueError(f"labels {labels} given, {self._labels} wanted")
        self._values[labels] = self._values.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        """Yield its lines."""
        yield from _heading(self._name, self._help, "counter")
        for labels, value in self._values.items():
            pairs = dict(zip(self._labels, labels, strict=True))
            yield _sample(self._name, pairs, value)


class Measured:
    """A number that is asked for whenever it is read: a gauge, or a counter kept elsewhere."""

    def __init__(self, name: str, help: str, kind: str, read: Callable[[], float]) -> None:
        self._name, self._help, self._kind, self._read = name, help, kind, read

    def lines(self) -> Iterator[str]:
        """Yield its lines."""
        yield from _heading(self._name, self._help, self._kind)
        yield _sample(self._name, {}, self._read())


class Histogram:
    """How many of the observed values are at most as large as each bound."""

    def __init__(self, name: str, help: str, bounds: Sequence[float] = _SECONDS) -> None:
        self._name, self._help = name, help
        self._bounds = sorted(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """Yield its lines; buckets are cumulative."""
        yield from _heading(self._name, self._help, "histogram")
        total = 0
        bounds = [*map(_number, self._bounds), "+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            yield _sample(f"{self._name}_bucket", {"le": bound}, total)
        yield _sample(f"{self._name}_sum", {}, self._sum)
        yield _sample(f"{self._name}_count", {}, total)


class ServerMetrics:
    """What a server counts.

    Attributes
    ----------
    http_requests : Counter
        By endpoint and status.
    finished : Counter
        Texts by the reason of their end.
    time_to_first_token, time_per_token : Histogram
        In seconds; the second is a text's mean.
    """

    def __init__(self) -> None:
        self.http_requests = Counter(
            "twell_http_requests_total", "HTTP requests answered.", ("endpoint", "status")
        )
        self.finished = Counter("twell_texts_finished_total", "Generated texts.", ("reason",))
        self.time_to_first_token = Histogram(
            "twell_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first text.",
        )
        self.time_per_token = Histogram(
            "twell_time_per_token_seconds", "Between the tokens of a text, on average."
        )
        self._measured: list[Measured] = []

    def measure(self, name: str, help: str, kind: str, read: Callable[[], float]) -> None:
        """Add a number that is kept elsewhere; ``kind`` is ``gauge`` or ``counter``."""
        self._measured.append(Measured(name, help, kind, read))

    def text(self) -> str:
        """Return everything as Prometheus reads it."""
        families: list[Counter | Histogram | Measured] = [
            self.http_requests,
            self.finished,
            self.time_to_first_token,
            self.time_per_token,
            *self._measured,
        ]
        return "".join(f"{line}\n" for family in families for line in family.lines())


def _heading(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
