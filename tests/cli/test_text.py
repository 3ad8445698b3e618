"""How results are written."""

import pytest

from twell_numba.cli.text import bytes_text, note, print_histogram, print_table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 * 1024**2 + 512 * 1024, "5.5 MiB"),
        (3 * 1024**3, "3.0 GiB"),
        (2 * 1024**4, "2.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_byte_counts(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_columns_are_aligned_and_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "count"), [("a", 1), ("long name", 1000)])
    assert capsys.readouterr().out == "name       count\na              1\nlong name   1000\n"


def test_an_empty_table_is_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "count"), [])
    assert capsys.readouterr().out == "name  count\n"


def test_bars_show_every_count_above_zero(capsys: pytest.CaptureFixture[str]) -> None:
    print_histogram([1000, 1, 0], ["0", "1", "2-3"], width=10)
    bars = [line.count("#") for line in capsys.readouterr().out.splitlines()]
    assert bars == [10, 1, 0]


def test_a_note_that_stderr_does_not_take_is_no_error(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            pass

    monkeypatch.setattr("sys.stderr", Full())
    note("a line")
