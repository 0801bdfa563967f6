"""The planner: the fastest plan, in simulation, that fits two memories; what binds it, and what more of a machine would bring.

    planned = plan_for(model, recipe, hardware, gpu_memory=24 << 30)
    print(explain(planned))            # sim.explain
    lower(model, recipe, planned.plan)

What is searched, and how, is said in `sim.search`. Here the best few are simulated in full and compared with the *default plan*
(`Plan()`, every block streamed, with a sensible number of optimizer threads), which the winner never loses to where it fits.
Feasibility is decided by the ledger that also predicts: a machine that no plan fits is an answer with a reason, `Infeasible`.

More memory does not make the winner slower than the search's own slack: it is a local search with other starts then. Passing the
smaller machine's winner as one of `seeds` makes that exact, and marginal values do so.

Not covered: a predicted step is as good as the profile. Steps shorter than what issuing their ops takes (`sim.simulate`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from megatrain.derive import Cause
from megatrain.hardware import MOST, HardwareProfile, Link
from megatrain.model import ModelSpec
from megatrain.plan import Plan, is_count
from megatrain.recipe import Recipe
from megatrain.schedule import Lane
from megatrain.schedule.layout import Storages, place_blocks
from sim.bounds import StepBounds
from sim.choice import Choice, adam_thread_counts
from sim.explain import explain
from sim.ledger import Ledger, Shortage, fits, ledger, more_memory
from sim.search import Search, order
from sim.simulate import STEPS
from sim.sweep import Progress, Runs, Steady, SweepPoint, steady, sweep

__all__ = [
    "Infeasible", "Marginal", "Planned", "RunnerUp", "SweepPoint", "default_plan", "explain", "plan_for", "sweep",
]  # fmt: skip

DESCEND_OPS, CUT_OPS = 80_000, 40_000
"""Ops lowered and simulated, at most, while descending from each start and while cutting each: what bounds the search's time."""
STARTS = 3
MORE_GPU, MORE_HOST = 16 << 30, 64 << 30


class Infeasible(ValueError):
    """No plan fits. `shortages` is what the nearest one lacks: one entry a memory."""

    def __init__(self, message: str, shortages: tuple[Shortage, ...]) -> None:
        super().__init__(message)
        self.shortages = shortages


class RunnerUp(NamedTuple):
    """The best plan of another kind (`_runner_up`). `differs`: its fields, where the winner's are others."""

    plan: Plan
    step_ns: int
    differs: str


