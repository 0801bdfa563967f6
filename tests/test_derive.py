"""Stalls, blame, overlap and critical path: hand-made timelines for each cause, then what holds for every valid trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.derive import (
    CAUSES,
    Cause,
    Facts,
    Piece,
    Stall,
    by_cause,
    critical_path,
    derive,
    join,
    overlap,
    settled,
    stalls,
    step_time,
    step_times,
)  # fmt: skip
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, Op, Part, PlacedOp, Schedule, lower, lower_evaluation
from megatrain.trace import Event, Trace
from tests.strategies import cases
from tests.timelines import MODEL, Row, row, scheduled, timeline

# Ops of the hand-made timelines.
INPUT = Op(kind="input", lane="h2d", micro=0)
LOAD, LOAD_0, LOAD_1 = (Op(kind="load", lane="h2d", block=1, chunk=c) for c in (None, 0, 1))
LOAD_CONSTANTS = Op(kind="load", lane="h2d", what="constants")
EARLIER, FORWARD = (Op(kind="forward", lane="compute", block=b, micro=0) for b in (0, 1))
BACKWARD = Op(kind="backward", lane="compute", block=2, micro=0)
PACK, PACK_2 = Op(kind="pack", lane="compute", block=1), Op(kind="pack", lane="compute", block=2)
SAVE, SAVE_2 = Op(kind="save", lane="d2h", block=1), Op(kind="save", lane="d2h", block=2)
SAVE_NORM = Op(kind="save", lane="d2h", what="norm")
CLIP = Op(kind="clip", lane="cpu")
UPDATE, UPDATE_2 = (Op(kind="update", lane="cpu", block=b) for b in (1, 2))
GPU_UPDATE = Op(kind="update", lane="compute", block=1)


def blames(*rows: Row, lane: str = "compute") -> list[tuple[str, str, int, int]]:
    """(cause, op, start, stop) of all stalls of the lane, in order of time."""
    run = join(*timeline(*rows))
    names = [q.op.name for q in run.placed]
    found: list[tuple[str, str, int, int]] = []
    for gap in stalls(run, next(x for x in LANES if x == lane)):
        found += [(cause, names[p.position], p.start_ns, p.stop_ns) for cause, p in gap.blames]
    return found


# ---- one timeline a cause --------------------------------------------------------------------------------------------


def test_weights_late() -> None:
    """The link was busy with the block before: its time in the gap is late weights too."""
    assert blames(
        row(EARLIER, 0, 10),
        row(LOAD_0, 0, 30),
        row(LOAD_1, 30, 50),
        row(FORWARD, 50, 60, "load[1.1]"),
    ) == [("weights late", "load[1.0]", 10, 30), ("weights late", "load[1.1]", 30, 50)]


def test_update_late_behind_a_load() -> None:
    """The load waited for the update: the update's time is its own, and only the copy's time is the link's."""
    rows = [
        row(EARLIER, 0, 10),
        row(UPDATE, 0, 90),
        row(LOAD, 90, 100, "update[1]"),
        row(FORWARD, 100, 110, "load[1]"),
    ]
    assert blames(*rows) == [("update late", "update[1]", 10, 90), ("weights late", "load[1]", 90, 100)]
    assert stalls(join(*timeline(*rows)))[0].cause == "update late"


def test_a_load_that_queues_behind_another_does_not_blame_its_update() -> None:
    """The update ended before the link was free: it delayed nothing."""
    assert blames(
        row(EARLIER, 0, 10),
        row(UPDATE, 0, 20),
        row(LOAD_0, 0, 30),
        row(LOAD_1, 30, 50, "update[1]"),
        row(FORWARD, 50, 60, "load[1.1]"),
    ) == [("weights late", "load[1.0]", 10, 30), ("weights late", "load[1.1]", 30, 50)]


def test_update_late_directly() -> None:
    assert blames(row(EARLIER, 0, 10), row(UPDATE, 0, 25), row(FORWARD, 25, 30, "update[1]")) == [
        ("update late", "update[1]", 10, 25)
    ]


