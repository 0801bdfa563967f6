"""check: the proof that a schedule is right, made without lowering's help.

For the runs prologue;body;body;epilogue and prologue;epilogue;prologue it proves that

- every op depends only on ops before it, so lanes and deps together cannot deadlock;
- every op reads and writes what the table of kinds says, on the lane it says, within its storages;
- any two ops that touch the same bytes, one of them writing, are ordered by deps and lane order;
- every read finds the content its tag names, and each part leaves the state the next one starts from.

Ordering is proved with one vector clock an op over the lanes: O(ops x lanes). Since all conflicting pairs are ordered, what a
read finds is the same in every execution, and following the tags through one of them is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from megatrain.schedule.kinds import Content, Needs, table_of
from megatrain.schedule.nouns import COPIES, LANES, Access, Op, Part, PlacedOp, Schedule, Tag, place

_LANE_NUMBER = {lane: i for i, lane in enumerate(LANES)}
_NOTHING = Tag("nothing")


class ScheduleError(ValueError):
    """A schedule that breaks a rule; the message names the op, the rule and what it clashes with."""


def check(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless the schedule is right."""
    parts = (schedule.prologue, schedule.body, schedule.epilogue)
    if schedule.mode == "train" and schedule.plan.update == "during_backward" and schedule.recipe.clip_norm is not None:
        raise ScheduleError("updates during backward know no norm to clip by; recipe.clip_norm must be null")
    names = [s.name for s in schedule.storages]
    if len(set(names)) < len(names):
        raise ScheduleError(f"two storages are named {next(n for n in names if names.count(n) > 1)}")
    if not any(op.kind == "loss" for op in schedule.prologue.ops):
        raise ScheduleError("prologue: has no loss")
    for part in parts:
        _check_part(schedule, part, table_of(schedule))
    prologue, body, epilogue = parts
    if schedule.mode == "evaluate":
        _check_run(schedule, [prologue, prologue], [False, True])
        return
    _check_run(schedule, [prologue, body, body, epilogue], [False] * 4)
    _check_run(schedule, [prologue, epilogue, prologue], [False, False, True])


# ---- one part ------------------------------------------------------------------------------------------------------------


def _check_part(schedule: Schedule, part: Part, needs: Callable[[Op], Needs]) -> None:
    names: set[str] = set()
    for i, op in enumerate(part.ops):
        if op.name in names:
            raise ScheduleError(f"{part.name} {part.text(i)}: the part has an op of this name already")
        names.add(op.name)
        for d in op.deps:
            if not 0 <= d < i:
                where = part.text(d) if 0 <= d < len(part.ops) else str(d)
                raise ScheduleError(f"{part.name} {part.text(i)}: depends on {where}, which does not stand before it")
        for a in (*op.reads, *op.writes):
            if not 0 <= a.storage < len(schedule.storages):
                raise ScheduleError(f"{part.name} {part.text(i)}: storage number {a.storage} does not exist")
            storage = schedule.storages[a.storage]
            if not 0 <= a.start < a.stop <= storage.nbytes:
                raise ScheduleError(
                    f"{part.name} {part.text(i)}: bytes {a.start}:{a.stop} are not in {storage.name} ({storage.nbytes})"
                )
        try:
            need = needs(op)
        except ValueError as error:
            raise ScheduleError(f"{part.name} {i}:{error}") from None
        if op.lane != need.lane:
            raise ScheduleError(f"{part.name} {part.text(i)}: runs on {op.lane}, must run on {need.lane}")
        for verb, accesses, wanted in (("read", op.reads, need.reads), ("write", op.writes, need.writes)):
            found = [_content(schedule, a) for a in accesses]
            for content in sorted(wanted, key=_text):
                if content not in found:
                    raise ScheduleError(f"{part.name} {part.text(i)}: must {verb} {_text(content)}")
            for content in found:
                if content not in wanted or found.count(content) > 1:
                    raise ScheduleError(f"{part.name} {part.text(i)}: must not {verb} {_text(content)}")
        if op.kind in COPIES:
            if len(op.reads) != len(op.writes) or not all(map(_same, op.reads, op.writes)):
                raise ScheduleError(
                    f"{part.name} {part.text(i)}: a copy must write what it reads, range by range in the same order"
                )
            for storage in (schedule.storages[a.storage] for a in (*op.reads, *op.writes)):
                if storage.space == "host" and not storage.copied:
                    raise ScheduleError(f"{part.name} {part.text(i)}: {storage.name} is not said to be copied")


