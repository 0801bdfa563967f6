"""What check says, and wrong schedules that single mutations of a lowered one do not reach."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatrain.plan import Plan
from megatrain.schedule import Access, Op, Part, Schedule, ScheduleError, Tag, check, lower_evaluation
from tests.schedule.fixtures import build, tiny_model, tiny_recipe


def _with(schedule: Schedule, part: str, ops: list[Op]) -> Schedule:
    fields: dict[str, Any] = {part: Part(name=part, ops=tuple(ops))}
    return replace(schedule, **fields)


def _insert(schedule: Schedule, part: str, at: int, op: Op) -> Schedule:
    ops = [replace(o, deps=tuple(d + (d >= at) for d in o.deps)) for o in getattr(schedule, part).ops]
    return _with(schedule, part, [*ops[:at], op, *ops[at:]])


def _position(schedule: Schedule, part: str, name: str) -> int:
    return next(i for i, op in enumerate(getattr(schedule, part).ops) if op.name == name)


def _edit(schedule: Schedule, part: str, name: str, **fields: Any) -> Schedule:
    i = _position(schedule, part, name)
    ops = list(getattr(schedule, part).ops)
    ops[i] = replace(ops[i], **fields)
    return _with(schedule, part, ops)


def _serial(schedule: Schedule, *, without: Callable[[Op], bool] = lambda op: False) -> Schedule:
    """Every op waits for all ops before it, in its part and in the part before; those `without` names are left out."""
    kept = {p: [op for op in getattr(schedule, p).ops if not without(op)] for p in ("prologue", "body", "epilogue")}
    # The body and the epilogue follow either step, so they wait for what both have: its last op is among that.
    in_both = tuple(op.name for op in kept["body"] if op.name in {o.name for o in kept["prologue"]})
    for part, ops in kept.items():
        prev = () if part == "prologue" else in_both
        schedule = _with(schedule, part, [replace(op, deps=tuple(range(i)), prev=prev) for i, op in enumerate(ops)])
    return schedule


def _message(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    return str(caught.value)


# ---- messages ------------------------------------------------------------------------------------------------------------


def test_a_hazard_names_both_ops_and_the_storage() -> None:
    schedule = build(tiny_model(layers=8), weight_slots=2, update="after", chunk_bytes=0)
    load = _position(schedule, "prologue", "load[8.0]")
    reader = _position(schedule, "prologue", "forward[6.1]")
    assert _message(_edit(schedule, "prologue", "load[8.0]", deps=())) in [
        f"prologue {load}:load[8.0]: unordered hazard on slot.layer.1 with {reader - m}:forward[6.{1 - m}]" for m in (0, 1)
    ]


def test_a_hazard_with_the_part_before_says_so() -> None:
    schedule = build(update="during_backward", recipe=tiny_recipe(clip_norm=None))
    load = next(op for op in schedule.body.ops if op.kind == "load" and op.prev)
    i = _position(schedule, "body", load.name)
    assert re.fullmatch(
        rf"body {i}:{re.escape(load.name)}: unordered hazard on [\w.\[\]]+ with -1:\w+\[[\d.]+\]",
        _message(_edit(schedule, "body", load.name, prev=())),
    )


def test_a_stale_read_names_what_it_wants_and_what_it_finds() -> None:
    message = _message(_serial(build(update="after"), without=lambda op: op.name == "update[2.1]"))
    load = _position(build(update="after"), "body", "load[2.1]")
    assert message == f"body {load}:load[2.1]: reads weights[2]@-1 from weights[2], which holds weights[2]@-2"


def test_an_op_that_waits_for_a_later_one_is_named() -> None:
    schedule = build()
    later = schedule.body.text(7)
    assert _message(_edit(schedule, "body", schedule.body.ops[3].name, deps=(7,))) == (
        f"body {schedule.body.text(3)}: depends on {later}, which does not stand before it"
    )


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"lane": "h2d"}, r"runs on h2d, must run on compute"),
        ({"reads": ()}, r"must read (weights\[1\]@-1|input\[0\]@0|hidden\[1\.0\]@0) bytes 0:\d+ in device memory"),
        ({"writes": ()}, r"must write hidden\[2\.0\]@0 bytes 0:80 in device memory"),
        ({"prev": ("stash[3]",)}, r"depends on -1:stash\[3\], which the part before does not have"),
    ],
)
def test_a_broken_rule_is_named(fields: dict[str, Any], rule: str) -> None:
    schedule = build()
    i = _position(schedule, "body", "forward[1.0]")
    message = _message(_edit(schedule, "body", "forward[1.0]", **fields))
    assert re.fullmatch(rf"(body )?{i}:forward\[1\.0\]: {rule}", message), message


def test_two_ops_of_one_name_are_refused() -> None:
    schedule = build()
    message = _message(_with(schedule, "body", [*schedule.body.ops, replace(schedule.body.ops[0], prev=())]))
    assert message.endswith("input[0]: the part has an op of this name already")


# ---- wrong schedules of more than one mistake ----------------------------------------------------------------------------


def _extra_constants() -> Schedule:
    """After the norm is finished, constants made without it: the step would not be clipped."""
    schedule = build(update="after")
    storage = next(k for k, s in enumerate(schedule.storages) if s.name == "constants")
    op = Op(kind="constants", lane="cpu", writes=(Access(storage, 0, 64, Tag("constants")),))
    for part in ("prologue", "body"):
        schedule = _insert(schedule, part, _position(schedule, part, "clip") + 1, op)
    return schedule


def _clipping_too_late() -> Schedule:
    """Updates before the norm is known, under a recipe that clips."""
    schedule = build(recipe=tiny_recipe(clip_norm=None), update="during_backward")
    return replace(schedule, recipe=tiny_recipe(clip_norm=1.0))


def _two_storages_of_one_name() -> Schedule:
    """Who allocates by name gives both slots the same memory."""
    schedule = build(weight_slots=2)
    storages = [replace(s, name="slot.layer.0") if s.name == "slot.layer.1" else s for s in schedule.storages]
    return replace(schedule, storages=tuple(storages))


def _evaluates_nothing() -> Schedule:
    schedule = lower_evaluation(tiny_model(), tiny_recipe(), Plan())
    return _with(schedule, "prologue", [])


def _flush_after_bodies_only() -> Schedule:
    """The flush waits for an update that a body has and the prologue lacks: it could not follow the first step."""
    schedule = build(update="next_forward")
    first = schedule.epilogue.ops[0]
    return _edit(schedule, "epilogue", first.name, prev=(*first.prev, "update[0.0]"))


def _flush_over_another_moment() -> Schedule:
    """The last update of the flush writes one moment over that of a block updated before; no op reads either again."""
    schedule = build(update="next_forward")
    last = schedule.epilogue.ops[-1]
    other = next(k for k, s in enumerate(schedule.storages) if s.name == "m[2]")
    writes = tuple(a._replace(storage=other) if a.tag.what == "v" else a for a in last.writes)
    return _edit(schedule, "epilogue", last.name, writes=writes)


def _with_op(**fields: Any) -> Callable[[], Schedule]:
    return lambda: _insert(build(activations={"default": "keep"}), "body", 0, Op(**fields))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(_extra_constants, id="constants without the norm"),
        pytest.param(_clipping_too_late, id="clipping too late"),
        pytest.param(_two_storages_of_one_name, id="two storages of one name"),
        pytest.param(_evaluates_nothing, id="an evaluation without a loss"),
        pytest.param(_flush_after_bodies_only, id="a flush that can follow bodies only"),
        pytest.param(_flush_over_another_moment, id="a flush that overwrites a moment"),
        pytest.param(_with_op(kind="forward", lane="compute", micro=0), id="an op without a block"),
        pytest.param(_with_op(kind="loss", lane="compute"), id="an op without a micro-batch"),
        pytest.param(_with_op(kind="forward", lane="compute", block=99, micro=0), id="no such block"),
        pytest.param(_with_op(kind="forward", lane="compute", block=-2, micro=0), id="a negative block"),
        pytest.param(_with_op(kind="forward", lane="compute", block=1, micro=9), id="no such micro-batch"),
        pytest.param(_with_op(kind="stash", lane="d2h", block=1), id="no such kind"),
        pytest.param(_with_op(kind="input", lane="gpu", micro=0), id="no such lane"),
        pytest.param(_with_op(kind="load", lane="h2d", block=1, chunk=7), id="no such chunk"),
    ],
)
def test_check_refuses(wrong: Callable[[], Schedule]) -> None:
    with pytest.raises(ScheduleError):
        check(wrong())


# ---- state that passes through the device, inputs that wait on the host --------------------------------------------------

UPDATES = ("after", "next_forward", "during_backward")


def _passing(update: str = "next_forward", **plan: Any) -> Schedule:
    """Every block updated in passing, through two state slots; the inputs of the first two of four layers wait on the host."""
    fields = {"placement": {"default": "streamed_adam"}, "activations": {"default": "offload"}, "chunk_bytes": 1536, **plan}
    return build(tiny_model(layers=4), tiny_recipe(clip_norm=None), update=update, **fields)


def _number(schedule: Schedule, name: str) -> int:
    return next(k for k, s in enumerate(schedule.storages) if s.name == name)


def _moved(schedule: Schedule, accesses: tuple[Access, ...], moves: dict[str, str]) -> tuple[Access, ...]:
    """`accesses` with those to a storage of `moves` sent to another."""
    numbers = {_number(schedule, a): _number(schedule, b) for a, b in moves.items()}
    return tuple(a._replace(storage=numbers.get(a.storage, a.storage)) for a in accesses)


def _op(schedule: Schedule, part: str, name: str) -> Op:
    found: Op = getattr(schedule, part).ops[_position(schedule, part, name)]
    return found


def _slots_of(schedule: Schedule, op: Op) -> tuple[str, str]:
    """The state slot that `op` uses, and the other one."""
    names = {schedule.storages[a.storage].name.rpartition(".")[0] for a in (*op.reads, *op.writes)}
    (mine,) = (name for name in names if name.startswith("state."))
    return mine, {"state.0": "state.1", "state.1": "state.0"}[mine]


@pytest.mark.parametrize("what", ["lo", "m", "v", "grad"])
def test_a_staged_chunk_taken_from_the_wrong_state_slot_is_a_stale_read(what: str) -> None:
    schedule = _passing()
    op = _op(schedule, "body", "update[2.1]")
    mine, other = _slots_of(schedule, op)
    reads = _moved(schedule, op.reads, {f"{mine}.{what}": f"{other}.{what}"})
    # Waiting for all before it, so that nothing but the content is wrong.
    message = _message(_serial(_edit(schedule, "body", op.name, reads=reads)))
    says = rf"update\[2\.1\]: reads {what}\[2\.1\]@-\d from {other}\.{what}, which holds {what}\[2\.0\]@-\d"
    assert re.search(says, message), message


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", ["load", "update", "save"])
def test_a_chunk_that_changes_its_slot_half_way_is_refused(kind: str, update: str) -> None:
    """One of the three ops of a chunk, with all it reads and writes there, at the other slot."""
    schedule = _passing(update)
    op = _op(schedule, "body", "update[2.1]" if kind == "update" else f"{kind}[state.2.1]")
    mine, other = _slots_of(schedule, op)
    moves = {s.name: s.name.replace(mine, other) for s in schedule.storages if s.name.startswith(f"{mine}.")}
    fields = {"reads": _moved(schedule, op.reads, moves), "writes": _moved(schedule, op.writes, moves)}
    assert "which holds" in _message(_serial(_edit(schedule, "body", op.name, **fields)))
    _message(_edit(schedule, "body", op.name, **fields))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", ["load[state.2.1]", "save[state.2.1]"])
def test_a_state_copy_of_another_chunk_is_refused(name: str, update: str) -> None:
    """It copies what another chunk's op copies, and says that it is this one; the two chunks are of the same size."""
    schedule = _passing(update)
    other = _op(schedule, "body", name.replace("2.1", "2.0"))
    message = _message(_serial(_edit(schedule, "body", name, reads=other.reads, writes=other.writes)))
    assert re.search(rf"{re.escape(name)}: must read \w+\[2(\.1)?\]@-?\d bytes", message), message