class Marginal(NamedTuple):
    """What a step gains (negative: shorter) from more of something. `how`: re-planned (searched again, the winner among the
    starts) or re-simulated (the same plan)."""

    text: str
    delta_ns: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and why. `step_ns` is the settled simulated step.

    `default_step_ns` is that of the default plan, or None, and then `default_lacks` says what memory it lacks. `busy` is each
    lane's busy share of a settled step, `stalls` the compute lane's waiting in it by cause (ns). `considered` choices are
    `short` of memory, `bounded` (a lower bound says no better) or `simulated`; `in_full` counts the plans that then ran the full
    number of steps. What the marginals took is in none of these.
    """

    model: ModelSpec
    recipe: Recipe
    hardware: HardwareProfile
    plan: Plan
    step_ns: int
    tokens_per_s: float
    ledger: Ledger
    default_step_ns: int | None
    default_lacks: str | None
    runner_up: RunnerUp | None
    binding: str
    busy: Mapping[Lane, float]
    stalls: Mapping[Cause, int]
    marginals: tuple[Marginal, ...]
    considered: int
    short: int
    bounded: int
    simulated: int
    in_full: int
    notes: tuple[str, ...]


def plan_for(
    model: ModelSpec,
    recipe: Recipe,
    hardware: HardwareProfile,
    *,
    gpu_memory: int | None = None,
    host_memory: int | None = None,
    progress: Progress | None = None,
    seeds: Sequence[Plan] = (),
    marginals: bool = True,
) -> Planned:
    """The best plan found for a machine, or for one of which no more than `gpu_memory` and `host_memory` bytes may be used.

    `seeds` are plans that the winner must not lose to, where they fit; `marginals` whether to ask what more would bring (it takes
    about as long again). Raises Infeasible, and ValueError for a memory of less than a byte and for what lowering refuses.
    """
    machine = _with_memory(hardware, gpu_memory, host_memory)
    bounds = StepBounds(model, recipe, machine)
    search = Search(model, recipe, machine, bounds, progress)
    given = [plan for plan in seeds if fits(ledger(model, recipe, plan, machine), machine) is None]
    lacks = search.smallest_lacks()
    if lacks and not given:
        raise Infeasible(_infeasible(search, lacks), lacks)
    best = search.best(STARTS, DESCEND_OPS, CUT_OPS)

    run = Runs(model, recipe, machine, _told(progress, lambda: search.simulated))
    default = default_plan(recipe, machine)
    default_lacks = fits(ledger(model, recipe, default, machine), machine)
    finals = [s.choice.plan(model.n_layers) for s in best[:STARTS]] + given + ([default] if default_lacks is None else [])
    plan = min(finals, key=run.step_ns)
    step_ns = run.step_ns(plan)
    default_ns = run.step_ns(default) if default_lacks is None else None
    runner_up = _runner_up(search, run, plan)
    facts = steady(run.schedule(plan), run.trace(plan))
    in_full = len(run.done)
    found = _marginals(search, run, plan, best[0].choice, progress) if marginals and best else ()
    return Planned(
        model=model, recipe=recipe, hardware=machine, plan=plan, step_ns=step_ns,
        tokens_per_s=recipe.tokens_per_step * 1e9 / step_ns, ledger=ledger(model, recipe, plan, machine),
        default_step_ns=default_ns, default_lacks=None if default_lacks is None else str(default_lacks), runner_up=runner_up,
        binding=_binding(plan, facts, found, step_ns), busy=facts.busy, stalls=facts.stalls, marginals=found,
        considered=search.considered, short=search.short, bounded=search.bounded, simulated=search.simulated, in_full=in_full,
        notes=run.trace(plan).notes,
    )  # fmt: skip


def default_plan(recipe: Recipe, hardware: HardwareProfile) -> Plan:
    """What one would write without a planner: everything streamed, and as many optimizer threads as bring something."""
    return Plan(adam_threads=adam_thread_counts(hardware, recipe)[0])


# ---- what else there is ----------------------------------------------------------------------------------------------


def _runner_up(search: Search, run: Runs, winner: Plan) -> RunnerUp | None:
    """The best of what was scored that is another kind of plan, with the winner's chunks: another update policy, or an eighth of
    the layers placed or kept differently. If there is none, the best with other layers."""
    ranked = []
    for scored in sorted(search.scored.values(), key=order):
        plan = replace(scored.choice, chunk_bytes=winner.chunk_bytes).plan(search.layers)
        ranked.append((layers_apart(plan, winner, search.layers), plan))
    for least in (max(1, search.layers // 8), 1):
        for apart, plan in ranked:
            if apart >= least or plan.update != winner.update:
                return RunnerUp(plan, run.step_ns(plan), differences(winner, plan))
    return None


def layers_apart(plan: Plan, other: Plan, n_layers: int) -> int:
    """How many layers two plans place or keep differently."""
    return sum(
        plan.placement_of("layer", i) != other.placement_of("layer", i) or plan.activations_of(i) != other.activations_of(i)
        for i in range(n_layers)
    )


def differences(plan: Plan, other: Plan) -> str:
    """The fields of `other` that differ from those of `plan`: `update after instead of next_forward; ...`."""
    pairs = [(f.name, getattr(plan, f.name), getattr(other, f.name)) for f in fields(Plan)]
    return "; ".join(f"{name} {_said(there)} instead of {_said(here)}" for name, here, there in pairs if here != there)


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)


def _told(progress: Progress | None, before: Callable[[], int], prefix: str = "") -> Progress:
    """`progress` for one part of the planning: what is being done after `prefix`, and a count that goes on from `before`."""
    return lambda text, count: progress(prefix + text, before() + count) if progress is not None else None


def _marginals(search: Search, run: Runs, winner: Plan, choice: Choice, progress: Progress | None) -> tuple[Marginal, ...]:
    """What more of the machine would bring. Memory is re-planned, starting from the winner (where no choice was short of it, more
    changes nothing); rates are re-simulated."""
    hardware, now = search.hardware, run.step_ns(winner)
    found = []
    most = MOST["bytes"]
    gpu = replace(hardware, device_memory_bytes=min(hardware.device_memory_bytes + MORE_GPU, most))
    host = replace(hardware, host_memory_bytes=min(hardware.host_memory_bytes + MORE_HOST, most))
    simulated = search.simulated + len(run.done)

    def telling(text: str) -> Progress:
        before = simulated
        return _told(progress, lambda: before, f"with {text}: ")

    of_gpu = "device memory" if hardware.compute.on_host else "GPU memory"
    for text, machine, space in (
        (f"+{MORE_GPU >> 30} GiB of {of_gpu}", gpu, "device"), (f"+{MORE_HOST >> 30} GiB of host memory", host, "host")
    ):  # fmt: skip
        gain = 0
        if space in search.short_of:
            step_ns, more = _replanned(search, machine, choice, now, telling(text))
            gain, simulated = min(0, step_ns - now), simulated + more
        found.append(Marginal(text, gain, "re-planned"))
    for text, machine in (("2x the link's rates", faster_link(hardware)), ("2x the CPU optimizer's rate", faster_adam(hardware))):
        telling(text)(f"simulating {STEPS} steps", 0)
        # The same plan may be slower, where what is faster now takes bandwidth from what all wait for: nobody has to use it.
        found.append(Marginal(text, min(0, run.step_ns(winner, machine) - now), "re-simulated"))
    return tuple(found)


def _replanned(search: Search, machine: HardwareProfile, choice: Choice, now_ns: int, progress: Progress) -> tuple[int, int]:
    """The step of the best plan found on a machine with more memory, `now_ns` if none is faster; and how many were simulated."""
    again = Search(search.model, search.recipe, machine, search.bounds, progress, search.timed)
    coarse = choice if choice.passes else replace(choice, chunk_bytes=0)
    starts = [scored for c in again.fillings(coarse) if (scored := again.score(c, now_ns)) is not None]
    if not starts:
        return now_ns, again.simulated
    best = again.improve([min(starts, key=order)], DESCEND_OPS // 2, CUT_OPS // 2)[0]
    run = Runs(search.model, search.recipe, machine, _told(progress, lambda: again.simulated))
    return run.step_ns(best.choice.plan(search.layers)), again.simulated + len(run.done)


def faster_link(hardware: HardwareProfile) -> HardwareProfile:
    """The machine with copies twice as fast, alone and beside others; start-up stays."""
    rows = tuple(
        replace(row, h2d_bytes_per_s=_twice(row.h2d_bytes_per_s), d2h_bytes_per_s=_twice(row.d2h_bytes_per_s))
        for row in hardware.sharing
    )

    def twice(link: Link) -> Link:
        return replace(link, rates=tuple((nbytes, _twice(rate)) for nbytes, rate in link.rates))

    return replace(hardware, h2d=twice(hardware.h2d), d2h=twice(hardware.d2h), sharing=rows)


def faster_adam(hardware: HardwareProfile) -> HardwareProfile:
    """The machine with a CPU optimizer twice as fast, alone and beside others."""
    rows = tuple(replace(row, adam_bytes_per_s=_twice(row.adam_bytes_per_s)) for row in hardware.sharing)
    return replace(hardware, adam_rates=tuple((n, _twice(rate)) for n, rate in hardware.adam_rates), sharing=rows)


def _twice(bytes_per_s: int) -> int:
    return min(2 * bytes_per_s, MOST["bytes_per_s"])


_BINDS: dict[Lane, str] = {
    "compute": "compute lane busy {:.0%} of a step: forward, backward and loss",
    "cpu": "cpu lane busy {:.0%} of a step: the optimizer's DRAM traffic",
    "h2d": "h2d lane busy {:.0%} of a step: weights on their way up",
    "d2h": "d2h lane busy {:.0%} of a step: gradients on their way down",
}


def _binding(plan: Plan, facts: Steady, marginals: Sequence[Marginal], step_ns: int) -> str:
    """The constraint in words: the lane that is busy nearly throughout or, if none is, what the critical path consists of; and a
    memory of which more would bring 1% or more."""
    lane = max(facts.busy, key=lambda name: facts.busy[name])
    if facts.busy[lane] >= 0.9:
        text = _BINDS[lane].format(facts.busy[lane])
    else:
        shares = sorted(facts.critical.items(), key=lambda x: -x[1])
        path = ", ".join(f"{x:.0%} {name}" for name, x in shares if x >= 0.03)
        text = f"no lane is busy throughout: the critical path is {path}"
        if plan.update != "during_backward" and facts.critical["cpu"] >= 0.1:
            text += "; updates wait for the last gradient, and the next step's weights for updates"
    for m in marginals:
        if m.how == "re-planned" and m.delta_ns <= -0.01 * step_ns:
            text += f"; {m.text.split(' of ')[1]}: {m.text} would make it {-m.delta_ns / 1e9:.3g} s shorter"
    return text


# ---- infeasible ------------------------------------------------------------------------------------------------------


def _infeasible(search: Search, lacks: tuple[Shortage, ...]) -> str:
    """One line: which memory, when, how many bytes, and what would help; each help that is named was tried or computed."""
    model, recipe, machine = search.model, search.recipe, search.hardware
    short = {s.space: s.need - s.have for s in lacks}
    helps = [" and ".join(more_memory(n, space) for space, n in short.items())]
    # Smaller workspaces let the device hold more state, but no more than all of it holds.
    if short.get("host", 0) < machine.device_memory_bytes:
        if recipe.clip_norm is not None and _feasible(model, replace(recipe, clip_norm=None), machine):
            helps.append("recipe.clip_norm: null (gradients need not wait on the host)")
        smaller = [replace(recipe, micro_batch_size=n) for n in _halves(recipe.micro_batch_size)]
        if (found := next((r for r in smaller if _feasible(model, r, machine)), None)) is not None:
            helps.append(f"recipe.micro_batch_size: {found.micro_batch_size}")
        smaller = [replace(recipe, loss_tile=n) for n in _halves(min(recipe.loss_tile, recipe.tokens_per_micro_batch))]
        if (found := next((r for r in smaller if _feasible(model, r, machine)), None)) is not None:
            helps.append(f"recipe.loss_tile: {found.loss_tile}")
    fewer = max(-(-n // _layer_nbytes(search, space)) for space, n in short.items())
    if fewer < model.n_layers:
        helps.append(f"about {fewer} fewer layers")
    if "device" not in short and not machine.compute.on_host:
        helps.append("more GPU memory, which can hold state too")
    which = "; and ".join(
        f"{s.space} memory, {s.phase}: the smallest plan needs {s.need:,} bytes, there are {s.have:,}, {s.need - s.have:,} too"
        f" few (largest item: {s.item})"
        for s in lacks
    )
    return f"{model.name or 'the model'}: no plan fits {machine.name}: {which}; what would help: {', or '.join(helps)}"


def _halves(value: int) -> list[int]:
    """Half of it, a quarter, and so on down to 1."""
    return [value >> k for k in range(1, value.bit_length())]


def _feasible(model: ModelSpec, recipe: Recipe, machine: HardwareProfile) -> bool:
    return Search(model, recipe, machine, None, None).any_fits()


def _layer_nbytes(search: Search, space: str) -> int:
    """What one streamed layer more takes of a memory."""
    plan = Plan(chunk_bytes=0)
    table = Storages(search.model, search.recipe, plan, place_blocks(search.model, search.recipe, plan)).table
    of_one = sum(s.nbytes for s in table if s.name.endswith("[1]") and s.space == space)
    return max(1, of_one)


def _with_memory(hardware: HardwareProfile, gpu_memory: int | None, host_memory: int | None) -> HardwareProfile:
    for name, value in (("gpu_memory", gpu_memory), ("host_memory", host_memory)):
        if value is not None and not is_count(value, 1):
            raise ValueError(f"plan_for: {name}: must be an integer >= 1, in bytes, got {value!r}")
    return replace(
        hardware,
        device_memory_bytes=min(hardware.device_memory_bytes, gpu_memory or hardware.device_memory_bytes),
        host_memory_bytes=min(hardware.host_memory_bytes, host_memory or hardware.host_memory_bytes),
    )
