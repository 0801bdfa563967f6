"""Lowering: (ModelSpec, Recipe, Plan) to a Schedule. The one place where order, overlap and buffer use are decided.

The method: emit the ops of a step in an order that one lane could run them in, each with the bytes it reads and writes. A
tracker knows, for every range of every storage, its last writer and its readers since; from these it derives the deps. Deps
that lane order or other deps already imply are left out, so every dep left matters. Overlap then needs no decision: a load
depends on the last reader of its slot and on nothing else, and runs as far ahead as slots and its lane allow.

The body is emitted twice after the prologue; both must come out equal, which proves the steady state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megatrain.model import ModelSpec, check_sequence
from megatrain.plan import Plan
from megatrain.recipe import DTYPE_NBYTES, Recipe
from megatrain.schedule.hazards import Hazards
from megatrain.schedule.layout import (
    CONSTANTS_NBYTES,
    LOSS_NBYTES,
    NORM_NBYTES,
    BlockPlace,
    Storages,
    input_nbytes,
    place_blocks,
    state_planes,
)  # fmt: skip
from megatrain.schedule.nouns import Access, Kind, Lane, Op, Part, Schedule, Tag


def lower(model: ModelSpec, recipe: Recipe, plan: Plan, *, proven: bool = True) -> Schedule:
    """The training schedule. ValueError when the recipe or plan asks for what cannot be done on this model.

    `proven` False leaves out the proof of the steady state, a third of the work: for a search, whose result is lowered again.
    """
    if plan.update == "during_backward" and recipe.clip_norm is not None:
        raise ValueError("plan.update: during_backward updates before the norm is known; it needs recipe.clip_norm: null")
    check_sequence(model, recipe.seq_len)
    step = _Step(model, recipe, plan)
    pending = plan.update == "next_forward"
    step.train(warm=False)
    prologue = step.close("prologue")
    step.train(warm=pending)
    body = step.close("body")
    if proven:
        step.train(warm=pending)
        if body != step.close("body"):
            raise RuntimeError("lowering: the body has no steady state")  # a bug of ours, whatever the plan
    if pending:
        step.pending_updates(step.places)
    epilogue = step.close("epilogue")
    return step.schedule("train", prologue, body, epilogue)


def lower_evaluation(model: ModelSpec, recipe: Recipe, plan: Plan) -> Schedule:
    """Forward and loss only, over the storages of the training schedule, from the cold state to the cold state."""
    check_sequence(model, recipe.seq_len)
    step = _Step(model, recipe, plan)
    step.evaluate()
    empty = {name: Part(name=name, ops=()) for name in ("body", "epilogue")}
    return step.schedule("evaluate", step.close("prologue"), **empty)


class _Step:
    """Emits the ops of a step; state outlives a step only in `hazards` (who touched which bytes last)."""

    def __init__(self, model: ModelSpec, recipe: Recipe, plan: Plan) -> None:
        self.model, self.recipe, self.plan = model, recipe, plan
        self.places = place_blocks(model, recipe, plan)
        self.storages = Storages(model, recipe, plan, self.places)
        self.weight_nbytes = DTYPE_NBYTES[recipe.precision]
        self.link_nbytes = DTYPE_NBYTES[recipe.gradient_dtype]
        self.hidden_nbytes = model.hidden_nbytes(recipe.tokens_per_micro_batch, self.weight_nbytes)
        self.input_nbytes = input_nbytes(model, recipe)
        self.micro_batches = range(recipe.micro_batches)
        self.hazards = Hazards(self.storages.table)
        self.ops: list[Op] = []
        self.names: dict[str, int] = {}
        self.previous: Part | None = None
        self._reset_slots()

    # ---- whole steps -------------------------------------------------------------------------------------------------

    def train(self, *, warm: bool) -> None:
        """One step. `warm`: the updates of the step before are pending and run just before their blocks are needed."""
        self._reset_slots()
        policy, head = self.plan.update, self.places[-1]
        self._inputs()
        for place in self.places[:-1]:
            if warm:
                self.pending_updates([place])
            self._forward(place, training=True)
        if warm:
            self.pending_updates([head])
        self._loss(training=True)
        if policy == "during_backward":
            # Here and not at the start of the step: the copy on the device is read until the last update of the step before,
            # and nothing may queue behind that wait.
            self._emit("constants", "cpu", writes=[self._constants("constants")])
            self._load_constants()
        self._pack_and_save(head)
        for place in reversed(self.places[:-1]):
            self._fetch(place)
            self._backward(place)
            self._pack_and_save(place)
        whole = (0, 4 * head.tiles[1], Tag("partials"))
        self._copy("save", "norm", self._at("partials", *whole), self._at("partials.host", *whole))
        clip = [self._at("norm", 0, NORM_NBYTES, Tag("norm"))]
        if policy != "during_backward":
            clip.append(self._constants("constants"))
        self._emit("clip", "cpu", reads=[self._at("partials.host", *whole)], writes=clip)
        if policy != "during_backward":
            self._load_constants()
        for place in self.places:
            if policy == "after" or place.waits:
                self._update(place, step=0)

    def evaluate(self) -> None:
        self._inputs()
        for place in self.places[:-1]:
            self._forward(place, training=False)
        self._loss(training=False)

    def pending_updates(self, places: Iterable[BlockPlace]) -> None:
        """The updates that the gradients of the step before ask for."""
        for place in places:
            self._update(place, step=-1)

    # ---- parts of a step ---------------------------------------------------------------------------------------------

    def _inputs(self) -> None:
        # `after` means what it says: the next step begins when every update has ended.
        barrier = tuple(i for i in self._last_updates()) if self.plan.update == "after" else ()
        for m in self.micro_batches:
            self._emit("input", "h2d", micro=m, writes=[self._input(m)], after=barrier if m == 0 else ())

    def _forward(self, place: BlockPlace, *, training: bool) -> None:
        b, following = place.spec.index, self.places[place.spec.index + 1]
        weights = self._weights(place)
        if following.offload:
            self._take_slot(self.storages.input_slots, b + 1)
        for m in self.micro_batches:
            reads = [weights, self._input(m)]
            if b > 0:
                reads.append(self._hidden(b, m))
            writes = [self._hidden(b + 1, m)]  # used after the input, so that the input's slot is the next to go
            if place.keep and training:
                writes.append(self._saved(b, m))
            self._emit("forward", "compute", block=b, micro=m, reads=reads, writes=writes)
            if b + 1 in self.storages.stashed and training:
                self._copy("stash", None, self._hidden(b + 1, m), self._waiting(b + 1, m), block=b + 1, micro=m)

    def _fetch(self, place: BlockPlace) -> None:
        """The input of an offloaded layer comes back, unless a slot still holds it."""
        b, slots = place.spec.index, self.storages.input_slots
        if place.offload and all(self.held.get(s) != b for s in slots):
            self._take_slot(slots, b)
            for m in self.micro_batches:
                self._copy("fetch", None, self._waiting(b, m), self._hidden(b, m), block=b, micro=m)

    def _loss(self, *, training: bool) -> None:
        head, embedding = self.places[-1], self.places[0]
        b = head.spec.index
        weights = [self._weights(head)]
        if head.spec.tied:
            weights.append(self._weights(embedding))
        for m in self.micro_batches:
            reads = [*weights, self._input(m), self._hidden(b, m)]
            writes = [self._at("loss", LOSS_NBYTES * m, LOSS_NBYTES * (m + 1), Tag("loss", None, m))]
            if training:
                writes += [self._dhidden(b, m), self._accumulated(head, m)]
                if head.spec.tied:
                    writes.append(self._accumulated(embedding, m))
                if m > 0:
                    reads += [self._accumulated(p, m - 1) for p in (head, embedding)[: 1 + head.spec.tied]]
            self._emit("loss", "compute", micro=m, reads=reads, writes=writes)
        losses = [(LOSS_NBYTES * m, LOSS_NBYTES * (m + 1), Tag("loss", None, m)) for m in self.micro_batches]
        reads = [self._at("loss", *x) for x in losses]
        on_host = [self._at("loss.host", *x) for x in losses]
        self._emit("save", "d2h", what="loss", reads=reads, writes=on_host)
        self._emit("report", "cpu", reads=on_host)

    def _backward(self, place: BlockPlace) -> None:
        b = place.spec.index
        # A tied embedding's accumulator already holds the head's share, one contribution a micro-batch.
        earlier = len(self.micro_batches) if b == 0 and self.places[-1].spec.tied else 0
        weights = [self._weights(place)] if b > 0 else []
        for m in self.micro_batches:
            reads = [*weights, self._input(m), self._dhidden(b + 1, m)]
            writes = [self._accumulated(place, earlier + m)]
            if b > 0:
                reads.append(self._hidden(b, m))
                writes.append(self._dhidden(b, m))
            if place.keep:
                reads.append(self._saved(b, m))
            if earlier + m > 0:
                reads.append(self._accumulated(place, earlier + m - 1))
            self._emit("backward", "compute", block=b, micro=m, reads=reads, writes=writes)

    def _pack_and_save(self, place: BlockPlace) -> None:
        b, policy = place.spec.index, self.plan.update
        tied = self.places[-1].spec.tied
        last = len(self.micro_batches) * (2 if b == 0 and tied else 1) - 1
        if place.resident and policy != "during_backward":
            target = self.storages.index[f"grad[{b}]"]
        else:
            target = self._take(self.storages.gradient_slots[place.size_class])
        tag = Tag("grad", b)
        packed = Access(target, 0, place.spec.span * self.link_nbytes, tag)
        start, stop = (4 * t for t in place.tiles)
        partials = self._at("partials", start, stop, Tag("partials"))
        self._emit("pack", "compute", block=b, reads=[self._accumulated(place, last)], writes=[packed, partials])
        if place.resident:
            if policy == "during_backward":
                self._update(place, step=0, gradient=target)
            return
        if place.passes and policy == "during_backward":
            self._update(place, step=0, gradient=target)
            return
        at_once = policy == "during_backward" and not place.waits
        host = self._take(self.storages.host_gradient_slots[place.size_class]) if at_once else self.storages.index[f"grad[{b}]"]
        for c, (first, end) in enumerate(place.chunks):
            span = (first * self.link_nbytes, end * self.link_nbytes, tag)
            self._copy("save", None, Access(target, *span), Access(host, *span), block=b, chunk=c)
        if at_once:
            self._update(place, step=0, gradient=host)

    def _update(self, place: BlockPlace, *, step: int, gradient: int | None = None) -> None:
        """AdamW with the gradient of `step`: on the lane of the space where the block's state lives, or passes through."""
        if place.passes:
            self._update_passing(place, step=step, gradient=gradient)
            return
        b = place.spec.index
        source = self.storages.index[f"grad[{b}]"] if gradient is None else gradient
        lane: Lane = "compute" if place.resident else "cpu"
        constants = "constants.device" if place.resident else "constants"
        chunks = [(None, (0, place.spec.span))] if place.resident else list(enumerate(place.chunks))
        for c, (first, end) in chunks:
            state = [
                (self.storages.index[f"{what}[{b}]"], first * size, end * size, Tag(what, b, None, step))
                for what, size in state_planes(self.recipe)
            ]
            reads = [Access(s, i, j, tag.aged()) for s, i, j, tag in state]
            reads.append(Access(source, first * self.link_nbytes, end * self.link_nbytes, Tag("grad", b, None, step)))
            reads.append(self._constants(constants, step))
            self._emit("update", lane, block=b, chunk=c, reads=reads, writes=[Access(*s) for s in state])

    def _update_passing(self, place: BlockPlace, *, step: int, gradient: int | None) -> None:
        """Chunk by chunk the block's state goes up, is updated and goes down. The weights are updated in the slot that the
        block's next forward reads, so they go up once for both. `gradient`: where the packed gradient still is on the device;
        then the weights of the backward are there as well."""
        b, tied_up = place.spec.index, gradient is not None
        slot = self._weights(place).storage if tied_up else self._take_slot(self.storages.weight_slots[place.size_class], b)
        for c, (first, end) in enumerate(place.chunks):
            staged = min(self.storages.state_slots, key=lambda s: (self.used.get(s["m"], -1), s["m"]))
            host, device = [], []
            for what, size in state_planes(self.recipe):
                old = Tag(what, b, None, step - 1)
                host.append(Access(self.storages.index[f"{what}[{b}]"], first * size, end * size, old))
                if what == "weights":
                    device.append(Access(slot, first * size, end * size, old))
                else:
                    device.append(Access(staged[what], 0, (end - first) * size, old._replace(micro=c)))
            span, tag = (first * self.link_nbytes, end * self.link_nbytes), Tag("grad", b, None, step)
            up, down = list(host), list(device)
            if gradient is None:
                up.append(Access(self.storages.index[f"grad[{b}]"], *span, tag))
                grad = Access(staged["grad"], 0, span[1] - span[0], tag._replace(micro=c))
                down.append(grad)
            else:
                del up[0], down[0]  # the weights
                grad = Access(gradient, *span, tag)
            self._emit("load", "h2d", block=b, chunk=c, what="state", reads=up, writes=down)
            updated = [a._replace(tag=a.tag._replace(step=step)) for a in device]
            reads = [*device, grad, self._constants("constants.device", step)]
            self._emit("update", "compute", block=b, chunk=c, reads=reads, writes=updated)
            there = [a._replace(tag=a.tag._replace(step=step)) for a in host]
            self._emit("save", "d2h", block=b, chunk=c, what="state", reads=updated, writes=there)
            for storage in (staged["m"], slot, *(() if gradient is None else (gradient,))):
                self._use(storage)
        if step == 0:
            del self.held[slot]  # what it holds is the next step's

    def _load_constants(self) -> None:
        if any(p.resident or p.passes for p in self.places):
            self._copy("load", "constants", self._constants("constants"), self._constants("constants.device"))

    # ---- where things are --------------------------------------------------------------------------------------------

    def _weights(self, place: BlockPlace) -> Access:
        """The whole block's weights on the device, loaded now unless a slot still holds them."""
        b, nbytes = place.spec.index, place.spec.span * self.weight_nbytes
        tag = Tag("weights", b, None, -1)
        home = self.storages.index[f"weights[{b}]"]
        if place.resident:
            return Access(home, 0, nbytes, tag)
        pool = [self.storages.own_slots[b]] if place.stays else self.storages.weight_slots[place.size_class]
        slot = next((s for s in pool if self.held.get(s) == b), None)
        if slot is None:
            slot = self._take_slot(pool, b)
            for c, (first, end) in enumerate(place.chunks):
                span = (first * self.weight_nbytes, end * self.weight_nbytes, tag)
                self._copy("load", None, Access(home, *span), Access(slot, *span), block=b, chunk=c)
        self._use(slot)
        return Access(slot, 0, nbytes, tag)

    def _take_slot(self, pool: list[int], b: int) -> int:
        """A slot that will hold something of block `b`; no other of the pool does from now on."""
        for other in pool:
            if self.held.get(other) == b:
                del self.held[other]
        slot = self._take(pool)
        self.held[slot] = b
        return slot

    def _take(self, pool: list[int]) -> int:
        """The slot whose last use in this step comes first; of unused ones that of the lowest index."""
        slot = min(pool, key=lambda s: (self.used.get(s, -1), s))
        self._use(slot)
        return slot

    def _use(self, slot: int) -> None:
        self.uses += 1
        self.used[slot] = self.uses

    def _reset_slots(self) -> None:
        # Every weight changes in every step, so nothing a slot holds outlives one. Starting each step from the same order
        # makes the body its own successor, and costs nothing: the first load waits for an update that comes after the last
        # backward of its pool.
        self.held: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.uses = 0

    def _at(self, storage: str, start: int, stop: int, tag: Tag) -> Access:
        return Access(self.storages.index[storage], start, stop, tag)

    def _constants(self, storage: str, step: int = 0) -> Access:
        return self._at(storage, 0, CONSTANTS_NBYTES, Tag("constants", None, None, step))

    def _input(self, m: int) -> Access:
        return self._at("input", m * self.input_nbytes, (m + 1) * self.input_nbytes, Tag("input", None, m))

    def _hidden(self, b: int, m: int) -> Access:
        """A block's input on the device: where it stays, or in the slot that holds it now."""
        n = self.hidden_nbytes
        if self.places[b].offload:
            storage = next(s for s in self.storages.input_slots if self.held.get(s) == b)
            self._use(storage)
        else:
            storage = self.storages.index[f"hidden[{b}]"]
        return Access(storage, m * n, (m + 1) * n, Tag("hidden", b, m))

    def _waiting(self, b: int, m: int) -> Access:
        """An offloaded layer's input on the host."""
        n = self.hidden_nbytes
        return self._at(f"hidden[{b}]", m * n, (m + 1) * n, Tag("hidden", b, m))

    def _dhidden(self, b: int, m: int) -> Access:
        n = self.hidden_nbytes
        return self._at("dhidden", m * n, (m + 1) * n, Tag("dhidden", b, m))

    def _saved(self, b: int, m: int) -> Access:
        name = f"saved[{b}.{m}]"
        return self._at(name, 0, self.storages.table[self.storages.index[name]].nbytes, Tag("saved", b, m))

    def _accumulated(self, place: BlockPlace, contribution: int) -> Access:
        tag = Tag("acc", place.spec.index, contribution)
        storage = f"acc.{place.size_class}" if self.places[-1].spec.tied else "acc"
        return self._at(storage, 0, 4 * place.spec.span, tag)

    # ---- emitting ----------------------------------------------------------------------------------------------------

    def _copy(
        self,
        kind: Literal["load", "save", "stash", "fetch"],
        what: str | None,
        source: Access,
        target: Access,
        *,
        block: int | None = None,
        micro: int | None = None,
        chunk: int | None = None,
    ) -> None:
        lane: Lane = "h2d" if kind in ("load", "fetch") else "d2h"
        self._emit(kind, lane, block=block, micro=micro, chunk=chunk, what=what, reads=[source], writes=[target])

    def _emit(
        self,
        kind: Kind,
        lane: Lane,
        *,
        block: int | None = None,
        micro: int | None = None,
        chunk: int | None = None,
        what: str | None = None,
        reads: Iterable[Access] = (),
        writes: Iterable[Access] = (),
        after: tuple[int, ...] = (),
    ) -> None:
        reads, writes = tuple(reads), tuple(writes)
        op = Op(kind=kind, lane=lane, block=block, micro=micro, chunk=chunk, what=what, reads=reads, writes=writes)
        name = op.name
        count = self.names[name] = self.names.get(name, 0) + 1
        inside, before = self.hazards.order(op, after)
        previous = tuple(self.previous.ops[i].name for i in before) if self.previous is not None else ()
        self.ops.append(
            Op(
                kind=kind, lane=lane, block=block, micro=micro, chunk=chunk, what=what, nth=count,
                reads=reads, writes=writes, deps=inside, prev=previous,
            )
        )  # fmt: skip

    def _last_updates(self) -> list[int]:
        """The last update on each lane of the part before, as positions relative to this part (negative)."""
        if self.previous is None:
            return []
        ops = self.previous.ops
        last = {op.lane: i - len(ops) for i, op in enumerate(ops) if op.kind == "update"}
        return list(last.values())

    def close(self, name: str) -> Part:
        """End the part being emitted; the next one follows it."""
        self.previous = Part(name=name, ops=tuple(self.ops))
        self.ops, self.names = [], {}
        self.hazards.next_part()
        return self.previous

    def schedule(self, mode: Literal["train", "evaluate"], prologue: Part, body: Part, epilogue: Part) -> Schedule:
        return Schedule(
            model=self.model, recipe=self.recipe, plan=self.plan, mode=mode, storages=tuple(self.storages.table),
            prologue=prologue, body=body, epilogue=epilogue,
        )  # fmt: skip
