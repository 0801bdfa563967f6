"""What layers' ops took in the rows' traces: `python -m papers.h200.sustained [rows]`. A GPU's clock falls within some 50 ms of
work and is back after a pause, so there are two columns: of ops after sustained work (`megatrain.calibrate.blocks.after_work`)
and of the others. A gradient that is added to that of an earlier micro-batch has a line of its own. Medians in ms, and of how
many. Exit code 2, with one line, for a row without a trace."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence

import pandas as pd

from analysis.tables import format_table
from megatrain.calibrate.blocks import samples
from megatrain.files import load_job, load_record
from megatrain.schedule import lower
from papers.h200.models import qwen
from papers.h200.rows import PLANS, RESULTS, ROWS


def layer_times(name: str) -> Iterator[dict[str, object]]:
    """A line for each kind of op on the decoder layers of a row. ValueError, in one line, without a trace of it."""
    record, job = load_record(RESULTS / "rows" / f"{name}.measured.json.gz"), load_job(PLANS / f"{name}.yaml")
    schedule = lower(qwen(ROWS[name].model, "cuda"), job.recipe, job.plan)
    for (kind, block, adds), taken in sorted(samples(schedule, record.trace).items()):
        if block != "layer" or kind == "pack":
            continue
        line: dict[str, object] = {"row": name, "op": kind.replace("_", " ") + ", added" * adds}
        for column, sustained in (("after pauses", False), ("sustained", True)):
            ns = [sample.ns for sample in taken if sample.sustained == sustained]
            line |= {f"{column} [ms]": round(statistics.median(ns) / 1e6, 2) if ns else None, f"{column}, of": len(ns)}
        yield line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What layers' ops took in the rows' traces, after pauses and not.")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}; all by default")
    names = parser.parse_args(arguments).rows or list(ROWS)
    try:
        for unknown in [name for name in names if name not in ROWS]:
            raise ValueError(f"row: must be of {', '.join(ROWS)}, got {unknown}")
        lines = [line for name in names for line in layer_times(name)]
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    print(format_table(pd.DataFrame(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
