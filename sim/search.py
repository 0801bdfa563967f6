"""The search: which of many plans simulates fastest, within two memories.

What is searched are *choices* (`sim.choice`), in three stages:

1. *Fill.* For each update policy, with few slots and with many, memory is filled in several ways: with resident blocks first,
   with kept activations first, and in between.
2. *Descend.* From the best few, one decision at a time is changed, and memory refilled or given back; the best change is taken
   until none helps. In both, transfers are whole blocks: such a schedule simulates in hundredths of a second and ranks plans
   nearly as a finely cut one.
3. *Cut.* For the best few, chunk sizes are tried, and slots and threads once more at the best size.

Nothing is simulated that does not fit (`sim.ledger`) or that a lower bound (`sim.bounds`) shows to be no better than what the
search has to beat. Effort is counted in ops lowered, not in seconds, so that one question has one answer on any machine.

Not covered: this is a local search. Its result is no worse than any of its starts, among them the default plan where it fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from megatrain.hardware import HardwareProfile
from megatrain.model import ModelSpec
from megatrain.plan import Placement, Plan
from megatrain.recipe import DTYPE_NBYTES, Recipe
from megatrain.schedule import Schedule, lower
from sim.bounds import StepBounds
from sim.choice import Choice, Where, adam_thread_counts, policies, with_kept, with_resident
from sim.ledger import Shortage, ledger, shortages
from sim.quick import quick_step_ns
from sim.sweep import Progress

QUICK_STEPS = 3
"""Steps simulated while searching; the winner and what it is compared with run the full number."""
GAIN = 0.0005
"""A change that brings less than this part of a step is taken only if it needs less memory."""
MOST_OPS = 6000
"""Chunks are not cut so fine that a step has more ops than this."""
VOCABULARY: tuple[tuple[Placement, Placement], ...] = (
    ("resident", "resident"), ("streamed", "streamed"), ("streamed", "resident"), ("resident", "streamed"),
    ("streamed_adam", "streamed"), ("streamed_adam", "resident"), ("streamed_adam", "streamed_adam"),
)  # fmt: skip
"""Where embedding and head are."""
SMALL_CHUNK = 16 << 20
"""Chunks of the smallest plans where blocks pass through the device, bytes."""
PASSING_PIECES = 4
"""Where blocks pass through the device for their update, transfers are not whole layers but quarters of one: each piece in flight
takes a buffer."""


class Scored(NamedTuple):
    """A choice with its simulated step. `size` breaks ties: bytes on the device, then on the host."""

    step_ns: int
    size: tuple[int, int]
    choice: Choice


Timed = dict[tuple[object, ...], tuple[int, int]]
"""(step in ns, ops in a step) by the values of a plan. A step's time does not depend on how much memory there is."""