def _same(a: Access, b: Access) -> bool:
    """Whether a copy of one gives the other. A chunk loses its number where its block lies whole."""
    whole = None in (a.tag.micro, b.tag.micro)
    return a.nbytes == b.nbytes and (a.tag._replace(micro=None) == b.tag._replace(micro=None) if whole else a.tag == b.tag)


def _content(schedule: Schedule, a: Access) -> Content:
    start = 0 if a.tag.micro is not None else a.start
    return Content(schedule.storages[a.storage].space, a.tag, start, start + a.nbytes)


def _text(content: Content) -> str:
    return f"{content.tag} bytes {content.start}:{content.stop} in {content.space} memory"


# ---- a run of parts ------------------------------------------------------------------------------------------------------


class _Range:
    """What is known of one stretch of bytes: its last writer, the last reader since on each lane, its content."""

    __slots__ = ("readers", "tag", "writer")

    def __init__(self, tag: Tag) -> None:
        self.writer = -1
        self.readers = [-1] * len(LANES)
        self.tag = tag


def _check_run(schedule: Schedule, parts: Sequence[Part], barriers: Sequence[bool]) -> None:
    try:
        run = place(parts, barrier_before=barriers)
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    cuts = _cut_points(schedule, run)
    ranges = [[_Range(_NOTHING) for _ in cut[1:]] for cut in cuts]
    _cold_state(schedule, ranges)
    clocks: list[list[int]] = []
    lanes: list[int] = []
    last_on_lane = [-1] * len(LANES)
    # An evaluation updates nothing, so it does not age what it finds.
    steps = _step_of_parts(parts) if schedule.mode == "train" else [0] * len(parts)
    ends = _required_at_end(schedule)

    for me, placed in enumerate(run):
        op, lane = placed.op, _LANE_NUMBER[placed.op.lane]
        predecessor = last_on_lane[lane]
        clock = list(clocks[predecessor]) if predecessor >= 0 else [-1] * len(LANES)
        clock[lane] = predecessor
        for d in placed.deps:
            theirs = clocks[d]
            for k in range(len(LANES)):
                if theirs[k] > clock[k]:
                    clock[k] = theirs[k]
            if d > clock[lanes[d]]:
                clock[lanes[d]] = d
        clocks.append(clock)
        lanes.append(lane)
        last_on_lane[lane] = me
        step = steps[placed.part]

        def ordered(before: int, clock: list[int] = clock) -> bool:
            return before <= clock[lanes[before]]

        for a in op.reads:
            wanted = a.tag._replace(step=a.tag.step + step)
            for r in _between(cuts, ranges, a):
                if r.writer >= 0 and not ordered(r.writer):
                    raise _unordered(schedule, parts, run, placed, r.writer, a)
                if r.tag != wanted:
                    raise ScheduleError(
                        f"{_where(parts, placed)}: reads {a.tag} from {schedule.storages[a.storage].name}, which holds "
                        f"{r.tag._replace(step=r.tag.step - step)}"
                    )
        for a in op.writes:
            for r in _between(cuts, ranges, a):
                for other in (r.writer, *r.readers):
                    if other >= 0 and not ordered(other):
                        raise _unordered(schedule, parts, run, placed, other, a)
        for a in op.reads:
            for r in _between(cuts, ranges, a):
                r.readers[lane] = me
        for a in op.writes:
            tag = a.tag._replace(step=a.tag.step + step)
            for r in _between(cuts, ranges, a):
                r.writer, r.tag = me, tag
                r.readers = [-1] * len(LANES)

        if me + 1 == len(run) or run[me + 1].part != placed.part:
            _check_end(schedule, parts[placed.part], step, ends, cuts, ranges)
    _check_cold(schedule, parts[-1], steps[-1], cuts, ranges)