def test_gradient_slot_busy() -> None:
    """A pack waits for the save that empties its slot."""
    assert blames(
        row(PACK_2, 0, 10),
        row(SAVE_2, 10, 70, "pack[2]"),
        row(BACKWARD, 10, 20),
        row(PACK, 70, 75, "save[2]"),
    ) == [("gradient slot busy", "save[2]", 20, 70)]


def test_gradient_slot_busy_because_an_update_holds_the_host_slot() -> None:
    assert blames(
        row(BACKWARD, 0, 10),
        row(UPDATE_2, 0, 60),
        row(SAVE_2, 60, 70, "update[2]"),
        row(PACK, 70, 75, "save[2]"),
    ) == [("gradient slot busy", "update[2]", 10, 60), ("gradient slot busy", "save[2]", 60, 70)]


def test_input_late() -> None:
    """Both its copy and the time in which it could have been copied."""
    assert blames(
        row(EARLIER, 0, 10),
        row(LOAD, 0, 5),
        row(INPUT, 40, 45),
        row(FORWARD, 45, 50, "input[0]", "load[1]"),
    ) == [("input late", "input[0]", 10, 40), ("input late", "input[0]", 40, 45)]


def test_issue_late() -> None:
    """The remainder of a gap after the release; the same of an op further back."""
    assert blames(
        row(EARLIER, 0, 10),
        row(UPDATE, 0, 20),
        row(LOAD, 23, 30, "update[1]"),
        row(FORWARD, 32, 40, "load[1]"),
    ) == [
        ("update late", "update[1]", 10, 20),
        ("issue late", "load[1]", 20, 23),
        ("weights late", "load[1]", 23, 30),
        ("issue late", "forward[1.0]", 30, 32),
    ]


def test_issue_late_alone() -> None:
    assert blames(row(LOAD, 0, 5), row(EARLIER, 0, 10), row(FORWARD, 17, 20, "load[1]")) == [
        ("issue late", "forward[1.0]", 10, 17)
    ]


def test_step_boundary() -> None:
    """The wait for the norm holds all that the norm waits for; what then waits for the norm is late itself."""
    assert blames(
        row(PACK, 0, 10),
        row(SAVE, 10, 30, "pack[1]"),
        row(SAVE_NORM, 30, 32, "pack[1]"),
        row(CLIP, 32, 40, "save[norm]"),
        row(UPDATE, 40, 60, "save[1]"),
        row(LOAD, 60, 65, "update[1]"),
        row(FORWARD, 65, 70, "load[1]"),
    ) == [
        ("step boundary", "save[1]", 10, 30),
        ("step boundary", "save[norm]", 30, 32),
        ("step boundary", "clip", 32, 40),
        ("update late", "update[1]", 40, 60),
        ("weights late", "load[1]", 60, 65),
    ]


def test_step_boundary_of_an_update_on_the_device() -> None:
    assert blames(
        row(PACK, 0, 10),
        row(SAVE_NORM, 10, 12, "pack[1]"),
        row(CLIP, 12, 20, "save[norm]"),
        row(LOAD_CONSTANTS, 20, 21, "clip"),
        row(GPU_UPDATE, 21, 30, "load[constants]"),
    ) == [
        ("step boundary", "save[norm]", 10, 12),
        ("step boundary", "clip", 12, 20),
        ("step boundary", "load[constants]", 20, 21),
    ]


def test_a_gradient_on_its_way_to_a_late_update_is_no_busy_slot() -> None:
    """Updates during backward: at the boundary the first block's gradient goes down, is used, and its weights come up."""
    assert blames(
        row(PACK, 0, 10),
        row(SAVE, 10, 20, "pack[1]"),
        row(UPDATE, 20, 40, "save[1]"),
        row(LOAD, 40, 50, "update[1]"),
        row(FORWARD, 50, 60, "load[1]"),
    ) == [
        ("update late", "save[1]", 10, 20),
        ("update late", "update[1]", 20, 40),
        ("weights late", "load[1]", 40, 50),
    ]


