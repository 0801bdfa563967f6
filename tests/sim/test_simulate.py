"""The simulator against two oracles: the longest path (nothing shared) and a clock that ticks every nanosecond (all shared)."""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import sim.simulate
from megatrain.derive import derive, step_time
from megatrain.hardware import H200, HardwareProfile
from megatrain.schedule import Op, PlacedOp, Schedule, lower_evaluation
from sim.cost import NS_PER_S, Work, alone_ns, durations_ns, works
from sim.fluid import Segment
from sim.longest_path import longest_path, lower_bound_ns
from sim.memory import memory_use
from sim.sharing import Sharing, SharingRule
from sim.simulate import OpTimes, simulate, simulate_ops

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
        names = [part.name for part in schedule.parts(3)]
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
    assert step_time(s, simulate(s, host)).mean_ns > step_time(s, simulate(s, host, contention=False)).mean_ns


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


def test_notes_say_when_memory_does_not_suffice(schedule: Callable[..., Schedule], host: HardwareProfile) -> None:
    s = schedule(activations={"default": "keep"}, placement={"0": "resident"})
    total = {space: sum(x.nbytes for x in s.storages if x.space == space) for space in ("host", "device")}
    for space in ("host", "device"):
        for there in (total[space] - 1, total[space]):
            small = replace(H200, **{f"{space}_memory_bytes": there})
            notes = [note for note in simulate(s, small, steps=2).notes if "memory" in note]
            assert len(notes) == (there < total[space])
            for note in notes:
                assert f"h200: {space} memory: " in note and f"{total[space]:,} bytes" in note
                assert f"{there:,}: 1 too many" in note
                assert ("forward[3.1]" in note) == (space == "device")
    # A cpu backend's device is memory of the host.
    for there, missing in ((sum(total.values()), 0), (sum(total.values()) - 1, 1)):
        notes = [note for note in simulate(s, replace(host, host_memory_bytes=there), steps=2).notes if "host memory" in note]
        assert len(notes) == missing and all(f"needs {sum(total.values()):,} bytes" in note for note in notes)


def test_kept_activations_that_are_never_together_need_no_note(schedule: Callable[..., Schedule]) -> None:
    """Memory is what exists at a time, not the sum of the pools: an epilogue, say, holds no activations."""
    s = schedule(activations={"default": "keep"})
    peak = memory_use(s, simulate(s, H200, steps=2))["device"].peak_nbytes
    assert not any("memory" in note for note in simulate(s, replace(H200, device_memory_bytes=peak), steps=2).notes)


@pytest.mark.parametrize(
    ("fields", "on_host", "said"),
    [
        ({"adam_threads": 17}, False, "plan.adam_threads asks for 17 threads of 16 cores; predicted with 16"),
        ({"adam_threads": 3}, True, "plan.adam_threads asks for 3 threads of 2 cores"),
        ({"recipe": {"compute_threads": 5}}, True, "recipe.compute_threads asks for 5 threads of 2 cores; predicted with 2"),
        ({"recipe": {"attention": "eager"}}, False, "attention='eager'"),
        ({"recipe": {"attention_mask": "segments"}}, False, "attention='sdpa' with a mask of segments"),
    ],
)
def test_notes_say_what_the_machine_or_the_model_does_not_know(
    schedule: Callable[..., Schedule], host: HardwareProfile, fields: dict[str, Any], on_host: bool, said: str
) -> None:
    hardware = host if on_host else H200
    assert sum(said in note for note in simulate(schedule(**fields), hardware).notes) == 1
    assert not any(said in note for note in simulate(schedule(), hardware).notes)


def test_notes_say_when_the_optimizer_was_not_measured_at_these_threads(schedule: Callable[..., Schedule]) -> None:
    few = replace(H200, adam_rates=H200.adam_rates[1:3], sharing=())
    for threads, said in ((2, "in proportion to threads"), (4, None), (6, None), (8, None), (16, "predicted as at 8")):
        trace = simulate(schedule(adam_threads=threads), few, contention=False)
        notes = [note for note in trace.notes if "outside the measured 4 to 8" in note]
        assert len(notes) == (said is not None) and all(said in note for note in notes if said)


def test_a_simulation_has_the_step_time_that_every_trace_has(schedule: Callable[..., Schedule]) -> None:
    """There is one definition, `megatrain.derive`'s: of 12 steps the mean of the last six."""
    s = schedule(update="next_forward", chunk_bytes=1024)
    trace = simulate(s, H200)
    ends = [
        max(e.end_ns for e in trace.events if e.part == k and part.ops[e.position].lane == "compute")
        for k, part in enumerate(s.parts(12)[:-1])
    ]
    last = [b - a for a, b in pairwise(ends)][-6:]
    assert step_time(s, trace) == (round(sum(last) / 6), pytest.approx((max(last) - min(last)) / (sum(last) / 6)))
    assert derive(s, trace).step_times_ns[-6:] == tuple(last)


def test_unsteady_steps_are_reported(schedule: Callable[..., Schedule], monkeypatch: pytest.MonkeyPatch) -> None:
    s = schedule()
    assert not any("not steady" in note for note in simulate(s, H200).notes)
    monkeypatch.setattr(sim.simulate, "SPREAD_LIMIT", -1.0)
    assert any("not steady" in note for note in simulate(s, H200).notes)
    for steps in (0, -3):
        with pytest.raises(ValueError, match=f"steps: must be an integer >= 1, got {steps}"):
            simulate(s, H200, steps=steps)
        with pytest.raises(ValueError, match=f"steps: must be an integer >= 1, got {steps}"):
            lower_bound_ns(s, H200, steps=steps)


def test_what_an_op_costs_does_not_grow_with_their_number(random_run: Callable[..., Run]) -> None:
    """Counted in calls, which a busy machine does not change; `sim.bench` has the seconds."""

    def calls_per_op(ops: int) -> float:
        placed, table = random_run(random.Random(0), ops=ops, longest=1_000_000)
        calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            simulate_ops(placed, lambda p: table[p.position], Sharing(H200))
        finally:
            sys.setprofile(None)
        return calls / ops

    assert calls_per_op(10_000) < 1.1 * calls_per_op(1_000)


def test_the_parts_of_a_run_with_flushes_can_be_simulated(schedule: Callable[..., Schedule]) -> None:
    """A prologue after a flush starts when everything before it has ended, and the rest of the run is what it was."""
    lowered = schedule(update="next_forward")
    once = simulate(lowered, H200, steps=2)
    twice = simulate(lowered, H200, parts_run=[*once.parts, *once.parts])
    assert twice.parts == (*once.parts, *once.parts)
    end = max(event.end_ns for event in once.events)
    assert twice.events[: len(once.events)] == once.events
    for first, second in zip(once.events, twice.events[len(once.events) :], strict=True):
        assert (second.start_ns, second.end_ns) == (first.start_ns + end, first.end_ns + end)
    with pytest.raises(ValueError, match="has no part 'coda'"):
        simulate(lowered, H200, parts_run=["prologue", "coda"])
