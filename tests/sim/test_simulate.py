"""The simulator against two oracles: the longest path (nothing shared) and a clock that ticks every nanosecond (all shared)."""

import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

import sim.simulate
from megatrain.hardware import H200, HardwareProfile
from megatrain.schedule import Op, PlacedOp, Schedule, lower_evaluation
from megatrain.trace import Event, Trace
from sim.cost import NS_PER_S, Work, alone_ns, durations_ns, works
from sim.fluid import Segment
from sim.longest_path import longest_path, lower_bound_ns
from sim.sharing import Sharing, SharingRule
from sim.simulate import OpTimes, parts_of, simulate, simulate_ops, step_time

Run = tuple[list[PlacedOp], list[Work]]


def _halves(running: Sequence[Work]) -> tuple[int, ...]:
    return tuple(w.rate_per_s // len(running) for w in running)


def _run(ops: list[tuple[str, Work, tuple[int, ...]]], rule: SharingRule | None) -> list[OpTimes]:
    placed = [PlacedOp(0, i, Op(kind="load", lane=lane, block=i), deps) for i, (lane, _, deps) in enumerate(ops)]  # type: ignore[arg-type]
    return simulate_ops(placed, lambda p: ops[p.position][1], rule)


# ---- timelines -----------------------------------------------------------------------------------------------------------


def test_a_lane_runs_its_ops_in_order_and_waits_for_deps() -> None:
    times = _run([("h2d", Work(10), ()), ("compute", Work(5), (0,)), ("h2d", Work(1), ()), ("h2d", Work(1), (1,))], None)
    assert times == [(0, 0, 10), (0, 10, 15), (10, 10, 11), (11, 15, 16)]


def test_two_flows_share_and_the_one_left_speeds_up() -> None:
    link = Work(0, 100, NS_PER_S, "h2d")
    times = _run([("h2d", link, ()), ("compute", Work(50), ()), ("d2h", link, (1,))], _halves)
    # 50 of the first pass alone; then both at half rate for 100 ns; then the second alone.
    assert times == [(0, 0, 150), (0, 0, 50), (0, 50, 200)]


def test_the_fixed_part_shares_nothing() -> None:
    times = _run([("h2d", Work(30, 100, NS_PER_S, "h2d"), ()), ("d2h", Work(0, 20, NS_PER_S, "d2h"), ())], _halves)
    assert times == [(0, 0, 130), (0, 0, 20)]


def test_a_handover_within_one_nanosecond_is_no_combination() -> None:
    seen: list[int] = []

    def rule(running: Sequence[Work]) -> tuple[int, ...]:
        seen.append(len(running))
        return _halves(running)

    link = Work(0, 10, NS_PER_S, "h2d")
    times = _run([("h2d", link, ()), ("d2h", link, (0,)), ("cpu", Work(0, 100, NS_PER_S, "adam"), ())], rule)
    assert times == [(0, 0, 20), (0, 20, 40), (0, 0, 120)]
    assert seen == [2, 2, 1]


def test_a_flow_whose_rate_stays_is_not_planned_again() -> None:
    def rule(running: Sequence[Work]) -> tuple[int, ...]:
        return tuple(w.rate_per_s if w.traffic == "h2d" else w.rate_per_s // len(running) for w in running)

    segments: list[Segment] = []
    works = [Work(0, 100, NS_PER_S, "h2d"), Work(7), Work(0, 10, NS_PER_S, "d2h")]
    lanes_deps = [("h2d", ()), ("compute", ()), ("d2h", (1,))]
    placed = [PlacedOp(0, i, Op(kind="load", lane=lane, block=i), deps) for i, (lane, deps) in enumerate(lanes_deps)]  # type: ignore[arg-type]
    simulate_ops(placed, lambda p: works[p.position], rule, segments=segments)
    assert segments == [Segment(2, 7, 27, NS_PER_S // 2), Segment(0, 0, 100, NS_PER_S)]


def test_ops_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ValueError, match=r"deadlock.* 0:load\[0\] of part 0, 1:load\[1\] of part 0"):
        _run([("h2d", Work(1), (1,)), ("d2h", Work(1), (0,))], None)
    with pytest.raises(ValueError, match=r"0:load\[0\] depends on position 1, not before its own, 0"):
        longest_path([PlacedOp(0, 0, Op(kind="load", lane="h2d", block=0), (1,))], [1])


# ---- without contention: the longest path --------------------------------------------------------------------------------


def test_without_contention_random_runs_equal_the_longest_path(random_run: Callable[..., Run]) -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        placed, table = random_run(rng, ops=rng.randint(1, 60), longest=10 ** rng.randint(1, 12))
        times = simulate_ops(placed, lambda p, table=table: table[p.position], None)  # type: ignore[misc]
        assert times == longest_path(placed, [alone_ns(w) for w in table]), seed


def test_without_contention_lowered_schedules_equal_the_longest_path(
    random_schedule: Callable[[random.Random], Schedule], host: HardwareProfile
) -> None:
    for seed in range(250):
        schedule = random_schedule(random.Random(seed))
        hardware = (H200, host)[seed % 2]
        trace = simulate(schedule, hardware, steps=3, contention=False)
        duration = durations_ns(schedule, hardware)
        placed = schedule.unroll(3)
        spans = longest_path(placed, [duration[trace.parts[p.part], p.position] for p in placed])
        assert [e[2:] for e in trace.events] == spans, seed
        assert max(e.end_ns for e in trace.events) == lower_bound_ns(schedule, hardware, steps=3)


# ---- with contention -----------------------------------------------------------------------------------------------------


def _tick_by_tick(placed: Sequence[PlacedOp], table: Sequence[Work], sharing: SharingRule) -> list[OpTimes]:
    """The same run with a clock that looks at everything every nanosecond."""
    queues: dict[str, list[int]] = {}
    for i, p in enumerate(placed):
        queues.setdefault(p.op.lane, []).append(i)
    issued, start, end = ({} for _ in range(3))  # type: ignore[var-annotated]
    fixed, left = {}, {}
    t = 0
    while any(queues.values()):
        moved = True
        while moved:
            moved = False
            for queue in queues.values():
                if not queue:
                    continue
                i, work = queue[0], table[queue[0]]
                issued.setdefault(i, t)
                if i not in start and all(d in end for d in placed[i].deps):
                    start[i] = t
                    shared = work.traffic is not None
                    fixed[i] = t + (work.fixed_ns if shared else alone_ns(work))
                    left[i] = work.amount * NS_PER_S if shared else 0
                if i in start and t >= fixed[i] and left[i] <= 0:
                    end[i] = t
                    queue.pop(0)
                    moved = True
        flows = [q[0] for q in queues.values() if q and q[0] in start and t >= fixed[q[0]]]
        if flows:
            for i, rate in zip(flows, sharing([table[i] for i in flows]), strict=True):
                left[i] -= rate
        t += 1
    return [OpTimes(issued[i], start[i], end[i]) for i in range(len(placed))]


def test_with_contention_times_equal_those_of_a_clock_that_ticks_every_nanosecond(
    random_run: Callable[..., Run], host: HardwareProfile
) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        placed, table = random_run(rng, ops=rng.randint(1, 25), longest=rng.choice([5, 40, 150]))
        sharing = Sharing((H200, host)[seed % 2])
        times = simulate_ops(placed, lambda p, table=table: table[p.position], sharing)  # type: ignore[misc]
        assert times == _tick_by_tick(placed, table, sharing), seed


def _check_conservation(
    placed: Sequence[PlacedOp], table: Sequence[Work], times: Sequence[OpTimes], segments: Sequence[Segment]
) -> None:
    """Every amount passes in full, without a break, between the fixed part and the end, and nothing is faster than alone."""
    by_flow: dict[int, list[Segment]] = {}
    for s in segments:
        by_flow.setdefault(s.key, []).append(s)
    for i, (work, t) in enumerate(zip(table, times, strict=True)):
        assert t.end_ns - t.start_ns >= alone_ns(work)
        if work.traffic is None or work.amount == 0:
            assert i not in by_flow
            continue
        flow = by_flow[i]
        assert flow[0].start_ns == t.start_ns + work.fixed_ns
        assert flow[-1].end_ns == t.end_ns
        assert all(a.end_ns == b.start_ns for a, b in pairwise(flow))
        assert all(0 < s.rate_per_s <= work.rate_per_s for s in flow)
        passed = sum(s.rate_per_s * (s.end_ns - s.start_ns) for s in flow)
        # In units of 1e-9: all of it, and less than one nanosecond's worth too much.
        assert 0 <= passed - work.amount * NS_PER_S < flow[-1].rate_per_s
    for span, t in zip(longest_path(placed, [alone_ns(w) for w in table]), times, strict=True):
        assert t.issued_ns >= span.issued_ns and t.start_ns >= span.start_ns and t.end_ns >= span.end_ns


def test_with_contention_random_runs_conserve_bytes_and_are_never_faster_than_alone(
    random_run: Callable[..., Run], host: HardwareProfile
) -> None:
    slowed = 0
    for seed in range(400):
        rng = random.Random(seed)
        placed, table = random_run(rng, ops=rng.randint(1, 80), longest=10 ** rng.randint(1, 10))
        segments: list[Segment] = []
        work_of = dict(enumerate(table)).__getitem__
        times = simulate_ops(
            placed, lambda p, of=work_of: of(p.position), Sharing((H200, host)[seed % 2]), segments=segments  # type: ignore[misc]
        )
        _check_conservation(placed, table, times, segments)
        slowed += any(t.end_ns - t.start_ns > alone_ns(w) for t, w in zip(times, table, strict=True))
    assert slowed > 200  # else nothing was shared and the test says nothing


def test_with_contention_lowered_schedules_conserve_bytes_and_are_never_faster_than_alone(
    random_schedule: Callable[[random.Random], Schedule], host: HardwareProfile
) -> None:
    slowed = 0
    for seed in range(60):
        schedule = random_schedule(random.Random(seed))
        hardware = (H200, host)[seed % 2]
        costs = works(schedule, hardware).parts
        names = [part.name for part in parts_of(schedule, 3)]
        placed = schedule.unroll(3)
        table = [costs[names[p.part]][p.position] for p in placed]
        segments: list[Segment] = []
        times = simulate_ops(
            placed, lambda p: costs[names[p.part]][p.position], Sharing(hardware), segments=segments  # noqa: B023
        )
        _check_conservation(placed, table, times, segments)
        assert [e[2:] for e in simulate(schedule, hardware, steps=3).events] == times
        slowed += any(t.end_ns - t.start_ns > alone_ns(w) for t, w in zip(times, table, strict=True))
    assert slowed > 20


def test_contention_costs_time_and_its_absence_is_a_choice(schedule: Callable[..., Schedule], host: HardwareProfile) -> None:
    s = schedule(update="next_forward", chunk_bytes=1024)
    assert step_time(simulate(s, host), s).mean_ns > step_time(simulate(s, host, contention=False), s).mean_ns


# ---- traces --------------------------------------------------------------------------------------------------------------


def test_a_trace_names_its_parts_and_digests_and_has_every_op_once(schedule: Callable[..., Schedule]) -> None:
    s = schedule()
    trace = simulate(s, H200, steps=3)
    assert (trace.source, trace.parts) == ("sim", ("prologue", "body", "body", "epilogue"))
    assert trace.digests == tuple(s.digests()[part] for part in trace.parts)
    assert [e[:2] for e in trace.events] == [(p.part, p.position) for p in s.unroll(3)]
    assert simulate(s, H200, steps=3) == trace


def test_an_evaluation_is_one_part(schedule: Callable[..., Schedule]) -> None:
    s = schedule()
    evaluation = lower_evaluation(s.model, s.recipe, s.plan)
    trace = simulate(evaluation, H200)
    assert trace.parts == ("prologue",)
    assert len(trace.events) == len(evaluation.prologue.ops)


def test_notes_name_what_was_not_measured(schedule: Callable[..., Schedule], host: HardwareProfile) -> None:
    s = schedule(chunk_bytes=1024)
    assert simulate(s, H200).notes == ()
    notes = simulate(s, host).notes
    assert any("no measured rates for" in note and "shared in proportion" in note for note in notes)
    assert len(set(notes)) == len(notes)
    assert simulate(s, host, contention=False).notes == ()


def _steps(s: Schedule, ends: Sequence[int], parts: Sequence[str] = ()) -> Trace:
    """A trace with one compute op a step, the first, ended at these times, and a later op of another lane."""
    compute = next(i for i, op in enumerate(s.body.ops) if op.lane == "compute")
    other = next(i for i, op in enumerate(s.body.ops) if op.lane == "d2h")
    events = [Event(k, i, 0, 0, end + late) for k, end in enumerate(ends) for i, late in ((compute, 0), (other, 5))]
    parts = parts or ["prologue", *["body"] * (len(ends) - 1)]
    return Trace(source="null", parts=tuple(parts), digests=("",) * len(parts), events=tuple(events))


def test_step_time_is_the_mean_of_the_last_six_and_the_spread_tells_whether_they_agree(schedule: Callable[..., Schedule]) -> None:
    s = schedule(update="during_backward", recipe={"clip_norm": None})
    late = step_time(_steps(s, [0, 900, 1000, 1010, 1020, 1030, 1040, 1050, 1062]), s)
    assert late == (10, pytest.approx(2 / (62 / 6)))
    assert step_time(_steps(s, [7, 17]), s) == (10, 0.0)
    # What follows a flush starts anew.
    assert step_time(_steps(s, [0, 10, 500, 512], ["prologue", "body", "prologue", "body"]), s).mean_ns == 11
    with pytest.raises(ValueError, match="needs two consecutive steps, the trace has parts prologue"):
        step_time(_steps(s, [7]), s)


def test_unsteady_steps_are_reported(schedule: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch) -> None:
    s = schedule()
    assert not any("not steady" in note for note in simulate(s, H200).notes)
    monkeypatch.setattr(sim.simulate, "SPREAD_LIMIT", -1.0)
    assert any("not steady" in note for note in simulate(s, H200).notes)
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        simulate(s, H200, steps=0)


def test_ten_thousand_ops_take_less_than_a_second(random_run: Callable[..., Run]) -> None:
    placed, table = random_run(random.Random(0), ops=10_000, longest=1_000_000)
    begin = time.process_time()
    simulate_ops(placed, lambda p: table[p.position], Sharing(H200))
    assert time.process_time() - begin < 1.0
