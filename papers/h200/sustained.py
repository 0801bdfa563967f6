"""What layers' ops took in the rows' traces: `python -m papers.h200.sustained [rows]`. A GPU's clock falls within 150 ms of
work and is back after a pause, so there is a column for each share of the last 150 ms in which the GPU worked. A gradient that
is added to that of an earlier micro-batch has a line of its own. Medians in ms, and of how many. Exit code 2, with one line,
for a row without a trace or with one of another schedule than its plan has here."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import pandas as pd

from analysis.tables import format_table
from megatrain.calibrate.blocks import SUSTAINED_NS, SUSTAINED_SHARE, samples
from megatrain.files import load_job, load_record
from megatrain.schedule import lower
from papers.h200.models import qwen
from papers.h200.rows import PLANS, RESULTS, ROWS

WORKED = {"below 1/3": (0.0, 1 / 3), "to 9/10": (1 / 3, SUSTAINED_SHARE), "sustained": (SUSTAINED_SHARE, math.inf)}
"""By column: from which share of the `SUSTAINED_NS` before an op, and below which."""


def layer_times(name: str) -> Iterator[dict[str, object]]:
    """A line for each kind of op on the decoder layers of a row. ValueError, in one line, without a trace of its schedule."""
    file, plan = RESULTS / "rows" / f"{name}.measured.json.gz", PLANS / f"{name}.yaml"
    trace, job = load_record(file).trace, load_job(plan)
    schedule = lower(qwen(ROWS[name].model, "cuda"), job.recipe, job.plan)
    digests = schedule.digests()
    if [digests.get(part) for part in trace.parts] != list(trace.digests):
        raise ValueError(f"{file}: digests: must be those of the schedule that {plan.name} has now")
    for (kind, block, adds), taken in sorted(samples(schedule, trace).items()):
        if block != "layer" or kind == "pack":
            continue
        line: dict[str, object] = {"row": name, "op": kind.replace("_", " ") + ", added" * adds}
        for column, (least, below) in WORKED.items():
            ns = [sample.ns for sample in taken if least <= sample.worked_ns / SUSTAINED_NS < below]
            line |= {f"{column} [ms]": round(statistics.median(ns) / 1e6, 2) if ns else None, f"{column}, of": len(ns)}
        yield line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What layers' ops took in the rows' traces, by how much the GPU had worked.")
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
