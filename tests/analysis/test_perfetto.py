"""Traces for the viewer: every op and every stall is there, to the nanosecond as the viewer reads it, and nothing overlaps."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from analysis.compare import ForeignTrace
from analysis.perfetto import STALLS, THREADS, microseconds, perfetto_trace, save_perfetto
from megatrain.derive import by_cause, derive
from megatrain.hardware import H200
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, Op, Schedule, lower
from megatrain.trace import Trace
from sim.simulate import simulate
from tests.timelines import MODEL, row, scheduled, timeline

PARTS = ("prologue", "body", "body", "epilogue", "prologue", "body", "epilogue")


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return lower(MODEL, Recipe(seq_len=4, micro_batches=2), Plan(chunk_bytes=512, placement={"head": "resident"}))


def _measured(schedule: Schedule, seed: int, parts: Sequence[str] = PARTS) -> Trace:
    """Times of nine digits and more, of which many are no multiple of 1 us, on a clock that does not begin at 0."""
    rng = random.Random(seed)
    trace = scheduled(
        schedule, parts, lambda q: rng.choice((0, 1, rng.randrange(10**7))), lambda q: rng.choice((0, rng.randrange(10**5))),
        origin_ns=rng.randrange(10**12),
    )  # fmt: skip
    return replace(trace, source="cuda")


def _as_read(events: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """(start, end, event) in ns as ui.perfetto.dev reads them: times 1000, fraction cut off."""
    out = []
    for event in events:
        start = int(event["ts"] * 1000.0)
        out.append((start, start + int(event["dur"] * 1000.0), event))
    return out


def _threads(trace: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Complete events by (process, thread name)."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    out: dict[tuple[int, str], list[dict[str, Any]]] = {(pid, name): [] for (pid, _), name in names.items()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            out[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return out


def test_microseconds_come_back_as_the_same_nanosecond() -> None:
    rng = random.Random(0)
    times = [*range(3000), *(rng.randrange(10 ** rng.randrange(4, 15)) for _ in range(20_000))]
    assert [int(json.loads(json.dumps(microseconds(ns))) * 1000.0) for ns in times] == times
    assert all(abs(microseconds(ns) - ns / 1000) < 1e-3 for ns in times)


@pytest.mark.parametrize("seed", range(5))
def test_every_op_is_there_and_takes_its_time(schedule: Schedule, seed: int, tmp_path: Path) -> None:
    traces = {1: simulate(schedule, H200, parts_run=PARTS), 2: _measured(schedule, seed)}
    read = json.loads(save_perfetto(tmp_path / "trace.json", schedule, traces[1], traces[2]).read_text())
    threads = _threads(read)
    assert len(threads) == 2 * len(THREADS)
    for pid, trace in traces.items():
        facts = derive(schedule, trace)
        lanes = [threads[pid, lane] for lane in LANES]
        assert sum(map(len, lanes)) == len(trace.events)
        assert min(event["ts"] for lane in lanes for event in lane) == 0
        for lane, events in zip(LANES, lanes, strict=True):
            spans = _as_read(events)
            assert sum(end - start for start, end, _ in spans) == facts.lanes[lane].busy_ns
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
            assert [e["name"] for e in events] == [facts.run.placed[i].op.name for i in facts.run.lanes[lane]]
            assert [e["args"]["nbytes"] for e in events] == [facts.run.placed[i].op.nbytes for i in facts.run.lanes[lane]]
            assert [e["args"]["op"] for e in events] == [facts.run.text(i) for i in facts.run.lanes[lane]]
        first = min(event.start_ns for event in trace.events)
        stalls = _as_read(threads[pid, STALLS])
        assert all(a[1] <= b[0] for a, b in pairwise(stalls))
        total: Counter[str] = Counter()
        for start, end, event in stalls:
            total[event["name"]] += end - start
        before = facts.run.events[facts.run.lanes["compute"][0]]  # the only gap that may begin before the first op
        left_out = max(0, min(first, before.start_ns) - facts.run.begin_ns)
        by = by_cause(facts.stalls["compute"])
        assert sum(by.values()) - left_out == sum(total.values())
        assert all(total[cause] <= ns for cause, ns in by.items())


def test_processes_and_threads_have_names_and_an_order(schedule: Schedule) -> None:
    events = perfetto_trace(schedule, simulate(schedule, H200, steps=1), _measured(schedule, 1))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {1: "predicted (sim)", 2: "measured (cuda)"}
    for pid in named:
        threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
        order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index" and e["pid"] == pid}
        assert [threads[tid] for tid in sorted(order, key=order.__getitem__)] == list(THREADS)
    assert [name for name in THREADS if name != STALLS] == list(LANES)
    tids = [e["tid"] for e in events if e["name"] == "thread_name"]
    assert len(set(tids)) == len(tids) and not set(tids) & set(named)


def test_args_say_what_an_op_waited_for() -> None:
    schedule, trace = timeline(
        row(Op(kind="load", lane="h2d", block=1, chunk=0), 100, 350),
        row(Op(kind="forward", lane="compute", block=1, micro=0), 400, 900, "load[1.0]"),
    )
    load, forward, *stalls = (e for e in perfetto_trace(schedule, trace)["traceEvents"] if e["ph"] == "X")
    assert (load["ts"], load["dur"], load["cat"], load["args"]["deps"]) == (0.0, 0.25, "load", "")
    assert forward["args"] == {
        "op": "part 0 (prologue) 1:forward[1.0]", "block": 1, "micro": 0, "nbytes": 0, "deps": "0:load[1.0]",
        "issued_us": 0.3, "waited_us": 0.0,
    }  # fmt: skip
    # The compute lane sat idle from the start of the run, the first op's issue.
    assert [(e["name"], e["ts"], e["dur"]) for e in stalls] == [("weights late", 0.0, 0.25), ("issue late", 0.25, 0.05)]
    assert stalls[0]["args"]["waiting"] == "part 0 (prologue) 1:forward[1.0]"
    assert stalls[0]["args"]["blamed"] == "part 0 (prologue) 0:load[1.0]"


def test_a_dep_on_the_part_before_is_named_with_its_part(schedule: Schedule) -> None:
    events = perfetto_trace(schedule, _measured(schedule, 2, ("prologue", "body", "epilogue")))["traceEvents"]
    texts = {e["args"]["op"]: e["args"]["deps"] for e in events if e["ph"] == "X" and e["cat"] != "stall"}
    across = [(i, op) for i, op in enumerate(schedule.epilogue.ops) if op.prev]
    assert across
    for i, op in across:
        deps = texts[f"part 2 (epilogue) {schedule.epilogue.text(i)}"].split(", ")
        before = {f"part 1 (body) {schedule.body.text(d)}" for d, past in enumerate(schedule.body.ops) if past.name in op.prev}
        assert before == {dep for dep in deps if dep.startswith("part 1")}
        assert {schedule.epilogue.text(d) for d in op.deps} == {dep for dep in deps if not dep.startswith("part 1")}


def test_flows_join_ops_of_different_lanes(schedule: Schedule) -> None:
    trace = scheduled(schedule, PARTS, lambda q: 7)
    assert not [e for e in perfetto_trace(schedule, trace)["traceEvents"] if e["ph"] in "sf"]
    events = perfetto_trace(schedule, trace, trace, flows=True)["traceEvents"]
    run = derive(schedule, trace).run
    expected = sum(run.placed[d].op.lane != q.op.lane for q in run.placed for d in q.deps)
    slices = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
    assert len(flows) == 2 * expected > 0
    for pair in flows.values():
        start, finish = pair
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["pid"] == finish["pid"] and start["tid"] != finish["tid"] and start["ts"] < finish["ts"]
        assert {(e["pid"], e["tid"], e["ts"]) for e in pair} <= slices


def test_a_gz_holds_the_same_and_is_reproducible(
    schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = _measured(schedule, 3)
    plain = save_perfetto(tmp_path / "a.json", schedule, trace)
    packed = []
    for name, now in (("a.json.gz", 1e9), ("b.json.gz", 2e9)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        packed.append(save_perfetto(tmp_path / name, schedule, trace))
    assert gzip.decompress(packed[0].read_bytes()) == plain.read_bytes()
    assert packed[0].read_bytes() == packed[1].read_bytes()


@pytest.mark.parametrize("role", ["predicted", "measured"])
def test_a_trace_of_another_schedule_is_refused(schedule: Schedule, role: str) -> None:
    own, foreign = _measured(schedule, 4), _measured(lower(MODEL, schedule.recipe, Plan(chunk_bytes=1024)), 4)
    traces = {"predicted": own, "measured": own} | {role: foreign}
    with pytest.raises(ForeignTrace, match=role):
        perfetto_trace(schedule, traces["predicted"], traces["measured"])
