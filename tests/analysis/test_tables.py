"""Tables as text: one unit a column, chosen by its largest value; columns line up; long headers take two lines."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.tables import format_ns, format_table


def test_a_table_reads_as_written() -> None:
    frame = pd.DataFrame(
        {
            "lane": ["h2d", "compute"],
            "nbytes": [3 * 2**20, 512 * 2**10],
            "busy_ns": [1_500_000, 12_000_000],
            "ratio": [1.0, 0.98765],
            "utilisation": [0.5, 0.125],
            "ops": [12, 3],
        }
    )
    assert format_table(frame, title="Lanes") == (
        "Lanes\n"
        "lane     size [MiB]  busy [ms]   ratio  utilisation  ops\n"
        "-------  ----------  ---------  ------  -----------  ---\n"
        "h2d           3.000      1.500  1.000x        50.0%   12\n"
        "compute       0.500     12.000  0.988x        12.5%    3\n"
    )


def test_long_headers_take_two_lines_and_like_columns_one_unit() -> None:
    frame = pd.DataFrame({"name": ["load[1]"], "predicted_busy_ns": [2_000_000], "measured_busy_ns": [900]})
    assert format_table(frame) == (
        "         predicted   measured\n"
        "name     busy [ms]  busy [ms]\n"
        "-------  ---------  ---------\n"
        "load[1]      2.000      0.001\n"
    )


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1000, "1.000 us"), (-2_500_000, "-2.500 ms"), (7_200_000_000_000, "7,200.000 s")],
)
def test_a_time_has_the_unit_that_suits_it(ns: int, text: str) -> None:
    assert format_ns(ns) == text
    unit = text.split()[1]
    table = format_table(pd.DataFrame({"gap_ns": [ns, 0]}))
    assert f"gap [{unit}]" in table and text.split()[0] in table


def test_no_time_that_is_not_zero_reads_as_zero() -> None:
    """A table of kinds holds the updates' seconds beside a clip's microseconds."""
    text = format_table(pd.DataFrame({"kind": ["update", "clip", "none"], "duration_ns": [7_200_000_000, 12_340, 0]}))
    assert "[ms]" in text
    assert [line.split()[-1] for line in text.splitlines()[-3:]] == ["7,200.000", "0.012", "0.000"]
    # Ten digits before the point would be no table: here the small one only shows that it is there.
    text = format_table(pd.DataFrame({"duration_ns": [7_200_000_000_000, -40, 40]}))
    assert [line.split()[-1] for line in text.splitlines()[-3:]] == ["7,200.000", ">-0.001", "<0.001"]
    assert "[s]" in text
    sizes = format_table(pd.DataFrame({"nbytes": [3 * 2**20, 64]}))
    assert "[KiB]" in sizes and [line.split()[-1] for line in sizes.splitlines()[-2:]] == ["3,072.000", "0.062"]
    assert format_table(pd.DataFrame({"gap_ns": [0.25, 3.0]})).splitlines()[-2:] == ["      <1", "       3"]


def test_missing_values_show_as_a_dash() -> None:
    frame = pd.DataFrame({"cause": ["issue late", None], "ratio": [float("nan"), 2.0]})
    assert format_table(frame).splitlines()[2:] == ["issue late       -", "-           2.000x"]


def test_rows_left_out_are_counted() -> None:
    frame = pd.DataFrame({"n": range(5)})
    assert format_table(frame, max_rows=2).endswith("0\n1\n... 3 more rows\n")
    assert "more" not in format_table(frame, max_rows=5)
    with pytest.raises(ValueError, match="max_rows: must be >= 1, got 0"):
        format_table(frame, max_rows=0)


def test_an_empty_table_keeps_its_header() -> None:
    assert format_table(pd.DataFrame({"cause": [], "gap_ns": []})) == "cause  gap [ns]\n-----  --------\n"
