import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.hardware import H200
from megatrain.schedule import Access, Op, Part, Schedule, Storage, Tag
from megatrain.trace import Event, Trace
from sim.memory import lane_moments, memory_use, peak_on_lane
from sim.simulate import simulate


def _static(s: Schedule, space: str) -> int:
    return sum(x.nbytes for x in s.storages if x.space == space and not x.dynamic)


def test_without_kept_activations_memory_is_flat(schedule: Callable[..., Schedule]) -> None:
    s = schedule(activations={"default": "recompute"})
    use = memory_use(s, simulate(s, H200, steps=2))
    for space in ("host", "device"):
        static = _static(s, space)
        assert use[space] == (static, ((0, static),), static, "", (static,) * 3)  # type: ignore[index]


def test_all_kept_activations_exist_at_the_turn_and_none_after_the_step(schedule: Callable[..., Schedule]) -> None:
    s = schedule(activations={"default": "keep"})
    trace = simulate(s, H200, steps=3)
    use = memory_use(s, trace)["device"]
    assert use.peak_nbytes == sum(x.nbytes for x in s.storages if x.space == "device")
    assert use.peak_at.startswith("prologue ") and use.peak_at.endswith(":forward[3.1]")
    assert use.part_peaks == (use.peak_nbytes,) * 3 + (use.static_nbytes,)
    assert use.timeline[-1][1] == use.static_nbytes
    starts = {trace.events[i].start_ns for i, p in enumerate(s.unroll(3)) if p.op.name == "loss[0]"}
    at_loss = [max(n for t, n in use.timeline if t <= start) for start in starts]
    assert at_loss == [use.peak_nbytes] * 3


def _lives(s: Schedule, trace: Trace) -> list[tuple[int, int, int]]:
    """(from_ns, until_ns, nbytes) of each kept activation of each step, from the names of the ops alone."""
    found = []
    names = {part.name: [op.name for op in part.ops] for part in (s.prologue, s.body, s.epilogue)}
    when = {(e.part, names[trace.parts[e.part]][e.position]): e for e in trace.events}
    for storage in s.storages:
        if storage.dynamic:
            inner = storage.name.removeprefix("saved[").removesuffix("]")
            for k, part in enumerate(trace.parts):
                if part != "epilogue":
                    forward, backward = when[k, f"forward[{inner}]"], when[k, f"backward[{inner}]"]
                    found.append((forward.start_ns, backward.end_ns, storage.nbytes))
    return found


def test_the_timeline_is_the_sum_of_what_lives_at_each_time(random_schedule: Callable[[random.Random], Schedule]) -> None:
    dynamic = 0
    for seed in range(40):
        s = random_schedule(random.Random(seed))
        trace = simulate(s, H200, steps=3)
        use = memory_use(s, trace)["device"]
        lives = _lives(s, trace)
        dynamic += bool(lives)
        assert [t for t, _ in use.timeline] == sorted({0, *(x for a, b, _ in lives for x in (a, b))})
        for t, nbytes in use.timeline:
            assert nbytes == _static(s, "device") + sum(n for a, b, n in lives if a <= t < b)
        assert use.peak_nbytes == max(n for _, n in use.timeline) == max(use.part_peaks)
    assert dynamic > 10


def test_what_nobody_reads_lives_until_its_last_write(schedule: Callable[..., Schedule]) -> None:
    """No lowering writes what it does not read; a schedule by hand may, and must not crash or count it for ever."""
    saved = Access(0, 0, 100, Tag("saved", 1, 0))
    read = Access(1, 0, 10, Tag("saved", 2, 0))
    ops = (
        Op(kind="forward", lane="compute", block=1, micro=0, writes=(saved,)),
        Op(kind="forward", lane="compute", block=2, micro=0, writes=(read,)),
        Op(kind="forward", lane="compute", block=3, micro=0, writes=(saved,)),
        Op(kind="backward", lane="compute", block=2, micro=0, reads=(read,)),
        Op(kind="backward", lane="compute", block=1, micro=0),
    )
    storages = tuple(Storage(space="device", name=name, nbytes=n, dynamic=True) for name, n in (("a", 100), ("b", 10)))
    empty = {name: Part(name=name, ops=()) for name in ("body", "epilogue")}
    s = replace(schedule(), storages=storages, prologue=Part(name="prologue", ops=ops), **empty)
    events = tuple(Event(0, i, 10 * i, 10 * i, 10 * i + 9) for i in range(len(ops)))
    use = memory_use(s, Trace(source="null", parts=("prologue",), digests=("",), events=events))["device"]
    assert use.timeline == ((0, 100), (10, 110), (29, 10), (39, 0))
    assert (use.static_nbytes, use.peak_nbytes, use.peak_at) == (0, 110, "prologue 1:forward[2.0]")


def test_the_lane_s_order_gives_the_peak_that_times_give(random_schedule: Callable[[random.Random], Schedule]) -> None:
    """Whatever the times: simulated with and without contention, on a schedule whose activations are kept in any pattern."""
    dynamic = 0
    for seed in range(60):
        s = random_schedule(random.Random(seed))
        moments = lane_moments(s, s.body)
        peak = peak_on_lane(moments, {x.name: x.nbytes for x in s.storages if x.dynamic}, lambda op: 0)
        for contention in (True, False):
            use = memory_use(s, simulate(s, H200, steps=2, contention=contention))["device"]
            assert peak.live == use.peak_nbytes - use.static_nbytes
            if use.peak_at and peak.op is not None:
                assert use.peak_at.endswith(f":{peak.op.name}")
        dynamic += peak.live > 0
    assert dynamic > 20


def test_what_an_op_takes_beside_counts_only_while_it_runs(schedule: Callable[..., Schedule]) -> None:
    s = schedule(activations={"default": "keep"})
    moments, sizes = lane_moments(s, s.body), {x.name: x.nbytes for x in s.storages if x.dynamic}
    everything = sum(sizes.values())
    peak = peak_on_lane(moments, sizes, lambda op: 7 if op.name == "loss[1]" else 0)
    assert peak.op is not None and (peak.live, peak.beside, peak.op.name) == (everything, 7, "loss[1]")
    much = 3 * everything
    peak = peak_on_lane(moments, sizes, lambda op: much if op.kind == "forward" and op.block == 0 else 0)
    assert (peak.live, peak.beside) == (0, much)
    # By the last backward all are gone, by the one before all but those of the first layer.
    for block, left in ((0, 0), (1, sizes["saved[1.0]"])):
        name = f"backward[{block}.{0 if block == 0 else 1}]"
        peak = peak_on_lane(moments, sizes, lambda op, name=name: much if op.name == name else 0)  # type: ignore[misc]
        assert (peak.live, peak.beside) == (left and sizes["saved[1.1]"], much)


def test_two_lanes_on_dynamic_storages_have_no_peak_without_times(schedule: Callable[..., Schedule]) -> None:
    s = schedule(activations={"default": "keep"})
    ops = list(s.body.ops)
    i = next(i for i, op in enumerate(ops) if op.kind == "backward" and any(s.storages[a.storage].dynamic for a in op.reads))
    ops[i] = replace(ops[i], lane="cpu")
    with pytest.raises(ValueError, match=r"saved\[3.0\]: lanes compute, cpu|saved\[3.0\]: lanes cpu, compute"):
        lane_moments(s, replace(s.body, ops=tuple(ops)))