def test_the_wait_for_the_first_op_is_a_stall() -> None:
    assert blames(row(INPUT, 2, 4), row(LOAD, 4, 9), row(FORWARD, 9, 12, "load[1]")) == [
        ("input late", "input[0]", 2, 4),
        ("weights late", "load[1]", 4, 9),
    ]


def test_stalls_of_the_other_lanes() -> None:
    rows = [
        row(LOAD_0, 0, 10),
        row(EARLIER, 10, 40, "load[1.0]"),
        row(LOAD_1, 40, 50, "forward[0.0]"),
        row(PACK, 40, 60),
        row(SAVE, 60, 75, "pack[1]"),
        row(UPDATE, 75, 80, "save[1]"),
    ]
    assert blames(*rows, lane="h2d") == [("compute busy", "forward[0.0]", 10, 40)]
    assert blames(*rows, lane="d2h") == [
        ("weights late", "load[1.0]", 0, 10),
        ("compute busy", "forward[0.0]", 10, 40),
        ("compute busy", "pack[1]", 40, 60),
    ]
    assert blames(*rows, lane="cpu")[-2:] == [("compute busy", "pack[1]", 40, 60), ("gradients late", "save[1]", 60, 75)]


def test_the_cpu_waits_for_a_pack_that_waits_for_a_slot() -> None:
    assert blames(
        row(UPDATE_2, 0, 5),
        row(PACK_2, 0, 10),
        row(SAVE_2, 10, 30, "pack[2]"),
        row(PACK, 30, 40, "save[2]"),
        row(SAVE, 40, 50, "pack[1]"),
        row(UPDATE, 50, 60, "save[1]"),
        lane="cpu",
    ) == [
        ("compute busy", "pack[2]", 5, 10),
        ("gradient slot busy", "save[2]", 10, 30),
        ("compute busy", "pack[1]", 30, 40),
        ("gradients late", "save[1]", 40, 50),
    ]


def test_of_two_that_ended_together_a_dep_released_the_op_and_the_later_dep() -> None:
    rows = [
        row(EARLIER, 0, 10),
        row(SAVE, 0, 10),
        row(UPDATE, 0, 10),
        row(LOAD, 10, 10),
        row(FORWARD, 10, 20, "save[1]", "update[1]"),
    ]
    assert join(*timeline(*rows)).released_by(4) == 2
    rows[4] = row(FORWARD, 10, 20)
    assert join(*timeline(*rows)).released_by(4) == 0
    assert join(*timeline(*rows)).released_by(0) == -1


def test_an_op_of_no_duration_still_links_the_chain() -> None:
    assert blames(
        row(PACK, 0, 10),
        row(SAVE_NORM, 10, 30, "pack[1]"),
        row(CLIP, 30, 30, "save[norm]"),
        row(UPDATE, 30, 40, "clip"),
        row(FORWARD, 40, 50, "update[1]"),
    ) == [("step boundary", "save[norm]", 10, 30), ("update late", "update[1]", 30, 40)]


# ---- totals by hand --------------------------------------------------------------------------------------------------


def test_totals_of_a_small_timeline() -> None:
    schedule, trace = timeline(
        row(LOAD_0, 0, 10),
        row(LOAD_1, 20, 50),
        row(EARLIER, 10, 30, "load[1.0]"),
        row(FORWARD, 50, 60, "load[1.1]"),
        row(SAVE, 60, 65, "forward[1.0]"),
    )
    facts = derive(schedule, trace)
    compute = facts.lanes["compute"]
    assert (compute.busy_ns, compute.stalled_ns, compute.tail_ns, compute.idle_ns) == (30, 30, 5, 35)
    assert compute.utilisation == 30 / 65
    assert facts.overlap["h2d"] == (40, 10) and facts.overlap["h2d"].fraction == 0.25
    assert facts.overlap["d2h"] == (5, 0)
    names = [q.op.name for q in facts.run.placed]
    assert [(names[p.position], p.start_ns, p.stop_ns, p.ran) for p in facts.critical_path] == [
        ("load[1.0]", 0, 10, True),
        ("load[1.1]", 10, 20, False),
        ("load[1.1]", 20, 50, True),
        ("forward[1.0]", 50, 60, True),
        ("save[1]", 60, 65, True),
    ]


