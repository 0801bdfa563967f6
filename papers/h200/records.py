"""What runs leave in `results/` beside their figures: records, stall tables, and the profile that predictions are made with.
Needs no PyTorch."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables import format_table
from megatrain.derive import Facts, by_cause
from megatrain.files import Job, Record
from megatrain.schedule import Schedule
from megatrain.trace import Trace

CALIBRATED = Path(__file__).with_name("results") / "calibrated.json"
"""The machine's profile as `papers.h200.rows calibrate` wrote it."""


def record(schedule: Schedule, trace: Trace, hardware: str, provenance: str) -> Record:
    """A predicted or measured run as `megatrain compare` reads it. `hardware` names the machine; `provenance` says where a
    prediction's rates come from, or on which backend a measured run ran."""
    model = schedule.model
    job = Job(model=model.name, recipe=schedule.recipe, plan=schedule.plan)
    return Record(
        job=job, model_name=model.name, config_json=model.config_json, hardware=hardware, provenance=provenance, trace=trace,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def save_stalls(path: Path, trace: Trace, facts: Facts) -> None:
    """Write PATH.stalls.txt: the steps' times, what each lane did, who waited for whom, the trace's notes."""
    steps = [{"step": i, "ns": ns} for i, ns in enumerate(facts.step_times_ns, start=1)]
    lanes = [
        {"lane": lane, "busy_ns": use.busy_ns, "stalled_ns": use.stalled_ns, "tail_ns": use.tail_ns, "bytes": use.nbytes,
         "utilisation": use.utilisation}
        for lane, use in facts.lanes.items()
    ]  # fmt: skip
    causes = [
        {"lane": lane, "cause": cause, "ns": ns}
        for lane, gaps in facts.stalls.items()
        for cause, ns in by_cause(gaps).items()
        if ns
    ]
    titled: dict[str, list[dict[str, Any]]] = {"Steps": steps, "Lanes": lanes, "Stalls by lane and cause": causes}
    tables = [format_table(pd.DataFrame(rows), title=title) for title, rows in titled.items()]
    Path(f"{path}.stalls.txt").write_text("\n\n".join([*tables, *trace.notes]) + "\n")