@pytest.mark.parametrize("update", UPDATES)
def test_state_that_goes_to_another_chunks_place_on_the_device_is_refused(update: str) -> None:
    """The weights of a chunk, up or down, at another offset of their slot; the rest of a chunk lies on its own."""
    schedule = _passing(update)
    name = "save[state.2.1]"
    op = _op(schedule, "body", name)
    reads = tuple(
        a._replace(start=0, stop=a.nbytes) if a.tag.what == "weights" and schedule.storages[a.storage].space == "device" else a
        for a in op.reads
    )
    assert reads != op.reads
    assert "save[state.2.1]: must read weights[2]@" in _message(_serial(_edit(schedule, "body", name, reads=reads)))


@pytest.mark.parametrize("update", UPDATES)
def test_state_of_a_block_that_does_not_pass_is_refused(update: str) -> None:
    schedule = _passing(update)
    streamed = replace(schedule, plan=replace(schedule.plan, placement={"default": "streamed_adam", "1": "streamed"}))
    assert "only the state of streamed_adam blocks passes through the device" in _message(streamed)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    ("gone", "says"),
    [
        # The fetch finds what the step before left, or nothing; without it, the slot holds a later layer's input.
        (("stash",), r"fetch\[2\.0\]: reads hidden\[2\.0\]@0 from hidden\[2\], which holds nothing"),
        (("stash", "fetch"), r"backward\[2\.0\]: reads hidden\[2\.0\]@0 from islot\.\d, which holds hidden\[4\.0\]"),
        (("load state",), r"(update|forward)\[\d\.\d\]: reads \w+\[[\d.]+\]@-?\d from [\w.]+, which holds"),
        (("update",), r"which holds|leaves"),
        (("save state",), r"which holds|leaves"),
        (("load state", "update", "save state"), r"which holds|leaves"),
    ],
    ids=lambda v: " and ".join(v) if isinstance(v, tuple) else "",
)
def test_what_is_dropped_from_every_part_is_missed(gone: tuple[str, ...], says: str, update: str) -> None:
    schedule = _passing(update)

    def without(op: Op) -> bool:
        return f"{op.kind} {op.what}" in gone or (op.kind in gone and op.what is None)

    check(_serial(schedule))
    message = _message(_serial(schedule, without=without))
    assert re.search(says, message), message