def test_a_lane_that_copied_nothing_is_fully_overlapped() -> None:
    run = join(*timeline(row(EARLIER, 0, 10)))
    assert overlap(run, "h2d").fraction == 1.0


def test_bytes_are_those_the_copies_move() -> None:
    schedule = lower(MODEL, Recipe(seq_len=4), Plan(chunk_bytes=512))
    facts = derive(schedule, scheduled(schedule, ["prologue", "epilogue"], lambda q: 1))
    gradients = sum(2 * b.span for b in MODEL.blocks)
    others = sum(op.nbytes for op in schedule.prologue.ops if op.kind == "save" and op.what in ("loss", "norm"))
    assert facts.lanes["d2h"].nbytes == gradients + others


# ---- step times ------------------------------------------------------------------------------------------------------


def test_step_times_are_differences_of_the_last_compute_ends() -> None:
    """Only compute takes time here, 7 ns an op: a step lasts 7 ns times its compute ops, whatever lies between steps."""
    schedule = lower(MODEL, Recipe(seq_len=4), Plan(placement={"default": "resident"}))
    parts = ["prologue", "body", "body", "epilogue", "prologue", "body"]
    trace = scheduled(schedule, parts, lambda q: 7 if q.op.lane == "compute" else 0)

    def compute_ns(part: Part) -> int:
        return 7 * sum(op.lane == "compute" for op in part.ops)

    body = compute_ns(schedule.body)
    assert step_times(schedule, trace) == {1: body, 2: body, 4: body}
    facts = derive(schedule, trace)
    assert (facts.timed_steps, facts.step_times_ns) == ((1, 2, 4), (body,) * 3)
    assert step_time(schedule, trace) == settled(facts.step_times_ns) == (body, 0.0)


def test_what_a_flush_takes_is_in_no_step() -> None:
    schedule = lower(MODEL, Recipe(seq_len=4), Plan())
    parts = ["prologue", "body", "epilogue", "prologue", "body", "body"]

    def after_the_flush(delay: int) -> Trace:
        return scheduled(schedule, parts, lambda q: 5, lambda q: delay if q.part == 3 and q.op.kind == "input" else 0)

    assert step_times(schedule, after_the_flush(0)) == step_times(schedule, after_the_flush(10**9))
    assert list(step_times(schedule, after_the_flush(0))) == [1, 3, 4]
    with pytest.raises(ValueError, match="two steps in a row"):
        step_time(schedule, scheduled(schedule, ["prologue", "epilogue", "prologue"], lambda q: 5))


def test_settled_step_time_is_the_mean_of_the_last_six_or_the_later_half() -> None:
    times = [900, 900, 900, 900, 900, 100, 100, 100, 100, 100, 106]  # of 12 steps
    mean, spread = settled(times)
    assert mean == 101
    assert spread == pytest.approx(6 / 101)
    assert settled([5]) == (5, 0.0)
    assert settled([900] * 20 + [10, 11, 12, 10, 11, 12]) == (11, pytest.approx(2 / 11))
    assert settled([900, 900, 10, 20]) == (15, pytest.approx(10 / 15))
    with pytest.raises(ValueError, match="no two ran"):
        settled([])


# ---- every valid trace -----------------------------------------------------------------------------------------------

SEQUENCES = (
    ("prologue", "epilogue"),
    ("prologue", "body", "body", "epilogue"),
    ("prologue", "body", "epilogue", "prologue", "body"),
)


@st.composite
def traced(draw: st.DrawFn) -> tuple[Schedule, Trace]:
    schedule = lower(*draw(cases(layers=(2, 3))))
    rng = random.Random(draw(st.integers(0, 2**32)))
    slow = {lane: rng.choice((1, 1, 5, 20)) for lane in LANES}
    late = rng.choice((0.0, 0.0, 0.2))
    trace = scheduled(
        schedule,
        draw(st.sampled_from(SEQUENCES)),
        lambda q: rng.randrange(0, 50) * slow[q.op.lane],
        lambda q: rng.randrange(1, 99) if rng.random() < late else 0,
        origin_ns=rng.choice((0, 1000)),
    )
    return schedule, trace


