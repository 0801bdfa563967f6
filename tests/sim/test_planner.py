"""The planner's promises: never slower than the default, always within its memory, infeasible only when nothing fits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatrain.derive import step_time
from megatrain.hardware import H200, MOST, HardwareProfile, Link, SharingRow
from megatrain.model import ModelSpec
from megatrain.plan import Placement, Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Schedule, check, lower
from sim import planner, search
from sim.bounds import StepBounds
from sim.choice import Choice, adam_thread_counts, layers_at, policies
from sim.ledger import PHASES, fits, ledger, shortages
from sim.planner import Infeasible, Planned, default_plan, explain, plan_for, sweep
from sim.quick import quick_step_ns
from sim.search import Search, first_true
from sim.simulate import STEPS, simulate
from tests.strategies import cases, models, recipes

SLACK = 0.05
"""How much slower than with less memory a winner may be when the smaller machine's winner is not among its seeds."""

# A machine on which a tiny model's steps are bound by what a large one's are: slow links, arithmetic and optimizer, no latencies.
_LINK = Link(latency_ns=10, rates=((1 << 10, 40_000_000), (1 << 20, 50_000_000)))
SLOW = replace(
    H200, name="slow", h2d=_LINK, d2h=_LINK, host_op_ns=10, sharing=(), dram_bytes_per_s=200_000_000,
    adam_rates=((1, 16_000_000), (8, 100_000_000), (16, 118_000_000)),
    compute=replace(
        H200.compute, flops_per_s={"bf16": 10**9, "fp32": 10**9}, attention_flops_per_s=10**8, memory_bytes_per_s=10**9,
        launch_ns=1,
    ),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def little_effort() -> Iterator[None]:
    """What is promised holds however long the search looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "DESCEND_OPS", 800)
        patch.setattr(planner, "CUT_OPS", 500)
        yield


@pytest.fixture(scope="module")
def roomy() -> Planned:
    """The plan of a tiny model where there is room for all of it."""
    return _plan(ModelSpec.from_config(_TINY, name="tiny"), Recipe(micro_batches=2, seq_len=16), SLOW)


SLOW_LINK = replace(SLOW, h2d=replace(_LINK, rates=((1 << 10, 400_000), (1 << 20, 500_000))))
"""`SLOW`, and every step waits for weights."""


def _smallest(update: str = "next_forward", **fields: Any) -> Plan:
    return Plan(update=update, weight_slots=1, gradient_slots=1, host_gradient_slots=1, chunk_bytes=1, **fields)  # type: ignore[arg-type]


def _largest(model: ModelSpec, recipe: Recipe) -> Plan:
    return Plan(placement={"default": "resident"}, activations={"default": "keep"}, update="after")


def _need(model: ModelSpec, recipe: Recipe, plan: Plan, space: str) -> int:
    book = ledger(model, recipe, plan, SLOW)
    return max(map(book.device_nbytes if space == "device" else book.host_nbytes, PHASES))


@st.composite
def machines(draw: st.DrawFn, model: ModelSpec, recipe: Recipe) -> HardwareProfile:
    """`SLOW` with memories between a little less than the least and a little more than the most that any plan needs."""

    def between(low: int, high: int) -> int:
        return low + (high - low) * draw(st.integers(-1, 11)) // 10

    device = between(_need(model, recipe, _smallest(), "device"), _need(model, recipe, _largest(model, recipe), "device"))
    host = between(_need(model, recipe, _largest(model, recipe), "host"), _need(model, recipe, Plan(), "host"))
    return replace(SLOW, device_memory_bytes=device, host_memory_bytes=host)


def _simulated(model: ModelSpec, recipe: Recipe, plan: Plan, machine: HardwareProfile) -> int:
    schedule = lower(model, recipe, plan)
    return step_time(schedule, simulate(schedule, machine)).mean_ns


def _plan(model: ModelSpec, recipe: Recipe, machine: HardwareProfile, **options: Any) -> Planned:
    return plan_for(model, recipe, machine, marginals=False, **options)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_the_winner_fits_and_is_never_slower_than_the_default(data: st.DataObject) -> None:
    model = data.draw(models(layers=(2, 3)))
    recipe = data.draw(recipes(model))
    machine = data.draw(machines(model, recipe))
    try:
        planned = _plan(model, recipe, machine)
    except Infeasible:
        assume(False)
    check(lower(model, recipe, planned.plan))
    book = ledger(model, recipe, planned.plan, machine)
    assert book == planned.ledger and fits(book, machine) is None
    assert planned.step_ns == _simulated(model, recipe, planned.plan, machine)
    default = default_plan(recipe, machine)
    if fits(ledger(model, recipe, default, machine), machine) is None:
        assert planned.default_step_ns == _simulated(model, recipe, default, machine) >= planned.step_ns
    else:
        assert planned.default_step_ns is None and planned.default_lacks is not None
    if planned.runner_up is not None:
        assert planned.runner_up.plan != planned.plan and planned.runner_up.step_ns >= planned.step_ns * (1 - SLACK)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_infeasible_exactly_when_no_smallest_plan_fits(data: st.DataObject) -> None:
    """Against every placement of embedding, head and a number of layers, with one slot each and nothing kept."""
    model = data.draw(models(layers=(2, 3)))
    recipe = data.draw(recipes(model))
    machine = data.draw(machines(model, recipe))
    smallest = [
        Choice(update=update, adam_threads=1, embedding=embedding, head=head, resident=resident).plan(model.n_layers)
        for update in policies(recipe)
        for embedding in ("streamed", "resident")
        for head in ("streamed", "resident")
        for resident in range(model.n_layers + 1)
    ]
    books = [ledger(model, recipe, plan, machine) for plan in smallest]  # what a plan needs is the same whatever there is
    any_fits = any(fits(book, machine) is None for book in books)
    lacks = Search(model, recipe, machine, None, None).smallest_lacks()
    assert (not lacks) == any_fits
    if lacks:
        with pytest.raises(Infeasible) as raised:
            _plan(model, recipe, machine)
        message = str(raised.value)
        assert raised.value.shortages == lacks and "\n" not in message
        for s in lacks:
            assert f"{s.space} memory, {s.phase}" in message and f"needs {s.need:,} bytes, there are {s.have:,}" in message
        # What is said to help first does: this much more, and no byte less of any of it for a plan that lacks just this.
        enough = {f"{s.space}_memory_bytes": s.need for s in lacks}
        assert not Search(model, recipe, replace(machine, **enough), None, None).smallest_lacks()
        for book in [book for book in books if shortages(book, machine) == lacks]:
            for name in enough:
                assert fits(book, replace(machine, **(enough | {name: enough[name] - 1}))) is not None


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_more_memory_is_never_slower(data: st.DataObject) -> None:
    model = data.draw(models(layers=(2, 3)))
    recipe = data.draw(recipes(model))
    machine = data.draw(machines(model, recipe))
    try:
        small = _plan(model, recipe, machine)
    except Infeasible:
        assume(False)
    more = replace(
        machine,
        device_memory_bytes=machine.device_memory_bytes + data.draw(st.integers(0, 1 << 16)),
        host_memory_bytes=machine.host_memory_bytes + data.draw(st.integers(0, 1 << 16)),
    )
    assert _plan(model, recipe, more).step_ns <= small.step_ns * (1 + SLACK)
    assert _plan(model, recipe, more, seeds=[small.plan]).step_ns <= small.step_ns


@settings(max_examples=40, deadline=None)
@given(case=cases(layers=(2, 3)))
def test_bounds_are_below_every_settled_step(case: tuple[ModelSpec, Recipe, Plan]) -> None:
    schedule = lower(*case)
    for machine in (SLOW, SLOW_LINK, H200):
        assert StepBounds(case[0], case[1], machine).step_ns(case[2]) <= quick_step_ns(schedule, machine, steps=STEPS)


def test_bounds_are_near_where_a_lane_is_busy_throughout(host: HardwareProfile) -> None:
    """All resident and kept, the compute lane has no gaps; with a slow optimizer, the cpu lane and backward follow each other;
    with a slow link, the h2d lane has none."""
    model = ModelSpec.from_config(_TINY)
    recipe = Recipe(micro_batches=2, seq_len=16)
    for machine in (SLOW, host):
        plan = _largest(model, recipe)
        assert StepBounds(model, recipe, machine).step_ns(plan) > 0.95 * _simulated(model, recipe, plan, machine)
    slow_adam = replace(SLOW, adam_rates=((1, 10**6),))
    early = Plan(update="during_backward", chunk_bytes=0, adam_threads=8)
    for machine, plan in ((slow_adam, Plan(chunk_bytes=0)), (SLOW_LINK, early)):
        free = replace(recipe, clip_norm=None)
        assert StepBounds(model, free, machine).step_ns(plan) > 0.95 * _simulated(model, free, plan, machine)


_TINY = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 90, "num_hidden_layers": 6,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def test_where_compute_is_on_the_host_cores_are_left_to_it(host: HardwareProfile) -> None:
    model, recipe = ModelSpec.from_config(_TINY), Recipe(micro_batches=2, seq_len=32, compute_threads=1)
    planned = _plan(model, recipe, host)
    assert planned.plan.adam_threads <= host.cores and adam_thread_counts(host, recipe)[0] == host.cores - 1
    assert planned.default_step_ns is not None and planned.step_ns <= planned.default_step_ns
    with pytest.raises(Infeasible, match="host memory"):
        _plan(model, recipe, host, host_memory=512 << 20)
    assert adam_thread_counts(H200, recipe)[0] <= H200.cores - 2


def test_spare_memory_is_used_and_explained(roomy: Planned) -> None:
    model, recipe = ModelSpec.from_config(_TINY, name="tiny"), Recipe(micro_batches=2, seq_len=16)
    tight = _need(model, recipe, Plan(), "device") + (100 << 10)
    seen: list[tuple[str, int]] = []
    planned = plan_for(model, recipe, SLOW, gpu_memory=tight, progress=lambda text, count: seen.append((text, count)))
    assert roomy.step_ns < planned.step_ns < (planned.default_step_ns or 0)
    assert roomy.plan.placement_of("layer", 0) == "resident"
    counts = [count for _, count in seen]
    assert counts == sorted(counts) and counts[-1] >= planned.simulated + planned.in_full
    own = [text for text, _ in seen if not text.startswith("with ")]
    others = [text for text, _ in seen[len(own) :]]
    assert own == [text for text, _ in seen[: len(own)]]  # once the answer is found, all that is said is of other machines
    assert {text.split(": ")[0] for text in others} >= {
        "with +16 GiB of GPU memory", "with 2x the link's rates", "with 2x the CPU optimizer's rate"
    }  # fmt: skip
    assert any(text.startswith("with +16 GiB of GPU memory: descending, ") for text in others)
    of = {m.text: m for m in planned.marginals}
    assert of["+16 GiB of GPU memory"].delta_ns <= 0.8 * (roomy.step_ns - planned.step_ns)
    assert all(m.delta_ns <= 0 for m in planned.marginals if m.how == "re-planned")
    # Where blocks pass through the device for their update, the CPU need not bind.
    passing = "streamed_adam" in planned.plan.placement.values()
    assert of["2x the CPU optimizer's rate"].delta_ns <= 0 if passing else of["2x the CPU optimizer's rate"].delta_ns < 0
    assert planned.considered == planned.short + planned.bounded + planned.simulated
    assert planned.simulated > 0 and planned.bounded > 0 and planned.in_full > 0
    text = explain(planned)
    for piece in ("tiny on slow", "Default plan", "Runner-up", "Binding", "adam_threads", "moments", "+16 GiB", "Searched"):
        assert piece in text
    said = next(line for line in text.splitlines() if line.startswith("Searched: "))
    considered, *parts = (int(figure.replace(",", "")) for figure in re.findall("[0-9][0-9,]*", said.partition(";")[0]))
    assert considered == sum(parts) and f"; {planned.in_full} plans simulated in full." in said
    assert text.splitlines()[0].endswith("(simulated)") and all(line == line.rstrip() for line in text.splitlines())


def test_a_machine_of_all_that_a_profile_may_hold_can_be_planned_for() -> None:
    rate, ns = MOST["bytes_per_s"], MOST["ns"]
    machines = [
        replace(
            H200, device_memory_bytes=MOST["bytes"], host_memory_bytes=MOST["bytes"], cores=MOST["cores"],
            h2d=Link(latency_ns=late, rates=((1, rate),)), d2h=Link(latency_ns=late, rates=((1, rate),)), host_op_ns=late,
            adam_rates=((MOST["threads"], rate),), dram_bytes_per_s=rate, sharing=(
                SharingRow(adam_threads=MOST["threads"], h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, adam_bytes_per_s=rate),
            ),
            compute=replace(
                H200.compute, flops_per_s=dict.fromkeys(("bf16", "fp32"), MOST["flops_per_s"]), launch_ns=late,
                attention_flops_per_s=MOST["flops_per_s"], memory_bytes_per_s=rate,
            ),
        )
        for late in (0, ns)
    ]  # fmt: skip
    model, recipe = ModelSpec.from_config(_TINY, name="tiny"), Recipe(micro_batches=2, seq_len=16)
    quick, late = (plan_for(model, recipe, machine, gpu_memory=1 << 40) for machine in machines)
    assert 0 < quick.step_ns < ns <= late.step_ns and "Searched" in explain(late)


def test_a_lack_of_memory_is_said_with_separators() -> None:
    model = ModelSpec.from_config(_TINY, name="tiny")
    recipe = Recipe(micro_batch_size=1 << 24, seq_len=1 << 10, loss_tile=1 << 20)
    short = fits(ledger(model, recipe, Plan(), SLOW), SLOW)
    assert short is not None and re.search(r"; [0-9]{1,3}(,[0-9]{3})+\.[0-9]{2} GiB more device memory", str(short))
    with pytest.raises(Infeasible, match=r"would help: [0-9]{1,3}(,[0-9]{3})+\.[0-9]{2} GiB more "):
        _plan(model, recipe, SLOW)


def test_the_default_and_seeds_are_compared_with_what_the_search_finds(
    roomy: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a search that returns the worst of what it scored."""
    model, recipe = ModelSpec.from_config(_TINY), Recipe(micro_batches=2, seq_len=16)
    worst = Choice(update="after", adam_threads=1)
    monkeypatch.setattr(Search, "best", lambda search, *_: [search.score(worst)])
    alone = _plan(model, recipe, SLOW)
    assert alone.plan == default_plan(recipe, SLOW) and alone.step_ns == alone.default_step_ns
    assert _plan(model, recipe, SLOW, seeds=[roomy.plan]).plan == roomy.plan
    # A seed that does not fit is no answer.
    tight = _need(model, recipe, Plan(), "device")
    assert _plan(model, recipe, SLOW, seeds=[_largest(model, recipe)], gpu_memory=tight).plan == alone.plan


def test_no_plan_is_lowered_twice_for_its_threads_or_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = ModelSpec.from_config(_TINY), Recipe(micro_batches=2, seq_len=16)
    lowered: list[Plan] = []

    def counted(model: ModelSpec, recipe: Recipe, plan: Plan, *, proven: bool) -> Schedule:
        lowered.append(plan)
        return lower(model, recipe, plan, proven=proven)

    monkeypatch.setattr(search, "lower", counted)
    first = Search(model, recipe, SLOW, None, None)
    choices = [Choice(update="next_forward", adam_threads=n) for n in (1, 8, 16)]
    choices += [replace(choices[0], kept_at="first"), replace(choices[0], host_gradient_slots=3)]  # the same plan
    scored = [first.score(choice) for choice in choices]
    assert len(lowered) == 1 and first.simulated == len(choices)
    for choice, found in zip(choices, scored, strict=True):
        schedule = lower(model, recipe, choice.plan(model.n_layers))
        assert found is not None
        assert found.step_ns == step_time(schedule, simulate(schedule, SLOW, steps=search.QUICK_STEPS)).mean_ns
    larger = replace(SLOW, device_memory_bytes=2 * SLOW.device_memory_bytes)
    again = Search(model, recipe, larger, None, None, first.timed)
    assert [again.score(choice) for choice in choices] == scored and len(lowered) == 1


def test_the_search_has_one_answer() -> None:
    model, recipe = ModelSpec.from_config(_TINY), Recipe(seq_len=16, clip_norm=None)
    cap = _need(model, recipe, Plan(), "device") + (50 << 10)
    first, second = (_plan(model, recipe, SLOW, gpu_memory=cap) for _ in range(2))
    assert first == second


def test_a_sweep_simulates_every_cell() -> None:
    model, recipe = ModelSpec.from_config(_TINY), Recipe(micro_batches=2, seq_len=16)
    points = sweep(model, recipe, Plan(), SLOW, [1, 2, 3], [0, 4096])
    assert [(p.weight_slots, p.chunk_bytes) for p in points] == [(d, c) for d in (1, 2, 3) for c in (0, 4096)]
    for p in points:
        plan = Plan(weight_slots=p.weight_slots, chunk_bytes=p.chunk_bytes)
        assert p.step_ns == _simulated(model, recipe, plan, SLOW) and p.lacks is None
        assert p.device_bytes == ledger(model, recipe, plan, SLOW).device_nbytes()
        assert 0 < sum(p.stalls.values()) < p.step_ns * 1.001
    assert points[0].device_bytes < points[2].device_bytes < points[4].device_bytes


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_memory_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(ValueError, match="gpu_memory: must be an integer >= 1"):
        plan_for(ModelSpec.from_config(_TINY), Recipe(), H200, gpu_memory=value)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 40), data=st.data())
