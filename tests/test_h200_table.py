"""The speed table of `papers/h200`: floors are bounds, a row of other code is refused, limits mean what they say."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatrain.derive import step_time
from megatrain.files import Job, save_job
from megatrain.files.fields import plain
from megatrain.hardware import H200, HardwareProfile, Link
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import lower
from papers.h200 import table
from papers.h200.floor import Rates, floor_s
from papers.h200.table import Entry, Failure, entries, json_line, judged, read_rows, report
from sim.cost import durations_ns
from sim.simulate import simulate
from tests.strategies import cases, recipes

CEILINGS = Rates(
    h2d_bytes_per_s=55.4e9, d2h_bytes_per_s=55.2e9, adam_bytes_per_s=118e9, dram_bytes_per_s=180e9, gpu_adam_bytes_per_s=4.1e12,
    layer_forward_s=0.0109, layer_again_s=0.0079, layer_backward_s=0.0262, loss_s=0.128,
)  # fmt: skip
RATE_FIELDS = [field.name for field in dataclasses.fields(Rates)]


def unpadded(*, tied: bool = False) -> ModelSpec:
    """Every parameter is a multiple of 128 elements, so that none of a transfer is padding."""
    return ModelSpec.from_config({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 37, "hidden_size": 128,
        "intermediate_size": 19, "num_hidden_layers": 5, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 32, "tie_word_embeddings": tied,
    })  # fmt: skip


def moved_nbytes(model: ModelSpec, recipe: Recipe, plan: Plan) -> dict[str, int]:
    """What a steady step copies of blocks, by lane."""
    found = {"h2d": 0, "d2h": 0}
    for op in lower(model, recipe, plan).body.ops:
        if op.lane in found and op.block is not None:
            found[op.lane] += op.nbytes
    return found


def at_one_byte_per_s(model: ModelSpec, recipe: Recipe, plan: Plan) -> Mapping[str, float]:
    """The floor's candidates with every rate 1, so that the links' are bytes."""
    return floor_s(model, recipe, plan, Rates(**dict.fromkeys(RATE_FIELDS, 1.0))).candidates


# ---- the floor ---------------------------------------------------------------------------------------------------------


@given(data=st.data(), tied=st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_links_floor_counts_the_bytes_that_lowering_moves(data: st.DataObject, tied: bool) -> None:
    model = unpadded(tied=tied)
    recipe = data.draw(recipes(model))
    place = st.sampled_from(["streamed", "device_weights", "resident"])
    plan = Plan(
        placement={"default": data.draw(place)} | {key: data.draw(place) for key in ("embedding", "head", "1", "3", "4")},
        activations={"default": data.draw(st.sampled_from(["keep", "recompute"]))},
        update=data.draw(st.sampled_from(["after", "next_forward", *["during_backward"] * (recipe.clip_norm is None)])),
        weight_slots=data.draw(st.integers(1, 6)),
    )  # fmt: skip
    moved, floor = moved_nbytes(model, recipe, plan), at_one_byte_per_s(model, recipe, plan)
    assert (floor["link up"], floor["link down"]) == (moved["h2d"], moved["d2h"])


@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_no_plan_moves_less_than_the_links_floor(case: tuple[ModelSpec, Recipe, Plan]) -> None:
    moved, floor = moved_nbytes(*case), at_one_byte_per_s(*case)
    assert floor["link up"] <= moved["h2d"] and floor["link down"] <= moved["d2h"]


def without_startup(adam: int, link: int, dram: int, memory: int) -> HardwareProfile:
    """A machine of rates alone: nothing starts up, nothing slows anything else but through `dram`. That is at least what the CPU
    optimizer or the link reach alone, since a profile says of them that they do."""
    alone = Link(latency_ns=0, rates=((1, link),))
    return dataclasses.replace(
        H200, h2d=alone, d2h=alone, adam_rates=((1, adam),), dram_bytes_per_s=dram, host_op_ns=0, sharing=(),
        compute=dataclasses.replace(H200.compute, memory_bytes_per_s=memory, launch_ns=0),
    )  # fmt: skip


def rates_of(model: ModelSpec, recipe: Recipe, machine: HardwareProfile) -> Rates:
    """What such a machine would measure."""

    def least_of(kind: str, activations: str) -> int:
        schedule = lower(model, recipe, Plan(activations={"default": activations}, update="after"))
        durations = durations_ns(schedule, machine)
        found = [durations["body", i] for i, op in enumerate(schedule.body.ops) if op.kind == kind and op.block != 0]
        return min(found)

    least = {kind: least_of(kind, "keep") for kind in ("forward", "backward", "loss")}
    least["again"] = least_of("backward", "recompute") - least["backward"]
    # A forward or a backward that is no more than a rounded-up nanosecond would make a bound of its rounding.
    seconds = {kind: max(ns - 3, 1e-3) / 1e9 for kind, ns in least.items()}
    return Rates(
        h2d_bytes_per_s=machine.h2d.peak_bytes_per_s, d2h_bytes_per_s=machine.d2h.peak_bytes_per_s,
        adam_bytes_per_s=machine.adam_rates[0][1], dram_bytes_per_s=machine.dram_bytes_per_s,
        gpu_adam_bytes_per_s=machine.compute.memory_bytes_per_s, layer_forward_s=seconds["forward"],
        layer_again_s=seconds["again"], layer_backward_s=seconds["backward"], loss_s=seconds["loss"],
    )  # fmt: skip


@given(data=st.data(), case=cases())
@settings(max_examples=30, deadline=None)
def test_no_simulated_step_is_shorter_than_its_floor(data: st.DataObject, case: tuple[ModelSpec, Recipe, Plan]) -> None:
    model, recipe, plan = case
    rate = st.sampled_from([10**8, 10**9, 10**10])
    adam, link = data.draw(rate), data.draw(rate)
    machine = without_startup(adam, link, data.draw(st.sampled_from([2, 3])) * max(adam, link) // 2, data.draw(rate))
    schedule = lower(model, recipe, plan)
    seconds = step_time(schedule, simulate(schedule, machine, steps=12)).mean_ns / 1e9
    floor = floor_s(model, recipe, plan, rates_of(model, recipe, machine))
    assert seconds >= floor.seconds * (1 - 1e-3), floor


@st.composite
def some_rates(draw: DrawFn) -> Rates:
    speed, seconds = st.floats(1e6, 1e13), st.floats(1e-6, 10.0)
    return Rates(**{name: draw(speed if name.endswith("_bytes_per_s") else seconds) for name in RATE_FIELDS})


@given(case=cases(), rates=some_rates(), field=st.sampled_from(RATE_FIELDS), factor=st.floats(1.0, 10.0))
@settings(max_examples=50, deadline=None)
def test_a_faster_machine_never_has_a_higher_floor(
    case: tuple[ModelSpec, Recipe, Plan], rates: Rates, field: str, factor: float
) -> None:
    scale = factor if field.endswith("_bytes_per_s") else 1 / factor
    faster = dataclasses.replace(rates, **{field: getattr(rates, field) * scale})
    before, after = floor_s(*case, rates), floor_s(*case, faster)
    assert after.seconds <= before.seconds
    assert all(after.candidates[name] <= before.candidates[name] for name in before.candidates)


@given(case=cases(), data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_block_that_becomes_resident_never_raises_the_links_floor(
    case: tuple[ModelSpec, Recipe, Plan], data: st.DataObject
) -> None:
    model, recipe, plan = case
    key = data.draw(st.sampled_from(["embedding", "head", *map(str, range(model.n_layers))]))
    resident = dataclasses.replace(plan, placement={**plan.placement, key: "resident"})
    before, after = at_one_byte_per_s(*case), at_one_byte_per_s(model, recipe, resident)
    for name in ("link up", "link down", "cpu adam", "host memory"):
        assert after[name] <= before[name]


def with_choices(plan: Plan, **tables: Mapping[str, str]) -> Plan:
    return dataclasses.replace(plan, **tables)  # type: ignore[arg-type]


def test_streamed_adam_takes_work_from_the_cpu_and_gives_it_to_the_links() -> None:
    model, recipe = unpadded(), Recipe()
    numel = model.layers[0].numel
    streamed = at_one_byte_per_s(model, recipe, Plan())
    passing = at_one_byte_per_s(model, recipe, with_choices(Plan(), placement={"default": "streamed", "2": "streamed_adam"}))
    changes = {name: (passing[name] - streamed[name]) / numel for name in ("link up", "link down", "cpu adam", "host memory")}
    # Up: 14 bytes for the first of the two passes of 2; down: 12 beside the gradient.
    assert changes == {"link up": 12, "link down": 12, "cpu adam": -26, "host memory": 0}
    unclipped = dataclasses.replace(recipe, clip_norm=None)
    at_once = dataclasses.replace(Plan(), update="during_backward")
    streamed = at_one_byte_per_s(model, unclipped, at_once)
    passing = at_one_byte_per_s(model, unclipped, with_choices(at_once, placement={"default": "streamed", "2": "streamed_adam"}))
    changes = {name: (passing[name] - streamed[name]) / numel for name in ("link up", "link down")}
    assert changes == {"link up": 10, "link down": 10}  # its gradient is used where it is


def test_an_offloaded_input_goes_down_and_comes_back_and_the_forward_runs_again() -> None:
    model, recipe = unpadded(), Recipe(micro_batches=3, seq_len=8)
    plan = Plan(input_slots=2)
    here = at_one_byte_per_s(model, recipe, plan)
    away = at_one_byte_per_s(model, recipe, with_choices(plan, activations={"default": "offload"}))
    hidden = 3 * 8 * 128 * 2
    assert away["link down"] - here["link down"] == (5 - 2) * hidden  # the slots hold the last two until they are needed
    assert away["link up"] - here["link up"] == (5 - 2) * hidden
    assert away["compute"] == here["compute"]
    kept = at_one_byte_per_s(model, recipe, with_choices(plan, activations={"default": "keep"}))
    assert here["compute"] - kept["compute"] == 3 * 5


def test_clipping_and_after_make_a_chain_of_backward_and_updates() -> None:
    model, plan = unpadded(), Plan()
    clipped, unclipped = Recipe(), Recipe(clip_norm=None)
    rates = dataclasses.replace(CEILINGS, adam_bytes_per_s=1e6)
    chain = floor_s(model, clipped, plan, rates)
    assert chain.binds == "after the norm"
    assert chain.seconds > chain.candidates["cpu adam"] == floor_s(model, unclipped, plan, rates).seconds
    serial = [floor_s(model, r, dataclasses.replace(plan, update="after"), rates).seconds for r in (clipped, unclipped)]
    assert serial == [pytest.approx(chain.seconds + 5 * rates.layer_forward_s)] * 2
    resident = floor_s(model, clipped, Plan(placement={"default": "resident"}), rates)
    assert resident.binds == "compute" and resident.candidates["after the norm"] == 0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "55e9", None])
def test_rates_refuse_what_is_no_rate(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^rates\.d2h_bytes_per_s: must be a finite number > 0"):
        dataclasses.replace(CEILINGS, d2h_bytes_per_s=value)


# ---- the table ---------------------------------------------------------------------------------------------------------

JOB = Job(model="tiny", recipe=Recipe(micro_batches=2, seq_len=8), plan=Plan(chunk_bytes=4096))


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(folder), *settings, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit: an engine, a README and the plan of a row."""
    folder = tmp_path / "repository"
    for name in ("megatrain/engine/engine.py", "megatrain/schedule/lower.py", "megatrain/plan.py", "README.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n")
    (folder / "plans").mkdir()
    save_job(folder / "plans" / "tiny.yaml", JOB)
    git(folder, "init", "-q")
    commit(folder)
    return folder


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