@settings(max_examples=60, deadline=None)
@given(traced())
def test_what_holds_for_every_trace(case: tuple[Schedule, Trace]) -> None:
    facts = derive(*case)
    run = facts.run
    length = run.end_ns - run.begin_ns
    for lane, use in facts.lanes.items():
        assert use.busy_ns + use.stalled_ns + use.tail_ns == length
        assert min(use.busy_ns, use.stalled_ns, use.tail_ns) >= 0
        assert 0 <= use.utilisation <= 1
        gaps = facts.stalls[lane]
        assert sum(by_cause(gaps).values()) == use.stalled_ns
        for gap in gaps:
            _tiles([p for _, p in gap.blames], gap.start_ns, gap.stop_ns)
    for lane, over in facts.overlap.items():
        assert over.busy_ns == facts.lanes[lane].busy_ns
        assert over.under_compute_ns == _overlap_by_pairs(facts, lane)
        assert 0 <= over.under_compute_ns <= min(over.busy_ns, facts.lanes["compute"].busy_ns)
        assert 0 <= over.fraction <= 1
    _tiles(list(facts.critical_path), run.begin_ns, run.end_ns)


def _tiles(pieces: Sequence[Piece], start_ns: int, stop_ns: int) -> None:
    """Each piece starts where the one before it stopped, from start to stop."""
    at = start_ns
    for piece in pieces:
        assert piece.start_ns == at <= piece.stop_ns
        at = piece.stop_ns
    assert at == stop_ns


def _overlap_by_pairs(facts: Facts, lane: str) -> int:
    events, lanes = facts.run.events, facts.run.lanes
    mine = [events[i] for i in lanes[next(x for x in LANES if x == lane)]]
    return sum(
        max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a in mine for b in [events[i] for i in lanes["compute"]]
    )


@settings(max_examples=60, deadline=None)
@given(traced())
def test_blame_of_the_compute_lane_uses_its_six_causes_and_names_an_op_that_explains_them(case: tuple[Schedule, Trace]) -> None:
    facts = derive(*case)
    events = facts.run.events
    boundary = {"step boundary", "update late", "gradient slot busy"}
    allowed: dict[str, set[str]] = {
        "load": {"weights late", "step boundary", "update late", "gradient slot busy"},
        "input": {"input late"} | boundary,
        "stash": {"activations late"} | boundary, "fetch": {"activations late"} | boundary,
        "update": boundary, "save": boundary, "clip": boundary, "constants": boundary, "report": boundary,
    }  # fmt: skip
    for gap in facts.stalls["compute"]:
        for cause, piece in gap.blames:
            op, event = facts.run.placed[piece.position].op, events[piece.position]
            assert piece.ns > 0 and cause not in ("compute busy", "gradients late")
            if piece.ran:
                assert event.start_ns <= piece.start_ns and piece.stop_ns <= event.end_ns
                assert cause in allowed[op.kind]
            else:
                assert cause == ("input late" if op.kind == "input" else "issue late")
                assert piece.stop_ns == event.start_ns


@settings(max_examples=40, deadline=None)
@given(traced())
def test_the_critical_path_is_what_bounds_the_run(case: tuple[Schedule, Trace]) -> None:
    """Shortening ops off the path cannot end the run earlier; without delays the path is the longest one."""
    schedule, trace = case
    path = critical_path(join(schedule, trace))
    on_path = {p.position for p in path}
    events = join(schedule, trace).events
    position = {(part, index): n for n, (part, index, *_) in enumerate(events)}
    late = {p.position: p.ns for p in path if not p.ran}

    def duration(q: PlacedOp) -> int:
        part, index, *_ = q
        n = position[part, index]
        return events[n].end_ns - events[n].start_ns if n in on_path else 0

    def delay(q: PlacedOp) -> int:
        part, index, *_ = q
        return late.get(position[part, index], 0)

    begin = min(e.issued_ns for e in events)
    again = scheduled(schedule, trace.parts, duration, delay, origin_ns=begin)
    assert max(e.end_ns for e in again.events) == max(e.end_ns for e in events)