def test_a_choice_becomes_the_plan_it_says(n: int, data: st.DataObject) -> None:
    where = st.sampled_from(["first", "last", "spread"])
    choice = Choice(
        update="next_forward", adam_threads=3,
        embedding=data.draw(st.sampled_from(get_args(Placement))), head=data.draw(st.sampled_from(get_args(Placement))),
        resident=data.draw(st.integers(0, n)), resident_at=data.draw(where), kept=data.draw(st.integers(0, n)),
        kept_at=data.draw(where),
    )  # fmt: skip
    plan = choice.plan(n)
    resident = [i for i in range(n) if plan.placement_of("layer", i) == "resident"]
    kept = [i for i in range(n) if plan.activations_of(i) == "keep"]
    assert resident == layers_at(choice.resident_at, choice.resident, n) and len(resident) == choice.resident
    assert kept == layers_at(choice.kept_at, choice.kept, n) and len(kept) == choice.kept
    assert (plan.placement_of("embedding", None), plan.placement_of("head", None)) == (choice.embedding, choice.head)


@given(n=st.integers(1, 40), data=st.data())
def test_waiting_layers_are_as_many_as_said_and_the_last_ones_that_leave_the_cpu_its_share(n: int, data: st.DataObject) -> None:
    of, waiting = data.draw(st.integers(2, 5)), data.draw(st.integers(0, n))
    choice = Choice(update="during_backward", adam_threads=3, waiting=waiting, waiting_of=of)
    last = [i for i in range(n) if choice.plan(n).update_order_of("layer", i) == "last"]
    could = [n - 1 - i for i in range(n) if i % of]
    assert last == sorted(could[:waiting])
    assert replace(choice, update="after").plan(n).update_order == {"default": "first"}