def line(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "row": "tiny", "model": "7B", "gpu_memory_gib": None, "tokens": 16, "clipping": True, "deterministic": True,
        "step_s": 1.0, "spread": [0.9, 1.1], "steps_s": [0.9, 1.0, 1.1], "tflops_6n": 500.0, "gpu_peak_gib": 20.0,
        "host_peak_gib": 30.0, "commit": git(folder, "rev-parse", "HEAD"), "limit_s": 1.2, "losses": [12.0, 11.0],
        "every block updated": True, "digests equal": True, "segments flat": True, "rates": plain(CEILINGS), **changes,
    }  # fmt: skip


def made_of(folder: Path, *lines: dict[str, Any]) -> list[Entry | Failure]:
    file = folder.parent / "rows.jsonl"
    file.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return entries(read_rows([file]), folder, folder / "plans", lambda name: unpadded())


def only(made: list[Entry | Failure]) -> Entry:
    (entry,) = made
    assert isinstance(entry, Entry)
    return entry


def change_engine(folder: Path) -> None:
    (folder / "megatrain/engine/engine.py").write_text("2\n")


def test_a_row_of_another_engine_is_refused(repository: Path) -> None:
    row = line(repository)
    change_engine(repository)
    refusal = r"rows\.jsonl:1: row tiny: commit: [0-9a-f]{40} was measured, and megatrain/engine/engine\.py changed since$"
    with pytest.raises(ValueError, match=refusal):  # not committed
        made_of(repository, row)
    newer = commit(repository)
    with pytest.raises(ValueError, match=refusal):
        made_of(repository, row)
    assert made_of(repository, row | {"commit": newer})
    with pytest.raises(ValueError, match=refusal.replace("1: row tiny", "2: row other")):  # one row of another engine refuses all
        made_of(repository, row | {"commit": newer}, row | {"row": "other"})
    (repository / "megatrain/engine/engine.py").write_text("1\n")
    assert made_of(repository, row)