@settings(max_examples=20, deadline=None)
@given(cases(layers=(2, 3)))
def test_resident_training_never_waits_for_weights(case: tuple[ModelSpec, Recipe, Plan]) -> None:
    model, recipe, plan = case
    schedule = lower(model, recipe, replace(plan, placement={"default": "resident"}))
    facts = derive(schedule, scheduled(schedule, ["prologue", "body", "epilogue"], lambda q: 10))
    found = {cause for cause, ns in by_cause(facts.stalls["compute"]).items() if ns}
    assert found <= {"input late", "step boundary", "gradient slot busy"}


def _only_slow(kinds: Sequence[str], plan: Plan, *, clip: float | None = 1.0) -> dict[Cause, int]:
    schedule = lower(MODEL, Recipe(seq_len=4, clip_norm=clip), plan)
    trace = scheduled(schedule, ["prologue", "body", "body", "epilogue"], lambda q: 1000 if q.op.kind in kinds else 1)
    return by_cause(derive(schedule, trace).stalls["compute"])


@pytest.mark.parametrize(
    ("slow", "plan", "clip", "cause"),
    [
        ("load", Plan(update="next_forward"), 1.0, "weights late"),
        ("update", Plan(update="next_forward"), 1.0, "update late"),
        ("update", Plan(update="after"), 1.0, "update late"),
        ("save", Plan(update="during_backward", gradient_slots=1), None, "gradient slot busy"),
        ("input", Plan(placement={"default": "resident"}), 1.0, "input late"),
        ("clip", Plan(update="next_forward"), 1.0, "step boundary"),
    ],
)
def test_in_a_real_schedule_the_slow_kind_is_the_cause(slow: str, plan: Plan, clip: float | None, cause: Cause) -> None:
    shares = _only_slow([slow], plan, clip=clip)
    assert max(CAUSES, key=lambda c: shares[c]) == cause
    assert shares[cause] > 0.5 * sum(shares.values())


def test_evaluation_runs_are_derived_too() -> None:
    schedule = lower_evaluation(MODEL, Recipe(seq_len=4), Plan())
    trace = scheduled(schedule, ["prologue", "prologue"], lambda q: 5)
    facts = derive(schedule, trace)
    assert facts.step_times_ns == ()
    first = [e for e in trace.events if e.part == 1]
    assert min(e.start_ns for e in first) >= max(e.end_ns for e in trace.events if e.part == 0)


def test_an_empty_trace_has_no_figures() -> None:
    schedule = lower(MODEL, Recipe(seq_len=4), Plan())
    facts = derive(schedule, Trace(source="null", parts=(), digests=(), events=()))
    assert facts.critical_path == () and facts.step_times_ns == ()
    assert all(use.utilisation == 0 for use in facts.lanes.values())


# ---- traces that are none --------------------------------------------------------------------------------------------


def _trace() -> tuple[Schedule, Trace]:
    schedule = lower(MODEL, Recipe(seq_len=4), Plan())
    return schedule, scheduled(schedule, ["prologue", "body", "epilogue"], lambda q: 10)


def test_a_missing_event_is_named() -> None:
    schedule, trace = _trace()
    n = next(n for n, e in enumerate(trace.events) if e.part == 1)
    with pytest.raises(ValueError, match=r"part 1 \(body\) 0:input\[0\]: no event \(1 of"):
        derive(schedule, replace(trace, events=trace.events[:n] + trace.events[n + 1 :]))


def test_a_second_event_is_named() -> None:
    schedule, trace = _trace()
    with pytest.raises(ValueError, match=r"part 0 \(prologue\) 0:input\[0\]: two events"):
        derive(schedule, replace(trace, events=(*trace.events, trace.events[0])))