def _step_of_parts(parts: Sequence[Part]) -> list[int]:
    """The absolute step that each part's tags count from. An epilogue finishes the updates of the step before it, so it counts
    as the step after; the prologue that follows a flush then is that step."""
    steps, step = [], 0
    for i in range(len(parts)):
        if i > 0 and parts[i - 1].name != "epilogue":
            step += 1
        steps.append(step)
    return steps


def _cold_state(schedule: Schedule, ranges: list[list[_Range]]) -> None:
    """State at step 0: every plane of every block as the update of step -1 left it; everything else undefined."""
    for number, storage in enumerate(schedule.storages):
        what, _, block = storage.name.partition("[")
        if what in ("weights", "lo", "m", "v"):
            for r in ranges[number]:
                r.tag = Tag(what, int(block[:-1]), None, -1)


def _required_at_end(schedule: Schedule) -> list[tuple[int, Tag | None]]:
    """What the world outside reads after each step: losses and, in training, the norm."""
    wanted = {"loss.host"} | ({"norm"} if schedule.mode == "train" else set())
    tags = {"loss.host": None, "norm": Tag("norm")}
    return [(i, tags[s.name]) for i, s in enumerate(schedule.storages) if s.name in wanted]


def _check_end(
    schedule: Schedule, part: Part, step: int, ends: list[tuple[int, Tag | None]], cuts: list[list[int]],
    ranges: list[list[_Range]],
) -> None:  # fmt: skip
    if not any(op.kind == "loss" for op in part.ops):
        return
    for number, tag in ends:
        for i, r in enumerate(ranges[number]):
            wanted = (tag or Tag("loss", None, cuts[number][i] // 4))._replace(step=step)
            if r.tag != wanted:
                raise ScheduleError(
                    f"{part.name}: ends with {r.tag._replace(step=r.tag.step - step)} in {schedule.storages[number].name}"
                )


def _check_cold(
    schedule: Schedule, part: Part, step: int, cuts: list[list[int]], ranges: list[list[_Range]]
) -> None:
    """After the last part every plane holds one and the same step, so the next prologue finds what it reads."""
    if part.name != "epilogue":
        return
    for number, storage in enumerate(schedule.storages):
        what, _, block = storage.name.partition("[")
        if what in ("weights", "lo", "m", "v"):
            for r in ranges[number]:
                if r.tag != Tag(what, int(block[:-1]), None, step - 1):
                    raise ScheduleError(f"{part.name}: leaves {r.tag} in {storage.name}, which is no cold state")


def _cut_points(schedule: Schedule, run: Sequence[PlacedOp]) -> list[list[int]]:
    cuts: list[set[int]] = [{0, s.nbytes} for s in schedule.storages]
    for part in {id(p.op): p.op for p in run}.values():
        for a in (*part.reads, *part.writes):
            cuts[a.storage].update((a.start, a.stop))
    return [sorted(c) for c in cuts]


def _between(cuts: list[list[int]], ranges: list[list[_Range]], a: Access) -> list[_Range]:
    cut = cuts[a.storage]
    return ranges[a.storage][bisect_left(cut, a.start) : bisect_left(cut, a.stop)]


def _where(parts: Sequence[Part], placed: PlacedOp) -> str:
    return f"{parts[placed.part].name} {parts[placed.part].text(placed.position)}"


def _unordered(
    schedule: Schedule, parts: Sequence[Part], run: Sequence[PlacedOp], placed: PlacedOp, other: int, a: Access
) -> ScheduleError:
    clash = run[other]
    age = placed.part - clash.part
    name = parts[clash.part].text(clash.position)
    with_ = name if age == 0 else f"-{age}:{clash.op.name}"
    storage = schedule.storages[a.storage].name
    return ScheduleError(f"{_where(parts, placed)}: unordered hazard on {storage} with {with_}")
