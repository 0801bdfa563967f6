"""DataFrames as plain text for a terminal: one unit a column, numbers right-aligned on it.

The unit comes from the column's name, as everywhere in the project: `..._ns` is a time, `...nbytes` a size, `..._ratio` and
`..._share` are what they say (`1.03x`, `42.0%`). A column of times or sizes gets the one unit that suits its largest value, and
columns whose names differ in the first word only (`predicted_busy_ns`, `measured_busy_ns`) get the same one, so that numbers
compare at a glance; the header names it. Where values lie so far apart that the smallest would read 0.000, the unit is a smaller
one as long as the largest stays below a million of it; what still is too small for three decimals reads `<0.001`, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

TIME_UNITS: tuple[tuple[str, float], ...] = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))
SIZE_UNITS: tuple[tuple[str, float], ...] = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))

# A value below the first reads 0.000; one from the second on has more digits before the point than a table has room for.
_SHOWN, _WIDE = 0.0005, 1e6


class _Column(NamedTuple):
    header: tuple[str, str]
    cells: list[str]
    right: bool


def format_table(frame: pd.DataFrame, *, title: str | None = None, max_rows: int | None = None) -> str:
    """The frame without its index, ending in a newline. Missing values show as `-`. Past `max_rows` a last line says how many
    rows were left out. ValueError for `max_rows` below 1."""
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows: must be >= 1, got {max_rows}")
    shown = frame if max_rows is None else frame.head(max_rows)
    values = {str(name): list(shown[name]) for name in shown.columns}
    columns = [_column(name, values) for name in values]
    widths = [max(map(len, [*c.header, *c.cells])) for c in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(w) if c.right else cell.ljust(w) for cell, c, w in zip(cells, columns, widths, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    lines = [] if title is None else [title]
    lines += [text for text in (line([c.header[0] for c in columns]), line([c.header[1] for c in columns])) if text]
    lines.append("  ".join("-" * w for w in widths))
    lines += [line([c.cells[row] for c in columns]) for row in range(len(shown))]
    if len(shown) < len(frame):
        lines.append(f"... {len(frame) - len(shown)} more rows")
    return "\n".join(lines) + "\n"


def format_ns(ns: float) -> str:
    """One time with its own unit: `1.234 ms`."""
    unit, scale = _unit(TIME_UNITS, [abs(ns)])
    return f"{_number(unit == 'ns')(ns / scale)} {unit}"


def _column(name: str, table: Mapping[str, Sequence[object]]) -> _Column:
    values = table[name]
    numbers = _numbers(values)
    header, scale, right = name.replace("_", " "), 1.0, bool(numbers)
    form: Callable[[float], str] = str
    for ending, units in (("_ns", TIME_UNITS), ("nbytes", SIZE_UNITS)):
        if name.endswith(ending):
            alike = [other for other in table if other.partition("_")[2] == name.partition("_")[2] and other.endswith(ending)]
            unit, scale = _unit(units, [abs(n) for other in alike for n in _numbers(table[other])])
            stem = name.removesuffix(ending).rstrip("_").replace("_", " ") or "size"
            header, form, right = f"{stem} [{unit}]", _number(scale == 1.0), True
    if name.endswith("ratio"):
        form, right = _ratio, True
    elif name.endswith(("share", "utilisation")):
        form, right = _percent, True
    elif form is str and any(isinstance(v, float) for v in values):
        form = _general
    cells = []
    for value in values:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
            cells.append(form(value / scale if scale != 1.0 else value))
        else:
            cells.append("-" if value is None or value is pd.NA or isinstance(value, float) else str(value))
    return _Column(_on_two_lines(header, max(map(len, cells), default=0)), cells, right)


def _numbers(values: Sequence[object]) -> list[float]:
    return [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and not math.isnan(v)]


def _on_two_lines(header: str, width: int) -> tuple[str, str]:
    """The header broken where the longer of its lines is shortest, units kept with their word; unbroken (on the lower line)
    if its cells are as wide."""
    words = header.replace(" [", "\0[").split(" ")
    breaks = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(len(words))]
    best = breaks[0] if len(header) <= width else min(breaks, key=lambda pair: (max(map(len, pair)), len(pair[0])))
    return best[0].replace("\0", " "), best[1].replace("\0", " ")


def _unit(table: Sequence[tuple[str, float]], sizes: Sequence[float]) -> tuple[str, float]:
    largest = max(sizes, default=0.0)
    smallest = min((size for size in sizes if size), default=0.0)
    fitting = next((i for i, (_, scale) in enumerate(table) if largest >= scale), len(table) - 1)
    while fitting + 1 < len(table) and smallest / table[fitting][1] < _SHOWN and largest / table[fitting + 1][1] < _WIDE:
        fitting += 1
    return table[fitting]


def _number(whole: bool) -> Callable[[float], str]:
    decimals = 0 if whole else 3

    def form(x: float) -> str:
        if 0 < abs(x) < 0.5 * 10**-decimals:
            return f"{'<' if x > 0 else '>-'}{10**-decimals:.{decimals}f}"
        return f"{x:,.{decimals}f}"

    return form


def _ratio(x: float) -> str:
    return f"{x:.3f}x"


def _percent(x: float) -> str:
    return f"{100 * x:.1f}%"


def _general(x: float) -> str:
    return f"{x:.6g}"
