"""Compare: the figures of both traces side by side, and no comparison with a trace of anything else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from analysis.compare import ForeignTrace, common, compare, refuse_foreign
from megatrain.derive import by_cause, derive
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import LANES, Access, Part, PlacedOp, Schedule, lower
from megatrain.schedule.nouns import part_digest, ran_line
from megatrain.trace import Trace
from tests.timelines import MODEL, scheduled

PARTS = ("prologue", "body", "body", "body", "epilogue")


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return lower(MODEL, Recipe(seq_len=4, micro_batches=2), Plan(chunk_bytes=512, placement={"head": "resident"}))


def _durations(seed: int, scale: int = 1) -> Callable[[PlacedOp], int]:
    rng = random.Random(seed)
    return lambda q: scale * rng.randrange(1, 1000)


def _predicted(schedule: Schedule) -> Trace:
    return scheduled(schedule, PARTS, _durations(1))


def _measured(schedule: Schedule) -> Trace:
    return replace(scheduled(schedule, PARTS, _durations(2)), source="cpu")


def test_a_trace_equals_itself(schedule: Schedule) -> None:
    trace = _predicted(schedule)
    found = compare(schedule, trace, trace)
    for table in (found.ops, found.parts, found.lanes, found.kinds, found.steps):
        assert (table["ratio"].dropna() == 1).all()
    assert found.step_time()["ratio"].item() == 1
    assert (found.stalls["difference_ns"] == 0).all()


def test_a_machine_three_times_slower_has_ratio_three_everywhere(schedule: Schedule) -> None:
    found = compare(schedule, _predicted(schedule), scheduled(schedule, PARTS, _durations(1, scale=3)))
    for table in (found.ops, found.parts, found.lanes, found.kinds, found.steps):
        assert (table["ratio"].dropna() == 3).all()
    assert found.step_time()["ratio"].item() == pytest.approx(3, rel=1e-3)  # of means rounded to ns
    assert (found.stalls["measured_ns"] == 3 * found.stalls["predicted_ns"]).all()


def test_tables_hold_what_the_traces_say(schedule: Schedule) -> None:
    predicted, measured = _predicted(schedule), _measured(schedule)
    found = compare(schedule, predicted, measured)
    facts = {"predicted": derive(schedule, predicted), "measured": derive(schedule, measured)}
    assert len(found.ops) == len(predicted.events)
    for name, trace in (("predicted", predicted), ("measured", measured)):
        assert list(found.ops[f"{name}_issued_ns"]) == [e.issued_ns for e in trace.events]
        assert list(found.ops[f"{name}_start_ns"]) == [e.start_ns for e in trace.events]
        assert list(found.ops[f"{name}_end_ns"]) == [e.end_ns for e in trace.events]
        total = sum(e.end_ns - e.start_ns for e in trace.events)
        assert found.ops[f"{name}_duration_ns"].sum() == total
        assert found.kinds[f"{name}_duration_ns"].sum() == total
        assert found.lanes[f"{name}_busy_ns"].sum() == total
        assert (found.parts[f"{name}_duration_ns"] * found.parts["runs"]).sum() == pytest.approx(total)
        assert list(found.steps[f"{name}_ns"]) == list(facts[name].step_times_ns)
        by = by_cause(facts[name].stalls["compute"])
        assert dict(zip(found.stalls["cause"], found.stalls[f"{name}_ns"], strict=True)) == by
        assert found.worst_stalls()[f"{name}_ns"].sum() == sum(by.values())
        for lane in LANES:
            shown = found.lanes.set_index("lane").loc[lane]
            use = facts[name].lanes[lane]
            assert (shown["ops"], shown["nbytes"]) == (use.ops, use.nbytes)
            assert shown[f"{name}_idle_ns"] == use.idle_ns
            assert shown[f"{name}_utilisation"] == use.utilisation


def test_repeated_bodies_are_averaged(schedule: Schedule) -> None:
    """The third body takes 3 ns an op, the others 1 ns: the mean of three is 5/3."""
    slow = scheduled(schedule, PARTS, lambda q: 3 if q.part == 3 else 1)
    parts = compare(schedule, scheduled(schedule, PARTS, lambda q: 1), slow).parts
    body = parts[parts["part_name"] == "body"]
    assert len(body) == len(schedule.body.ops)
    assert (body["runs"] == 3).all()
    assert body["ratio"].tolist() == pytest.approx([5 / 3] * len(body))
    assert (parts[parts["part_name"] != "body"]["ratio"] == 1).all()


def test_an_op_predicted_to_take_no_time_has_no_ratio(schedule: Schedule) -> None:
    free = scheduled(schedule, PARTS, lambda q: 0 if q.op.kind == "clip" else 5)
    ops = compare(schedule, free, _measured(schedule)).ops
    assert (ops["ratio"].isna() == (ops["kind"] == "clip")).all()


def test_the_op_that_was_missed_by_most_comes_first(schedule: Schedule) -> None:
    slow = scheduled(schedule, PARTS, lambda q: 5000 if q.op.name == "forward[2.1]" and q.part else 10)
    found = compare(schedule, scheduled(schedule, PARTS, lambda q: 10), slow)
    first = found.worst_ops().iloc[0]
    assert (first["part_name"], first["name"], first["missed_ns"]) == ("body", "forward[2.1]", 3 * 4990)


def test_the_text_names_sources_causes_and_ops(schedule: Schedule) -> None:
    text = compare(schedule, _predicted(schedule), _measured(schedule)).to_text(rows=3)
    assert text.startswith("predicted: sim    measured: cpu")
    for word in ("Step time", "Lanes", "weights late", "update late", "step boundary", "more rows", "part 1 (body)"):
        assert word in text
    assert "compute busy" not in text  # no cause of the compute lane
    assert max(map(len, text.splitlines())) <= 130


def test_a_run_of_one_step_has_no_step_time(schedule: Schedule) -> None:
    trace = scheduled(schedule, ("prologue", "epilogue"), _durations(1))
    found = compare(schedule, trace, trace)
    assert found.steps.empty and found.step_time().empty
    assert "Step time" not in found.to_text()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_numbers_of_steps_that_differ_are_refused(schedule: Schedule) -> None:
    short = scheduled(schedule, ("prologue", "body", "epilogue"), _durations(1))
    with pytest.raises(ForeignTrace, match=r"ran prologue, body, epilogue, the measured prologue, 3 x body, epilogue: only"):
        compare(schedule, short, _measured(schedule))


def test_an_incomplete_trace_is_refused(schedule: Schedule) -> None:
    measured = _measured(schedule)
    with pytest.raises(ValueError, match="no event"):
        compare(schedule, _predicted(schedule), replace(measured, events=measured.events[:-1]))


def test_a_part_of_no_schedule_is_refused(schedule: Schedule) -> None:
    foreign = Trace(source="cpu", parts=("warmup",), digests=("0",), events=())
    with pytest.raises(ForeignTrace, match="part 0 is 'warmup', the schedule has prologue, body, epilogue"):
        compare(schedule, _predicted(schedule), foreign)


@pytest.mark.parametrize(
    "other",
    [
        Plan(chunk_bytes=1024, placement={"head": "resident"}),
        Plan(chunk_bytes=512, placement={"head": "resident"}, weight_slots=3),
        Plan(chunk_bytes=512, placement={"head": "resident"}, update="after"),
    ],
)
@pytest.mark.parametrize("role", ["predicted", "measured"])
def test_a_trace_of_another_plan_is_refused(schedule: Schedule, other: Plan, role: str) -> None:
    """Even where, as with another number of slots, the ops and their number are the same."""
    foreign = scheduled(lower(MODEL, schedule.recipe, other), PARTS, _durations(1))
    traces = {"predicted": _predicted(schedule), "measured": _measured(schedule)} | {role: foreign}
    with pytest.raises(ForeignTrace, match=role):
        compare(schedule, traces["predicted"], traces["measured"])


Lines = dict[str, list[str]]


def _swapped(schedule: Schedule, part: Part, lane: str) -> Lines:
    """The lane ran its middle op before the one in front of it."""
    lines = schedule.lane_lines(part)
    middle = len(lines[lane]) // 2
    lines[lane][middle - 1 : middle + 1] = lines[lane][middle - 1 : middle + 1][::-1]
    return lines


def _dropped(schedule: Schedule, part: Part, lane: str) -> Lines:
    lines = schedule.lane_lines(part)
    del lines[lane][len(lines[lane]) // 2]
    return lines


def _on_another_lane(schedule: Schedule, part: Part, lane: str) -> Lines:
    lines = schedule.lane_lines(part)
    lines[LANES[(LANES.index(lane) + 1) % len(LANES)]].append(lines[lane].pop())
    return lines


def _rerun(
    schedule: Schedule, part: Part, lane: str, *, slot: str | None = None, shift: int = 0, short: int = 0, unwaited: int = 0
) -> Lines:
    """The lane's middle op wrote to another storage, or elsewhere in it, or fewer bytes, or did not wait for a dep."""
    lines = schedule.lane_lines(part)
    ops = [op for op in part.ops if op.lane == lane and op.writes and (op.deps or op.prev)]
    op = ops[len(ops) // 2]

    def ranges(accesses: tuple[Access, ...]) -> list[tuple[str, int, int]]:
        return [(schedule.storages[a.storage].name, a.start, a.stop) for a in accesses]

    waited = [part.ops[d].name for d in op.deps] + [f"-1:{name}" for name in op.prev]
    # Rebuilt unchanged the line is the schedule's own, so only the change can alter the digest.
    where = lines[lane].index(ran_line(op.name, waited, ranges(op.reads), ranges(op.writes), op.nbytes))
    writes = [(slot or name, start + shift, stop + shift) for name, start, stop in ranges(op.writes)]
    lines[lane][where] = ran_line(op.name, waited[unwaited:], ranges(op.reads), writes, op.nbytes - short)
    return lines


def _wrong_slot(schedule: Schedule, part: Part, lane: str) -> Lines:
    return _rerun(schedule, part, lane, slot="slot.elsewhere")


def _shifted(schedule: Schedule, part: Part, lane: str) -> Lines:
    return _rerun(schedule, part, lane, shift=2)


def _fewer_bytes(schedule: Schedule, part: Part, lane: str) -> Lines:
    return _rerun(schedule, part, lane, short=2)


def _dep_not_waited_for(schedule: Schedule, part: Part, lane: str) -> Lines:
    return _rerun(schedule, part, lane, unwaited=1)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    "broken", [_swapped, _dropped, _on_another_lane, _wrong_slot, _shifted, _fewer_bytes, _dep_not_waited_for]
)
def test_a_run_that_did_something_else_is_refused(
    schedule: Schedule, broken: Callable[[Schedule, Part, str], Lines], lane: str, n: int
) -> None:
    """Once, in one of three bodies: its digest gives it away, though its events look right."""
    ran = part_digest(broken(schedule, schedule.body, lane))
    measured = _measured(schedule)
    foreign = replace(measured, digests=(*measured.digests[:n], ran, *measured.digests[n + 1 :]))
    with pytest.raises(ForeignTrace) as caught:
        compare(schedule, _predicted(schedule), foreign)
    for word in (f"measured (cpu): part {n} (body)", ran, schedule.digests()["body"]):
        assert word in str(caught.value)


def test_what_ran_as_scheduled_is_not_refused(schedule: Schedule) -> None:
    named = {"prologue": schedule.prologue, "body": schedule.body, "epilogue": schedule.epilogue}
    ran = tuple(part_digest(schedule.lane_lines(named[name])) for name in PARTS)
    refuse_foreign(schedule, replace(_measured(schedule), digests=ran))


def test_a_short_prediction_compares_with_a_long_run_over_what_both_ran(schedule: Schedule) -> None:
    short = scheduled(schedule, ("prologue", "body", "epilogue"), _durations(3))
    long = scheduled(schedule, PARTS, _durations(3))
    predicted, measured = common(short, long)
    assert predicted.parts == measured.parts == ("prologue", "body")
    assert set(compare(schedule, predicted, measured).steps["ratio"]) == {1.0}
    assert common(long, long) == (long, long)
    nothing = replace(short, parts=("epilogue",), digests=short.digests[:1], events=())
    with pytest.raises(ValueError, match="no part in common"):
        common(nothing, long)