@pytest.mark.parametrize(("part", "held"), [("prologue", "nothing@0"), ("body", "hidden[1.1]@-1")])
def test_one_dropped_stash_is_missed(part: str, held: str) -> None:
    """In the body, a fetch would find what the step before stashed."""
    whole = _serial(_passing())
    dropped = _serial(_with(whole, part, [op for op in getattr(whole, part).ops if op.name != "stash[1.1]"]))
    says = rf"{part} \d+:fetch\[1\.1\]: reads hidden\[1\.1\]@0 from hidden\[1\], which holds {re.escape(held)}"
    message = _message(dropped)
    assert re.fullmatch(says, message), message


@pytest.mark.parametrize("update", UPDATES)
def test_every_host_storage_that_is_copied_must_say_so(update: str) -> None:
    """Whoever registers memory with a driver goes by it. One at a time says that it is not."""
    schedule = _passing(update, placement={"default": "streamed_adam", "2": "streamed", "3": "resident"})
    said = [k for k, s in enumerate(schedule.storages) if s.copied]
    names = {schedule.storages[k].name for k in said}
    assert {"hidden[1]", "lo[1]", "m[1]", "v[1]", "weights[1]", "weights[3]", "constants"} <= names
    assert not {"lo[3]", "m[3]", "v[3]", "m[4]", "norm"} & names
    for k in said:
        storage = schedule.storages[k]
        assert storage.space == "host"
        silent = [replace(s, copied=False) if s is storage else s for s in schedule.storages]
        assert _message(replace(schedule, storages=tuple(silent))).endswith(f"{storage.name} is not said to be copied")


@pytest.mark.parametrize("update", ["after", "next_forward"])
@pytest.mark.parametrize("gone", ["load", "input", "pack", "save", "clip", "update", "loss", "backward", "forward"])
def test_a_kind_left_out_of_every_part_is_missed(update: str, gone: str) -> None:
    """Even where all that remains waits for everything before it, so that no order is missing."""
    message = _message(_serial(build(update=update), without=lambda op: op.kind == gone))
    assert re.search("which holds|ends with|leaves|has no loss", message), message


@pytest.mark.parametrize("update", ["after", "next_forward"])
def test_waiting_for_everything_passes(update: str) -> None:
    """The control of the test above."""
    check(_serial(build(update=update)))