def test_where_the_cpu_is_slower_than_the_backward_a_step_is_shorter_if_some_layers_are_updated_last() -> None:
    model = ModelSpec.from_config({**_TINY, "num_hidden_layers": 12})
    recipe = Recipe(micro_batch_size=2, seq_len=16, clip_norm=None)
    slow = replace(SLOW, adam_rates=((1, 16_000_000), (16, 40_000_000)))
    streamed = Choice(update="during_backward", adam_threads=14, weight_slots=2, gradient_slots=2, host_gradient_slots=4)

    def seconds(choice: Choice) -> float:
        schedule = lower(model, recipe, choice.plan(12))
        return step_time(schedule, simulate(schedule, slow)).mean_ns / 1e9

    assert min(seconds(replace(streamed, waiting=n)) for n in (3, 4, 5)) < 0.97 * seconds(streamed)


@given(low=st.integers(-5, 5), length=st.integers(-1, 9), threshold=st.integers(-9, 20))
def test_bisection_finds_the_first(low: int, length: int, threshold: int) -> None:
    high = low + length
    expected = next((i for i in range(low, high + 1) if i >= threshold), None)
    assert first_true(low, high, lambda i: i >= threshold) == expected


def test_random_schedules_have_valid_bounds_on_the_host(
    random_schedule: Callable[[random.Random], Schedule], host: HardwareProfile
) -> None:
    for seed in range(25):
        s = random_schedule(random.Random(seed))
        assert StepBounds(s.model, s.recipe, host).step_ns(s.plan) <= quick_step_ns(s, host, steps=STEPS)
