"""Traces for tests: made by hand from a readable table, or by a small list scheduler from random durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, Op, Part, PlacedOp, Schedule, place
from megatrain.trace import Event, Trace

MODEL = ModelSpec.from_config(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 67, "hidden_size": 8,
        "intermediate_size": 19, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """An op of a hand-made timeline; `deps` are names of rows above it."""

    op: Op
    deps: tuple[str, ...]
    start_ns: int
    end_ns: int


def row(op: Op, start_ns: int, end_ns: int, *deps: str) -> Row:
    return Row(op=op, deps=deps, start_ns=start_ns, end_ns=end_ns)


def timeline(*rows: Row) -> tuple[Schedule, Trace]:
    """A schedule with one part of these ops, and the trace that says they ran at these times."""
    names = [r.op.name for r in rows]
    ops = tuple(
        Op(kind=r.op.kind, lane=r.op.lane, block=r.op.block, micro=r.op.micro, chunk=r.op.chunk, what=r.op.what,
           deps=tuple(names.index(d) for d in r.deps))
        for r in rows
    )  # fmt: skip
    schedule = Schedule(
        model=MODEL, recipe=Recipe(seq_len=4), plan=Plan(), mode="train", storages=(),
        prologue=Part(name="prologue", ops=ops), body=Part(name="body", ops=()), epilogue=Part(name="epilogue", ops=()),
    )  # fmt: skip
    events = tuple(Event(0, i, r.start_ns, r.start_ns, r.end_ns) for i, r in enumerate(rows))
    return schedule, Trace(
        source="null", parts=("prologue",), digests=(schedule.digests()["prologue"],), events=events
    )


def scheduled(
    schedule: Schedule,
    parts: Sequence[str],
    duration_ns: Callable[[PlacedOp], int],
    delay_ns: Callable[[PlacedOp], int] = lambda q: 0,
    *,
    origin_ns: int = 0,
) -> Trace:
    """A valid trace of these parts: each op starts `delay_ns` after its lane is free and its deps have ended."""
    named = {part.name: part for part in (schedule.prologue, schedule.body, schedule.epilogue)}
    barriers = [p > 0 and name == "prologue" for p, name in enumerate(parts)]
    free = dict.fromkeys(LANES, origin_ns)
    ends: list[int] = []
    events = []
    for q in place([named[name] for name in parts], barrier_before=barriers):
        issued = free[q.op.lane]
        start = max([issued, *(ends[d] for d in q.deps)]) + delay_ns(q)
        ends.append(start + duration_ns(q))
        free[q.op.lane] = ends[-1]
        part, index, *_ = q
        events.append(Event(part, index, issued, start, ends[-1]))
    digests = schedule.digests()
    return Trace(source="sim", parts=tuple(parts), digests=tuple(digests[name] for name in parts), events=tuple(events))