class Search:
    """One search. `considered` counts choices, of which `short` are short of memory, `bounded` no better by a lower bound; the
    others are `simulated`. `short_of` are the memories that any of them was short of. `timed` is what is known of steps on this
    machine, or on one with other memories; it grows."""

    def __init__(
        self, model: ModelSpec, recipe: Recipe, hardware: HardwareProfile, bounds: StepBounds | None, progress: Progress | None,
        timed: Timed | None = None,
    ) -> None:  # fmt: skip
        self.model, self.recipe, self.hardware, self.bounds = model, recipe, hardware, bounds
        self.layers = model.n_layers
        self.threads = adam_thread_counts(hardware, recipe)
        self.considered = self.short = self.bounded = self.simulated = self.ops = 0
        self.short_of: set[str] = set()
        self.scored: dict[Choice, Scored] = {}
        self.timed: Timed = {} if timed is None else timed
        self._lowered: Schedule | None = None
        self._books: dict[Choice, tuple[tuple[Shortage, ...], tuple[int, int]]] = {}
        self.progress = progress or (lambda text, count: None)

    # ---- memory --------------------------------------------------------------------------------------------------------

    def memory(self, choice: Choice) -> tuple[tuple[Shortage, ...], tuple[int, int]]:
        """What a choice lacks, and its (device, host) bytes in a step. Threads take no memory, nor do most chunks."""
        key = replace(choice, chunk_bytes=choice.chunk_bytes if choice.passes else 0, adam_threads=1)
        found = self._books.get(key)
        if found is None:
            book = ledger(self.model, self.recipe, key.plan(self.layers), self.hardware)
            found = self._books[key] = (shortages(book, self.hardware), (book.device_nbytes(), book.host_nbytes()))
            self.short_of.update(s.space for s in found[0])
            if found[0]:
                self.short += 1
                self.considered += 1
        return found

    def lacks(self, choice: Choice, space: str | None = None) -> bool:
        """Whether a choice lacks memory, of one space or of any."""
        return any(space in (None, s.space) for s in self.memory(choice)[0])

    def fit(self, choice: Choice, *, kept_first: bool = False) -> Choice | None:
        """The nearest choice that fits, with the same slots: at most as many resident layers and as many kept, the one before the
        other; more resident ones only where the host is too small. None if there is none.

        With more resident layers the device needs more and the host no more, so both are found by bisection.
        """
        bare = replace(choice, kept=0)
        lowest = first_true(0, self.layers, lambda r: not self.lacks(with_resident(bare, r), "host"))
        if lowest is None or self.lacks(with_resident(bare, lowest)):
            return None
        found = with_resident(bare, lowest)
        counts = [(with_resident, lowest, max(choice.resident, lowest)), (with_kept, 0, choice.kept)]
        for change, low, high in reversed(counts) if kept_first else counts:
            found = self._most(found, change, low, high)
        return found

    def any_fits(self) -> bool:
        """Whether any plan fits."""
        return any(self.fit(smallest) is not None for smallest in self.smallest())

    def smallest_lacks(self) -> tuple[Shortage, ...]:
        """Nothing if any plan fits, else what the nearest one lacks: of plans with one slot each and nothing kept, the one that
        lacks fewest bytes, with all state on the host or with as much on the device as that has room for."""
        found: list[tuple[Shortage, ...]] = []
        for smallest in self.smallest():
            if self.fit(smallest) is not None:
                return ()
            found.append(self.memory(smallest)[0])
            on_device = last_true(
                0, self.layers, lambda r, c=smallest: not self.lacks(with_resident(c, r), "device")  # type: ignore[misc]
            )
            if on_device:
                found.append(self.memory(with_resident(smallest, on_device))[0])
        return min(found, key=lambda lacks: sum(s.need - s.have for s in lacks))

    def smallest(self) -> Iterator[Choice]:
        """Plans with one slot each and nothing kept: of every policy, with inputs here or away, with layers updated by the CPU or
        in passing (which needs no host buffer for a gradient under `during_backward`)."""
        both: tuple[Placement, Placement] = ("streamed_adam", "streamed_adam")
        ways = [(where, 0) for where in (*VOCABULARY[:4], both)] + [(both, self.layers), (("resident", "resident"), self.layers)]
        for update, ((embedding, head), passing), offloaded in itertools.product(policies(self.recipe), ways, (0, self.layers)):
            choice = Choice(
                update=update, adam_threads=1, embedding=embedding, head=head, offloaded=offloaded, passing=passing, state_slots=1
            )  # fmt: skip
            yield replace(choice, chunk_bytes=SMALL_CHUNK) if choice.passes else choice

    def _most(self, choice: Choice, change: Callable[[Choice, int], Choice], low: int, high: int) -> Choice:
        """`choice` changed with the largest number of low..high that fits; `choice`, which fits, if none does."""
        count = last_true(low, high, lambda n: not self.lacks(change(choice, n)))
        return choice if count is None else change(choice, count)

    # ---- scores --------------------------------------------------------------------------------------------------------

    def score(self, choice: Choice | None, beat_ns: int | None = None) -> Scored | None:
        """The choice simulated; None if it does not fit or cannot be faster than `beat_ns`."""
        if choice is None:
            return None
        found = self.scored.get(choice)
        if found is not None:
            return found
        short, size = self.memory(choice)
        if short:
            return None
        self.considered += 1
        plan = choice.plan(self.layers)
        # An equal one may still need less memory, but that is not worth a simulation.
        if beat_ns is not None and self.bounds is not None and self.bounds.step_ns(plan) >= beat_ns:
            self.bounded += 1
            return None
        step_ns, ops = self.simulate(plan)
        self.simulated += 1
        found = self.scored[choice] = Scored(step_ns, size, choice)
        self.ops += ops
        return found

    def simulate(self, plan: Plan) -> tuple[int, int]:
        """(step time in ns, ops in a step) of a plan, each plan once: several choices may be the same. Most of the time goes into
        lowering; plans that follow each other and differ only in threads, which no op knows of, share a schedule."""
        key = tuple(tuple(x.items()) if isinstance(x, Mapping) else x for x in (getattr(plan, f.name) for f in fields(plan)))
        if key not in self.timed:
            if self._lowered is None or replace(self._lowered.plan, adam_threads=plan.adam_threads) != plan:
                self._lowered = lower(self.model, self.recipe, plan, proven=False)
            schedule = replace(self._lowered, plan=plan)
            self.timed[key] = quick_step_ns(schedule, self.hardware, steps=QUICK_STEPS), len(schedule.body.ops)
        return self.timed[key]

    # ---- the three stages ----------------------------------------------------------------------------------------------

    def fill(self, budget_ops: int) -> list[Scored]:
        """Stage 1: the starts that fit, best first; empty if nothing fits. Beyond `budget_ops`, only the first way of each update
        policy is tried."""
        best: Scored | None = None
        for update in policies(self.recipe):
            self.progress(f"filling memory, {update}", self.simulated)
            for weight, gradient, host in ((2, 2, 2), (3, 3, 6), (1, 1, 1)):
                if best is not None and (weight == 1 or (weight > 2 and self.ops >= budget_ops)):
                    continue  # the smallest buffers only where no others fit
                base = Choice(
                    update=update, adam_threads=self.threads[0], weight_slots=weight, gradient_slots=gradient,
                    host_gradient_slots=host,
                )  # fmt: skip
                for n, (embedding, head) in enumerate(VOCABULARY[:4]):
                    if best is not None and (n > 1 or (n > 0 and self.ops >= budget_ops)):
                        break  # these differ little from the first two; descending tries them
                    at = replace(base, embedding=embedding, head=head)
                    for choice in self.fillings(at):
                        scored = self.score(choice, best.step_ns if best is not None else None)
                        best = scored if best is None or (scored is not None and order(scored) < order(best)) else best
        return sorted(self.scored.values(), key=order)

    def fillings(self, at: Choice) -> list[Choice]:
        """Memory filled with resident layers first, with kept activations first, half and half, and not at all."""
        wanted = replace(at, resident=self.layers, kept=self.layers)
        full = self.fit(wanted)
        if full is None and not at.offloaded:
            return self.fillings(replace(at, offloaded=self.layers))  # only where inputs leave no other room
        if full is None:
            return []
        found = [full, self.fit(wanted, kept_first=True), self.fit(replace(wanted, resident=full.resident // 2)), self.fit(at)]
        return list(dict.fromkeys(choice for choice in found if choice is not None))

    def descend(self, start: Scored, budget_ops: int) -> Scored:
        """Stage 2: change one decision at a time while it helps, for at most `budget_ops` more ops."""
        best, end = start, self.ops + budget_ops
        moved = True
        while moved and self.ops < end:
            moved = False
            for group in (
                self._placements, self._passing, self._staying, self._waiting, self._kept, self._offloaded, self._places,
                self._slots, self._threads, self._policies,
            ):  # fmt: skip
                self.progress(f"descending, {best.step_ns / 1e9:.3f} s a step", self.simulated)
                better = self._best_of(group(best.choice), best, end)
                if better is not None:
                    best, moved = better, True
        return best

    def cut(self, start: Scored, budget_ops: int) -> Scored:
        """Stage 3: the chunk size, then slots and threads at that size."""
        end = self.ops + budget_ops
        self.progress("choosing chunks", self.simulated)
        sizes = (self.fit(replace(start.choice, chunk_bytes=size)) for size in self.chunk_sizes(start.choice))
        best = self._best_of(sizes, start, end) or start
        if best.choice.chunk_bytes:
            for group in (self._slots, self._threads):
                best = self._best_of(group(best.choice), best, end) or best
        return best

    def _best_of(self, choices: Iterable[Choice | None], now: Scored, end_ops: int) -> Scored | None:
        """The best of `choices` if it is better than `now`."""
        best = now
        for choice in choices:
            if self.ops >= end_ops:
                break
            scored = self.score(choice, best.step_ns)
            if scored is not None and _better(scored, best):
                best = scored
        return None if best is now else best

    def best(self, starts: int, descend_ops: int, cut_ops: int) -> list[Scored]:
        """All three stages: the best of each of several starts, best first."""
        found = _distinct(self.fill(descend_ops), starts)
        if not found:  # only what is smallest fits
            tried = (self.score(self.fit(replace(choice, adam_threads=self.threads[0]))) for choice in self.smallest())
            found = [scored for scored in tried if scored is not None][:starts]
        return self.improve(found, descend_ops, cut_ops)

    def improve(self, starts: Sequence[Scored], descend_ops: int, cut_ops: int) -> list[Scored]:
        """Stages 2 and 3 from given starts."""
        descended = sorted({self.descend(start, descend_ops) for start in starts}, key=order)
        return sorted({self.cut(scored, cut_ops) for scored in descended[:2]} | set(descended[2:]), key=order)

    # ---- changes -------------------------------------------------------------------------------------------------------

    def _placements(self, now: Choice) -> Iterator[Choice | None]:
        for change in (-8, -4, -2, -1, 1, 2, 4, 8):
            if 0 <= now.resident + change <= self.layers:
                yield self.fit(replace(now, resident=now.resident + change, kept=self.layers))
        for embedding, head in VOCABULARY:
            if (embedding, head) != (now.embedding, now.head):
                at = self._cut_to_pass(replace(now, embedding=embedding, head=head))
                for resident in (now.resident, self.layers):
                    yield self.fit(replace(at, resident=resident, kept=self.layers))

    def _passing(self, now: Choice) -> Iterator[Choice | None]:
        for change in (-self.layers, -8, -4, -2, -1, 1, 2, 4, 8):
            count = min(self.layers - now.resident, max(0, now.passing + change))
            if count != now.passing:
                at = self._cut_to_pass(replace(now, passing=count))
                yield self.fit(at)
                if self.recipe.clip_norm is None:
                    yield self.fit(replace(at, passing_at="spread"))
                if at.embedding == "streamed" and count > now.passing:  # else the CPU's update of it comes before them all
                    yield self.fit(replace(at, embedding="streamed_adam"))

    def _cut_to_pass(self, choice: Choice) -> Choice:
        """The choice with pieces small enough to have some in flight, if blocks pass through the device."""
        if not choice.passes or choice.chunk_bytes:
            return choice
        layer = self.model.layers[0].span * DTYPE_NBYTES[self.recipe.precision]
        return replace(choice, chunk_bytes=-(-layer // (PASSING_PIECES * 256)) * 256)

    def _offloaded(self, now: Choice) -> Iterator[Choice | None]:
        for change in (-self.layers, -4, -2, -1, 1, 2, 4, self.layers):
            count = min(self.layers, max(0, now.offloaded + change))
            if count != now.offloaded:
                at = replace(now, offloaded=count)
                yield self.fit(at)
                yield self.fit(replace(at, resident=self.layers, kept=self.layers))
                yield self.fit(replace(at, kept=self.layers), kept_first=True)

    def _staying(self, now: Choice) -> Iterator[Choice | None]:
        for change in (-self.layers, -4, -2, -1, 1, 2, 4, self.layers):
            count = min(self.layers - now.resident, max(0, now.staying + change))
            if count != now.staying:
                yield self.fit(replace(now, staying=count))

    def _waiting(self, now: Choice) -> Iterator[Choice | None]:
        if now.update != "during_backward":
            return
        for change in (-self.layers, -1, 1, 2, 4):
            count = min(self.layers - now.resident - now.passing, max(0, now.waiting + change))
            if count != now.waiting:
                yield self.fit(replace(now, waiting=count))
            if now.passing and count > now.waiting + 1:  # blocks that pass through the device relieve the CPU as well
                yield self.fit(replace(now, waiting=count, passing=max(0, now.passing - 2)))
        for of in (2, 3, self.layers):
            if now.waiting and of != now.waiting_of:
                yield self.fit(replace(now, waiting_of=of))

    def _kept(self, now: Choice) -> Iterator[Choice | None]:
        for change in (-self.layers, -4, -2, -1, 1, 2, 4):
            yield self.fit(replace(now, kept=min(self.layers, max(0, now.kept + change))))

    def _places(self, now: Choice) -> Iterator[Choice | None]:
        wheres: tuple[Where, ...] = ("first", "last", "spread")
        for where in wheres:
            yield self.fit(replace(now, resident_at=where))
            yield self.fit(replace(now, kept_at=where))
            yield self.fit(replace(now, passing_at=where))

    def _slots(self, now: Choice) -> Iterator[Choice | None]:
        changed = [replace(now, weight_slots=n) for n in (1, 2, 3, 4)]
        changed += [replace(now, vocab_slots=n) for n in (1, 2)]
        changed += [replace(now, gradient_slots=n) for n in (1, 2, 3, 4)]
        if now.update == "during_backward":
            changed += [replace(now, host_gradient_slots=n) for n in (1, 2, 3, 4, 6, 8)]
        if now.passes:
            changed += [replace(now, state_slots=n) for n in (1, 2, 3, 4)]
        if now.offloaded:
            changed += [replace(now, input_slots=n) for n in (2, 3)]
        for choice in changed:
            if choice != now:
                yield self.fit(choice)

    def _threads(self, now: Choice) -> Iterator[Choice | None]:
        for threads in self.threads:
            yield replace(now, adam_threads=threads)

    def _policies(self, now: Choice) -> Iterator[Choice | None]:
        for update in policies(self.recipe):
            if update != now.update:
                yield self.fit(replace(now, update=update))

    def chunk_sizes(self, choice: Choice) -> list[int]:
        """Sizes to try: 2 to 16 pieces a layer, and the default, where a step keeps at most `MOST_OPS` ops."""
        n = DTYPE_NBYTES[self.recipe.precision]
        layer = self.model.layers[0].span * n
        unit = 1 << 20 if layer >= 16 << 20 else 256
        sizes = {-(-layer // (pieces * unit)) * unit for pieces in (2, 4, 8, 16)} | {Plan().chunk_bytes}
        streamed = [
            b.span * n for b in self.model.blocks
            if choice.plan(self.layers).placement_of(b.kind, b.layer) in ("streamed", "streamed_adam")
        ]  # fmt: skip
        return [s for s in sorted(sizes, reverse=True) if 4 * sum(-(-x // s) for x in streamed) <= MOST_OPS]


def first_true(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest of low..high for which `holds`, given that it holds for all above one it holds for; None if for none."""
    if low > high or not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _better(a: Scored, b: Scored) -> bool:
    """Faster by more than `GAIN`; or no slower, and smaller."""
    return a.step_ns < b.step_ns * (1 - GAIN) or (a.step_ns <= b.step_ns and a.size < b.size)


def order(scored: Scored) -> tuple[int, tuple[int, int]]:
    """What the search minimises: the step, then bytes."""
    return scored.step_ns, scored.size


def last_true(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The largest of low..high for which `holds`, given that it holds for all below one it holds for; None if for none."""
    found = first_true(-high, -low, lambda n: holds(-n))
    return None if found is None else -found


def _distinct(scored: Sequence[Scored], count: int) -> list[Scored]:
    """Up to `count`, best first, of which each differs from the others in policy or in how memory is filled."""
    found: dict[tuple[object, ...], Scored] = {}
    for s in scored:
        c = s.choice
        found.setdefault((c.update, c.embedding, c.resident, c.kept, c.offloaded), s)
    return list(found.values())[:count]