@pytest.mark.parametrize(("part", "index"), [(0, 10_000), (3, 0), (-1, 0), (0, -1)])
def test_an_event_of_no_op(part: int, index: int) -> None:
    schedule, trace = _trace()
    with pytest.raises(ValueError, match=rf"event of part {part}, op {index}: no such op"):
        derive(schedule, replace(trace, events=(*trace.events, Event(part, index, 0, 0, 0))))


def test_events_may_come_in_any_order() -> None:
    schedule, trace = _trace()
    assert join(schedule, replace(trace, events=trace.events[::-1])) == join(schedule, trace)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("warmup",), "part 0 is 'warmup', the schedule has prologue, body, epilogue"),
        (("body",), "part 0 is 'body', which cannot follow nothing"),
        (("prologue", "epilogue", "body"), "part 2 is 'body', which cannot follow epilogue"),
        (("prologue", "prologue"), "part 1 is 'prologue', which cannot follow prologue"),
        (("prologue", "epilogue", "epilogue"), "part 2 is 'epilogue', which cannot follow epilogue"),
    ],
)
def test_parts_that_cannot_follow_each_other(parts: tuple[str, ...], message: str) -> None:
    schedule, _ = _trace()
    with pytest.raises(ValueError, match=message):
        join(schedule, Trace(source="cpu", parts=parts, digests=("",) * len(parts), events=()))


def test_an_empty_epilogue_may_be_left_out() -> None:
    """Where nothing is pending after a step, the next prologue may follow it; it still starts after everything has ended."""
    schedule = lower(MODEL, Recipe(seq_len=4), Plan(update="after"))
    trace = scheduled(schedule, ["prologue", "body", "prologue"], lambda q: 10)
    ended = max(e.end_ns for e in trace.events if e.part < 2)
    assert all(e.start_ns >= ended for e in trace.events if e.part == 2)
    join(schedule, trace)
    early = [replace_event(e, shift=-1) if e.part == 2 else e for e in trace.events]
    with pytest.raises(ValueError, match=r"part 2 \(prologue\) 0:input\[0\]: starts at \d+ ns, before its dep"):
        join(schedule, replace(trace, events=tuple(early)))


def replace_event(event: Event, *, shift: int) -> Event:
    part, index, issued, start, end = event
    return Event(part, index, min(issued, start + shift), start + shift, end + shift)


def test_times_out_of_order_are_named() -> None:
    for bad in (Event(0, 0, 5, 4, 6), Event(0, 0, 1, 4, 3)):
        schedule, trace = _trace()
        with pytest.raises(ValueError, match=r"part 0 \(prologue\) 0:input\[0\]: issued .* not in this order"):
            join(schedule, replace(trace, events=(bad, *trace.events[1:])))


def test_an_op_before_its_dep_or_its_lane_is_named() -> None:
    """Every op of a tight trace that starts after 0 breaks one or the other when it starts 1 ns earlier."""
    schedule, trace = _trace()
    for n, event in enumerate(trace.events):
        if event.start_ns > 0:
            events = (*trace.events[:n], replace_event(event, shift=-1), *trace.events[n + 1 :])
            part, index, *_ = event
            text = (schedule.prologue, schedule.body, schedule.epilogue)[part].text(index)
            with pytest.raises(ValueError) as caught:
                join(schedule, replace(trace, events=events))
            assert f"{text}: starts at {event.start_ns - 1} ns, before " in str(caught.value)
            assert f"ends at {event.start_ns} ns" in str(caught.value)


def test_cause_of_a_gap_is_its_largest_share() -> None:
    def gap(*shares: tuple[int, int]) -> Stall:
        rows = [
            row(EARLIER, 0, 10), row(UPDATE, 0, shares[0][1]), row(LOAD, *shares[1], "update[1]"),
            row(FORWARD, shares[1][1], 200, "load[1]"),
        ]  # fmt: skip
        (found,) = stalls(join(*timeline(*rows)))
        return found

    assert gap((10, 50), (50, 60)).cause == "update late"
    assert gap((10, 20), (20, 60)).cause == "weights late"
    assert gap((10, 20), (20, 30)).cause == "weights late"  # a tie: the nearer one
