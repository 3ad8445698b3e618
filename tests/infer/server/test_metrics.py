"""What Prometheus reads."""

import pytest

from twell_numba.infer.server.metrics import Counter, Histogram, Measured, ServerMetrics


def test_a_counter_has_a_line_for_each_combination_of_labels() -> None:
    counter = Counter("hits_total", "Hits.", ("path", "status"))
    counter.add(1, "/a", "200")
    counter.add(2, "/a", "200")
    counter.add(1, "/a", "404")
    assert list(counter.lines()) == [
        "# HELP hits_total Hits.",
        "# TYPE hits_total counter",
        'hits_total{path="/a",status="200"} 3',
        'hits_total{path="/a",status="404"} 1',
    ]
    with pytest.raises(ValueError, match="labels"):
        counter.add(1, "/a")


def test_labels_are_escaped() -> None:
    counter = Counter("hits_total", "Hits.", ("path",))
    counter.add(1, 'a"b\\c\nd')
    assert list(counter.lines())[2] == 'hits_total{path="a\\"b\\\\c\\nd"} 1'


def test_a_number_kept_elsewhere_is_asked_for_when_it_is_read() -> None:
    values = [1, 2.5]
    gauge = Measured("running", "Running.", "gauge", values.pop)
    assert list(gauge.lines())[1:] == ["# TYPE running gauge", "running 2.5"]
    assert list(gauge.lines())[2] == "running 1"


def test_buckets_of_a_histogram_are_cumulative_and_hold_their_bounds() -> None:
    histogram = Histogram("seconds", "Time.", (0.5, 1, 10))
    for value in (0.2, 0.5, 0.75, 10.0, 11.5):
        histogram.observe(value)
    assert list(histogram.lines()) == [
        "# HELP seconds Time.",
        "# TYPE seconds histogram",
        'seconds_bucket{le="0.5"} 2',
        'seconds_bucket{le="1"} 3',
        'seconds_bucket{le="10"} 4',
        'seconds_bucket{le="+Inf"} 5',
        "seconds_sum 22.95",
        "seconds_count 5",
    ]


def test_every_family_comes_once_and_ends_in_a_line_break() -> None:
    metrics = ServerMetrics()
    metrics.measure("twell_running", "Running.", "gauge", lambda: 3)
    text = metrics.text()
    assert text.endswith("twell_running 3\n")
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == 5