def test_a_file_that_git_does_not_know_is_a_change_too(repository: Path) -> None:
    row = line(repository)
    (repository / "megatrain/engine/kernel.cpp").write_text("1\n")
    with pytest.raises(ValueError, match=r"kernel\.cpp changed since"):
        made_of(repository, row)


def test_a_row_outlives_changes_elsewhere(repository: Path) -> None:
    row = line(repository)
    (repository / "README.md").write_text("2\n")
    assert made_of(repository, row)
    commit(repository)
    assert made_of(repository, row, row | {"commit": row["commit"][:9]})


@pytest.mark.parametrize("value", ["", "0" * 40, "deadbeef", "HEAD", "main", "-h", None])
def test_a_commit_that_is_none_is_refused(repository: Path, value: str | None) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: row tiny: commit: "):
        made_of(repository, line(repository, commit=value))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"step_s": None}, "step_s"), ({"step_s": float("nan")}, "step_s"), ({"spread": [2, 3]}, "spread"),
        ({"limit_s": 0}, "limit_s"), ({"gpu_peak_gib": float("inf")}, "gpu_peak_gib"), ({"tokens": "16"}, "tokens"),
        ({"rates": {**plain(CEILINGS), "loss_s": 0}}, "rates.loss_s"), ({"rates": {"loss_s": 1.0}}, "rates.h2d_bytes_per_s"),
        ({"job": {"model": "tiny"}}, "job.recipe"), ({"tokens": 32}, "tokens"), ({"clipping": False}, "clipping"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_refused_by_file_row_and_field(
    repository: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: row tiny: {field}: [^\n]+$"):
        made_of(repository, line(repository, **changes))


@pytest.mark.parametrize("text", ["{", "[]", '{"step_s": 1}', '{"row": null}'])
def test_a_line_that_is_no_row_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"row": "a"}\n' + text + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: [^\n]+$"):
        read_rows([file])


def test_the_last_line_of_a_row_that_is_no_error_counts(repository: Path) -> None:
    failed = {"row": "tiny", "error": "RuntimeError: out of memory"}
    first, last = line(repository, commit=""), line(repository, step_s=1.05)
    assert only(made_of(repository, failed, first, last)).measured.step_s == 1.05
    assert only(made_of(repository, last, failed)).measured.step_s == 1.05
    made = made_of(repository, failed, last | {"row": "other"})
    assert made[0] == Failure(row="tiny", error="RuntimeError: out of memory")
    assert "tiny: failed: RuntimeError: out of memory" in report(made)
    assert [row["step_s"] for row in json.loads(json_line(made))["rows"]] == [1.05]


def test_the_json_line_has_exactly_its_keys(repository: Path) -> None:
    made = made_of(repository, line(repository), line(repository, row="bare", rates=None, gpu_memory_gib=24))
    text = json_line(made)
    assert "\n" not in text
    found = json.loads(text)
    assert list(found) == ["rows", "vs_deepspeed"] and found["vs_deepspeed"] == []
    for row in found["rows"]:
        assert list(row) == [
            "model", "gpu_memory_gib", "tokens", "clipping", "deterministic", "step_s", "spread", "tflops_6n", "floor_s",
            "gpu_peak_gib", "host_peak_gib", "commit",
        ]  # fmt: skip
    first, bare = found["rows"]
    assert first["gpu_memory_gib"] is None and bare["gpu_memory_gib"] == 24 and first["spread"] == [0.9, 1.1]
    expected = floor_s(unpadded(), JOB.recipe, JOB.plan, CEILINGS).seconds
    assert first["floor_s"] == pytest.approx(expected, abs=1e-4) and bare["floor_s"] is None
    assert "no rates" in report(made)


def test_the_floor_is_of_the_job_that_ran(repository: Path) -> None:
    of_file = only(made_of(repository, line(repository))).floor
    slots = dataclasses.replace(JOB, plan=Plan(placement={"default": "resident"}))
    inside = only(made_of(repository, line(repository, job=plain(slots)))).floor
    assert of_file and inside and inside.candidates["link up"] == 0 < of_file.candidates["link up"]
    # Another plan under the row's name is not what ran.
    save_job(repository / "plans" / "tiny.yaml", slots)
    row = line(repository)
    assert only(made_of(repository, row)).floor is None and "tiny.yaml changed since" in report(made_of(repository, row))
    assert only(made_of(repository, row | {"row": "other"})).why_no_floor == "no other.yaml"


@pytest.mark.parametrize(
    ("step_s", "slow", "passes"),
    [(1.2, {}, True), (1.2001, {}, False), (1.2001, {"adam_bytes_per_s": 113e9}, False),
     (1.2001, {"adam_bytes_per_s": 112e9}, True), (1.2001, {"h2d_bytes_per_s": 52e9}, True),
     (1.2001, {"d2h_bytes_per_s": 52e9}, True), (1.2001, {"h2d_bytes_per_s": 53e9, "d2h_bytes_per_s": 53e9}, False)],
)  # fmt: skip
def test_a_slower_machine_is_measured_by_its_floor(repository: Path, step_s: float, slow: dict[str, float], passes: bool) -> None:
    """With 2 x (5 x (forward + backward + forward again) + loss) of 1.1 s the floor's limit is 1.243 s."""
    rates = plain(CEILINGS) | slow | {"layer_forward_s": 0.02, "layer_again_s": 0.02, "layer_backward_s": 0.04, "loss_s": 0.15}
    row = line(repository, step_s=step_s, spread=[1.0, 2.0], rates=rates)
    entry = only(made_of(repository, row))
    assert entry.floor is not None and entry.floor.seconds == pytest.approx(1.1, rel=1e-3)
    passed, why = judged(entry)
    assert passed == passes and "limit 1.2 s" in why
    text = report([entry])
    assert "1.243" in text and "1.2" in text and f"tiny: {'passed' if passes else 'failed'}" in text
    slowest = only(made_of(repository, row | {"step_s": 1.25}))
    assert not judged(slowest)[0]
    assert not judged(only(made_of(repository, row | {"rates": None, "step_s": 1.25})))[0]


@pytest.mark.parametrize(
    "changes",
    [{"digests equal": False}, {"every block updated": False}, {"segments flat": False}, {"gpu_memory_gib": 19},
     {"losses": [12.0, float("nan")]}],
)  # fmt: skip
def test_no_row_passes_by_its_time_alone(repository: Path, changes: dict[str, Any]) -> None:
    assert judged(only(made_of(repository, line(repository, gpu_memory_gib=20))))[0]
    assert not judged(only(made_of(repository, line(repository, **changes))))[0]


@pytest.mark.parametrize(
    ("fields", "passes"),
    [({"ledger_device_gib": 20.25}, True), ({"ledger_device_gib": 20.26}, False), ({"ledger_device_gib": 19.74}, False),
     ({"gpu_peak_gib": 100.0, "ledger_device_gib": 101.0}, True), ({"gpu_peak_gib": 100.0, "ledger_device_gib": 101.1}, False),
     ({"ledger_pinned_gib": 5.0, "pinned_gib": 5.06}, True), ({"ledger_pinned_gib": 5.0, "pinned_gib": 5.07}, False),
     ({"ledger_allocator_gib": 5.0, "allocator_gib": 5.3}, False)],
)  # fmt: skip
def test_a_row_is_held_to_its_ledger(repository: Path, fields: dict[str, float], passes: bool) -> None:
    entry = only(made_of(repository, line(repository, **fields)))
    assert judged(entry)[0] == passes, judged(entry)
    assert "by the ledger, and measured" in report([entry])
    assert "ledger" not in report(made_of(repository, line(repository)))


def test_the_command_ends_with_the_json_line_or_one_line_of_refusal(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "REPOSITORY", repository)
    first, second = repository.parent / "a.jsonl", repository.parent / "b.jsonl"
    first.write_text(json.dumps(line(repository, rates=None)) + "\n")
    second.write_text(json.dumps(line(repository, rates=None, step_s=1.07)) + "\n")
    assert table.main(["--rows", str(first), str(second)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["rows"][0]["step_s"] == 1.07 and not err
    assert out.splitlines()[0] == "Measured rows"
    change_engine(repository)
    assert table.main(["--rows", str(first)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and f"{first}:1: row tiny: commit:" in err
    assert table.main(["--rows", str(repository / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err
