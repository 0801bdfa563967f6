"""Traces for ui.perfetto.dev (and chrome://tracing): Chrome's trace-event JSON, predicted and measured on one clock.

Each trace is a process, each lane a thread of it in the order of `LANES`; after the compute lane comes a thread of its stalls,
cut into pieces with one cause each. Both processes begin with their first op at 0, so the two lie one above the other. What a
lane waits for before the very first op starts is left out.

An op is a *complete event* (`ph` X). Its name is the op's (`load[3.1]`), its category the kind, and its args hold the text form
that errors use, the part, block and micro-batch, the bytes, the deps as text, and when it was issued.

The format counts microseconds, our traces nanoseconds. The viewer multiplies by 1000 and cuts off what follows the point, and
it drops an event that overlaps the one before by even a nanosecond; so every number here is the smallest double from n / 1000
up that survives this (`microseconds`), and ops that touch stay neighbours. `displayTimeUnit` is left out because older
versions of the viewer took `ns` to be the unit of the times themselves.

The format, by its authors: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.compare import refuse_foreign
from megatrain.derive import Facts, Run, derive
from megatrain.schedule.nouns import LANES, Schedule
from megatrain.trace import Trace

STALLS = "compute stalls"
THREADS: tuple[str, ...] = tuple(name for lane in LANES for name in ((lane, STALLS) if lane == "compute" else (lane,)))
"""Threads of a process, in the order they are shown."""

JSON = dict[str, Any]


def perfetto_trace(schedule: Schedule, predicted: Trace, measured: Trace | None = None, *, flows: bool = False) -> JSON:
    """The JSON object. `flows` adds an arrow for each dep between lanes (many: files grow by half).

    ForeignTrace (a ValueError) for a trace of another schedule, ValueError for one that breaks it (`megatrain.derive.join`). The
    two may have run different numbers of steps.
    """
    events: list[JSON] = []
    arrows: list[JSON] = []
    for pid, (role, trace) in enumerate((("predicted", predicted), ("measured", measured)), start=1):
        if trace is None:
            continue
        refuse_foreign(schedule, trace, role)
        facts = derive(schedule, trace)
        events += _names(pid, f"{role} ({trace.source})")
        events += _complete_events(facts, pid)
        if flows:
            arrows += _flows(facts.run, pid, first_id=len(arrows))
    return {"traceEvents": events + arrows, "otherData": {"model": schedule.model.name, **schedule.digests()}}


def save_perfetto(
    path: str | Path, schedule: Schedule, predicted: Trace, measured: Trace | None = None, *, flows: bool = False
) -> Path:
    """Write `perfetto_trace` to `path`, compressed if it ends in .gz (the viewer opens both). The same traces give the same
    bytes."""
    data = json.dumps(perfetto_trace(schedule, predicted, measured, flows=flows), separators=(",", ":")).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def microseconds(ns: int) -> float:
    """`ns` >= 0 as microseconds, such that multiplying by 1000 and cutting off the fraction gives `ns` again."""
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)


def _thread(pid: int, name: str) -> int:
    # The viewer knows threads by number alone, whatever their process, and takes one numbered like its process for the main one.
    return 10 * pid + 1 + THREADS.index(name)


def _names(pid: int, process: str) -> Iterator[JSON]:
    def metadata(what: str, tid: int, **args: object) -> JSON:
        return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}

    yield metadata("process_name", 0, name=process)
    yield metadata("process_sort_index", 0, sort_index=pid)
    for order, thread in enumerate(THREADS):
        yield metadata("thread_name", _thread(pid, thread), name=thread)
        yield metadata("thread_sort_index", _thread(pid, thread), sort_index=order)


def _complete_events(facts: Facts, pid: int) -> Iterator[JSON]:
    run = facts.run
    origin_ns = _origin_ns(run)

    def complete(thread: str, name: str, category: str, start_ns: int, stop_ns: int, args: JSON) -> JSON:
        return {
            "name": name, "cat": category, "ph": "X", "pid": pid, "tid": _thread(pid, thread),
            "ts": microseconds(start_ns - origin_ns), "dur": microseconds(stop_ns - start_ns), "args": args,
        }  # fmt: skip

    for i, (placed, event) in enumerate(zip(run.placed, run.events, strict=True)):
        op = placed.op
        args: JSON = {
            "op": run.text(i),
            "block": op.block,
            "micro": op.micro,
            "nbytes": op.nbytes,
            "deps": ", ".join(_dep_text(run, placed.part, d) for d in placed.deps),
            # Some ops are issued before the first one starts.
            "issued_us": (event.issued_ns - origin_ns) / 1000,
            "waited_us": (event.start_ns - event.issued_ns) / 1000,
        }
        args = {key: value for key, value in args.items() if value is not None}
        yield complete(op.lane, op.name, op.kind, event.start_ns, event.end_ns, args)
    for stall in facts.stalls["compute"]:
        for cause, piece in stall.blames:
            start_ns = max(piece.start_ns, origin_ns)
            if start_ns < piece.stop_ns:
                blamed = {"waiting": run.text(stall.waiting), "blamed": run.text(piece.position), "ran": piece.ran}
                yield complete(STALLS, cause, "stall", start_ns, piece.stop_ns, blamed)


def _flows(run: Run, pid: int, first_id: int) -> Iterator[JSON]:
    """An arrow from the end of an op to the start of one on another lane that depends on it: a pair of events of one id, each
    bound to the slice that begins at its time. Slices of no duration cannot hold one."""
    origin_ns, number = _origin_ns(run), first_id
    for i, placed in enumerate(run.placed):
        for d in placed.deps:
            ends = run.placed[d].op.lane, placed.op.lane
            if ends[0] == ends[1] or any(run.events[j].start_ns == run.events[j].end_ns for j in (d, i)):
                continue
            number += 1
            for phase, j, lane in (("s", d, ends[0]), ("f", i, ends[1])):
                yield {
                    "name": "dep", "cat": "dep", "ph": phase, "bp": "e", "id": number, "pid": pid, "tid": _thread(pid, lane),
                    "ts": microseconds(run.events[j].start_ns - origin_ns),
                }  # fmt: skip


def _origin_ns(run: Run) -> int:
    return min((event.start_ns for event in run.events), default=0)


def _dep_text(run: Run, part: int, position: int) -> str:
    """`12:load[3.1]`, of an earlier part with its name in front."""
    placed = run.placed[position]
    return run.parts[part].text(placed.position) if placed.part == part else run.text(position)
