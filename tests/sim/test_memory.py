import random
from collections.abc import Callable

from megatrain.hardware import H200
from megatrain.schedule import Schedule, lower_evaluation
from megatrain.trace import Trace
from sim.memory import memory_use
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
    train = schedule(activations={"default": "keep"})
    s = lower_evaluation(train.model, train.recipe, train.plan)
    use = memory_use(s, simulate(s, H200))["device"]
    # Evaluation keeps at most one at a time: the next forward starts when this one's has gone.
    assert use.peak_nbytes - use.static_nbytes <= max((x.nbytes for x in s.storages if x.dynamic), default=0)
