"""Calibration: what it reads from a machine it did not make up, and what it gives is all that a prediction asks for."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain.calibrate import blocks, calibrate, traffic
from megatrain.calibrate.device import Direction, Piece
from megatrain.calibrate.host import Host
from megatrain.calibrate.machine import cache_nbytes, cpu_name, usable_cores, usable_memory
from megatrain.calibrate.samples import figure, spread
from megatrain.files import load_hardware, save_hardware
from megatrain.hardware import Compute, HardwareProfile, Link, MeasuredOp, conditions
from megatrain.model import ModelSpec
from megatrain.plan import Plan
from megatrain.recipe import Recipe
from megatrain.schedule import Schedule, lower, lower_evaluation
from megatrain.trace import Trace
from sim.cost import copy_ns, works
from sim.sharing import Sharing
from sim.simulate import simulate

MB = 1 << 20
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
RECIPE = Recipe(micro_batches=3, micro_batch_size=2, seq_len=16, precision="fp32", gradient_dtype="fp32", loss_tile=16)


def llama(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, **changes}, name="small")


# ---- the machine -------------------------------------------------------------------------------------------------------


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemFree: 1 kB\nMemTotal:       1024 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


V1 = {"proc/self/cgroup": "4:memory:/job/task\n3:cpu,cpuacct:/job/task\n0::/"}
V2 = {"proc/self/cgroup": "0::/job/task"}


@pytest.mark.parametrize(
    ("files", "nbytes"),
    [
        ({}, MB),
        ({**V1, "sys/fs/cgroup/memory/job/task/memory.limit_in_bytes": "9223372036854771712"}, MB),
        ({**V1, "sys/fs/cgroup/memory/job/task/memory.limit_in_bytes": "4096"}, 4096),
        # The limit of a group above counts, and of a container that sees its own group as the mount.
        ({**V1, "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "8192"}, 8192),
        ({**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192"}, 8192),
        ({**V2, "sys/fs/cgroup/job/task/memory.max": "max", "sys/fs/cgroup/job/memory.max": "5000"}, 5000),
        ({**V2, "sys/fs/cgroup/memory.max": "6000"}, 6000),
        ({**V2, "sys/fs/cgroup/unified/job/task/memory.max": "7000"}, 7000),
        ({**V2, "sys/fs/cgroup/other/memory.max": "1"}, MB),
    ],
)
def test_memory_is_what_the_control_groups_allow(tmp_path: Path, files: dict[str, str], nbytes: int) -> None:
    assert usable_memory(machine(tmp_path, files)) == nbytes


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({**V1, "sys/fs/cgroup/cpu,cpuacct/job/task/cpu.cfs_quota_us": "-1",
          "sys/fs/cgroup/cpu,cpuacct/job/task/cpu.cfs_period_us": "100000"}, 8),
        ({**V1, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "350000", "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"}, 3),
        ({**V2, "sys/fs/cgroup/job/task/cpu.max": "max 100000"}, 8),
        ({**V2, "sys/fs/cgroup/job/task/cpu.max": "200000 100000", "sys/fs/cgroup/job/cpu.max": "500000 100000"}, 2),
        ({**V2, "sys/fs/cgroup/job/task/cpu.max": "50000 100000"}, 1),
        ({**V2, "sys/fs/cgroup/job/task/cpu.max": "1600000 100000"}, 8),
    ],
)  # fmt: skip
def test_cores_are_what_affinity_and_quota_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(machine(tmp_path, files)) == cores


def test_caches_of_one_last_level_count_once(tmp_path: Path) -> None:
    files = {}
    for cpu in range(4):
        for index, (level, size, shared) in enumerate((("1", "32K", str(cpu)), ("3", "16M", "0-1" if cpu < 2 else "2-3"))):
            at = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{at}/level": level, f"{at}/size": size, f"{at}/shared_cpu_list": shared}
    assert cache_nbytes(machine(tmp_path, files)) == 32 << 20


def test_a_system_that_says_nothing_still_has_a_name_and_a_cache(tmp_path: Path) -> None:
    assert cache_nbytes(tmp_path) > 0
    assert cpu_name(tmp_path)


# ---- samples -----------------------------------------------------------------------------------------------------------


def test_disturbed_samples_do_not_move_a_shared_machines_figure_nor_cool_ones_a_devices() -> None:
    quiet = [100 + i % 3 for i in range(12)]
    disturbed = [t * 5 for t in quiet]
    assert 100 <= figure(quiet + 2 * disturbed, shared=True) <= 102
    assert figure([50] * 4 + [100] * 8, shared=False) == 100
    with pytest.raises(ValueError, match="larger budget_s"):
        figure([], shared=True)


def test_one_interrupted_sample_is_no_spread_but_a_slow_stretch_is() -> None:
    assert spread([100.0] * 10 + [9000.0] + [100.0] * 9, shared=True).worst == 0
    found = spread([100.0] * 15 + [200.0] * 5, shared=True)
    assert (found.typical, found.worst) == (0, 1)


# ---- traffic -----------------------------------------------------------------------------------------------------------


class FakeDevice:
    """Copies that take `latency_ns` and a nanosecond for every `bytes_per_ns`; small ones are twice as fast, from a cache."""

    on_host, name, memory_bytes = True, "fake", 1 << 30
    latency_ns, bytes_per_ns = 1000, {"h2d": 16, "d2h": 8}

    def timed(self, work: Callable[[], object], count: int) -> list[int]:
        raise NotImplementedError

    def copy_times(self, direction: Direction, nbytes: int, count: int) -> list[int]:
        return [self.latency_ns + nbytes // (self.bytes_per_ns[direction] * (1 + (nbytes < MB)))] * count

    def copier(self, direction: Direction) -> Piece:
        def piece() -> int:
            time.sleep(0.002)
            return self.bytes_per_ns[direction] * 2_000_000

        return piece

    def largest_copy(self) -> int:
        return 64 * MB

    def close(self) -> None:
        pass


def test_a_link_predicts_the_copies_it_was_measured_from() -> None:
    device = FakeDevice()
    links = traffic.measure_links(device, budget_s=0.0, op_ns=500)
    for direction, link in (("h2d", links.h2d), ("d2h", links.d2h)):
        for nbytes in (MB, 3 * MB, 16 * MB, 64 * MB):
            expected = device.copy_times(direction, nbytes, 1)[0] + 500  # type: ignore[arg-type]
            assert copy_ns(link, nbytes) == pytest.approx(expected, rel=0.02)
        # What a cache lent to small copies is not the link's: none is faster than its top rate.
        assert max(rate for _, rate in link.rates) == link.peak_bytes_per_s
        assert 0 < link.latency_ns <= device.latency_ns + 500


def test_a_rate_together_is_of_work_done_while_all_ran() -> None:
    ran: list[int] = []

    def slow_start() -> int:
        time.sleep(0.1 if not ran else 0.004)
        ran.append(1)
        return 4_000_000

    def steady() -> int:
        time.sleep(0.002)
        return 1_000_000

    rates = traffic.run_together({"late": slow_start, "steady": steady}, 0.5)
    # A sleep may last longer than asked, never shorter.
    assert 0.03e9 < rates["late"] <= 1.0e9
    assert 0.015e9 < rates["steady"] <= 0.5e9


def test_a_slow_traffic_gets_the_time_for_two_pieces() -> None:
    def piece() -> int:
        time.sleep(0.05)
        return 1000

    assert 1_000 < traffic.run_together({"slow": piece}, 0.01)["slow"] <= 20_000


def test_a_traffic_that_fails_ends_the_others_and_is_named() -> None:
    def fails() -> int:
        raise RuntimeError("no such piece")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no such piece"):
        traffic.run_together({"bad": fails, "good": lambda: 1}, 30.0)
    assert time.monotonic() - began < 20  # the other was to run for 30 s


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_optimizers_bytes_are_those_that_an_update_is_charged(precision: Any) -> None:
    recipe = replace(RECIPE, precision=precision, gradient_dtype=precision)
    moved = traffic.adam_traffic(recipe, 0, 0)(1)()
    schedule = lower(llama(), recipe, Plan(chunk_bytes=0))
    update = next(op for op in schedule.body.ops if op.kind == "update" and op.block == 1)
    charged = sum(a.nbytes for a in (*update.reads, *update.writes) if a.tag.what != "constants")
    span = schedule.model.layers[0].span
    assert moved % (charged // span) == 0 and charged % span == 0
    assert moved * span == charged * traffic._ADAM_PIECE


# ---- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3", "Mistral"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("window", [None, 64])
def test_the_reduced_model_has_the_very_blocks_of_the_whole(architecture: str, tied: bool, window: int | None) -> None:
    changes: dict[str, Any] = {"architectures": [f"{architecture}ForCausalLM"], "model_type": architecture.lower()}
    changes["tie_word_embeddings"] = tied
    if window is not None and architecture != "Llama":
        changes |= {"sliding_window": window}
        if architecture != "Mistral":
            changes |= {"use_sliding_window": True, "max_window_layers": 0}
    model = llama(**changes)
    small = blocks.reduced(model)

    def shapes(spec: Any) -> list[tuple[int, ...]]:
        return [p.shape for p in spec.params]

    assert len(small.layers) == blocks.LAYERS < len(model.layers)
    for ours, theirs in ((small.embedding, model.embedding), (small.head, model.head), (small.layers[1], model.layers[3])):
        assert shapes(ours) == shapes(theirs)
    assert (small.tied, small.sliding_window) == (model.tied, model.sliding_window)


ROWS_NS = {
    ("forward", "embedding"): 1_000, ("forward", "layer"): 2_000, ("recompute_backward", "layer"): 7_000,
    ("backward", "layer"): 5_000, ("backward", "embedding"): 1_500, ("loss", "head"): 9_000, ("pack", "embedding"): 300,
    ("pack", "layer"): 200, ("pack", "head"): 400,
}  # fmt: skip


def profile_of(model: ModelSpec, recipe: Recipe) -> HardwareProfile:
    """A machine where blocks take `ROWS_NS`."""
    numel = {b.kind: b.numel + (model.embedding.numel if b.tied else 0) for b in model.blocks}
    rows = []
    for (kind, block), ns in ROWS_NS.items():
        tokens, seq_len = (1, 1) if kind == "pack" else (recipe.tokens_per_micro_batch, recipe.seq_len)
        rows.append(MeasuredOp(kind, block, numel[block], tokens, seq_len, ns, conditions(kind, recipe)))  # type: ignore[arg-type, index]
    link = Link(latency_ns=10, rates=((MB, 10**10),))
    compute = Compute(
        flops_per_s={"bf16": 10**9, "fp32": 10**9}, attention_flops_per_s=10**9, memory_bytes_per_s=10**9, launch_ns=9,
        on_host=True, measured=tuple(rows),
    )  # fmt: skip
    return HardwareProfile(
        name="known", provenance="made up", device_memory_bytes=1 << 30, host_memory_bytes=1 << 30, cores=2, h2d=link, d2h=link,
        compute=compute, adam_rates=((1, 10**10),), dram_bytes_per_s=10**11,
    )  # fmt: skip


@pytest.fixture
def simulated_engine(monkeypatch: pytest.MonkeyPatch) -> list[ModelSpec]:
    """Engines whose traces are predictions of a known machine, on which adding to gradients takes twice as long as writing them.
    The list gets the models that were trained."""
    trained: list[ModelSpec] = []

    class Simulated:
        def __init__(self, model: ModelSpec, recipe: Recipe, plan: Plan, weights: Mapping[str, Tensor], **_: Any) -> None:
            assert set(weights) == {p.name for b in model.blocks for p in b.params}
            trained.append(model)
            self.schedule, self.steps = lower(model, recipe, plan), 0
            self.profile = profile_of(model, recipe)

        def __enter__(self) -> Simulated:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def step(self, batch: Mapping[str, Tensor]) -> None:
            self.steps += 1

        def restart_trace(self) -> None:
            self.steps = 0

        def trace(self) -> Trace:
            trace = simulate(self.schedule, self.profile, steps=self.steps, contention=False)

            def doubled(event: Any) -> Any:
                op = self.schedule.part(trace.parts[event.part]).ops[event.position]
                adds = bool(op.micro) and op.kind != "forward"
                return event._replace(end_ns=event.end_ns + adds * (event.end_ns - event.start_ns))

            return replace(trace, events=tuple(doubled(e) for e in trace.events))

    monkeypatch.setattr(blocks, "Engine", Simulated)
    return trained


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_what_the_trace_of_a_reduced_model_says(
    simulated_engine: list[ModelSpec], micro_batches: int, tied: bool
) -> None:
    model, recipe = llama(tie_word_embeddings=tied), replace(RECIPE, micro_batches=micro_batches)
    with_host = Host("here", 1 << 30, MB, 0)
    found = blocks.measure_blocks(with_host, model=model, recipe=recipe, budget_s=0.01, seed=0)
    rows = {(r.kind, r.block, r.adds): r for r in found.measured if r.kind != "loss_forward"}
    assert len(found.measured) == len(rows) + 1
    adding = {key for key in ROWS_NS if key[0] in ("loss", "backward", "recompute_backward") and micro_batches > 1}
    assert rows.keys() == {(*key, False) for key in ROWS_NS} | {(*key, True) for key in adding}
    for row in profile_of(model, recipe).compute.measured:
        for adds in (False, True):
            if found_row := rows.get((row.kind, row.block, adds)):
                assert found_row == row._replace(duration_ns=(1 + adds) * row.duration_ns, adds=adds)
    assert simulated_engine and all(len(m.layers) == blocks.LAYERS for m in simulated_engine)


MS = 1_000_000


@given(spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=40))
def test_how_much_of_the_time_before_an_op_was_work_is_exact(spans: list[tuple[int, int]]) -> None:
    end, laid = 0, []
    for pause, length in spans:
        laid.append((end + pause, end + pause + length))
        end = laid[-1][1]
    worked = {t for start, stop in laid for t in range(start, stop)}
    expected = [len(worked & set(range(start - 150, start))) * MS for start, _ in laid]
    assert blocks.worked_before([(start * MS, stop * MS) for start, stop in laid]) == expected
    assert [blocks.Sample(1, ns).sustained for ns in (134 * MS, 135 * MS)] == [False, True]


@pytest.mark.parametrize(
    ("on_host", "steady_parts", "ms"), [(False, 5, {40}), (False, 2, {40, 50}), (False, 0, {50}), (True, 5, {50})]
)
def test_of_a_gpus_ops_those_after_work_without_a_pause_count_if_there_are_enough(
    on_host: bool, steady_parts: int, ms: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op follows a pause and takes 50 ms, but for the last parts, where each takes 40 and none pauses. In two parts layers
    have enough of these and the head has not."""

    def train(device: Any, model: ModelSpec, recipe: Recipe, plan: Plan, **_: Any) -> tuple[Schedule, Trace]:
        schedule = lower(model, recipe, plan)
        trace = simulate(schedule, profile_of(model, recipe), steps=20, contention=False)
        events, spans = list(trace.events), []
        for i in sorted(range(len(events)), key=lambda i: events[i].start_ns):
            event = events[i]
            if schedule.part(trace.parts[event.part]).ops[event.position].lane == "compute":
                steady = event.part >= len(trace.parts) - steady_parts
                start = (spans[-1][1] if spans else 0) + (0 if steady else 400 * MS)
                spans.append((start, start + (40 if steady else 50) * MS))
                events[i] = event._replace(start_ns=spans[-1][0], end_ns=spans[-1][1])
        return schedule, replace(trace, events=tuple(events))

    monkeypatch.setattr(blocks, "_train", train)
    monkeypatch.setattr(blocks, "_loss_forward", lambda *_, **__: [max(ms) * MS])
    device: Any = SimpleNamespace(on_host=on_host, memory_bytes=1 << 40, name="a device")
    found = blocks.measure_blocks(device, model=llama(), recipe=replace(RECIPE, micro_batches=1), budget_s=1.0, seed=0)
    assert {row.duration_ns // MS for row in found.measured} == ms
    assert {row.adds for row in found.measured} == ({False} if on_host else {False, True})


def test_a_gpu_measures_as_many_layers_as_it_holds_and_the_host_two() -> None:
    model = llama()

    def layers(memory_bytes: int, *, on_host: bool = False) -> int:
        device: Any = SimpleNamespace(on_host=on_host, memory_bytes=memory_bytes, name="a device")
        small, _, plan = blocks.reduced_job(device, model, RECIPE)
        assert plan.placement_of("head", None) == "resident"
        return small.n_layers

    counts = [layers(nbytes) for nbytes in range(5 << 19, 1 << 24, 1 << 18)]
    assert counts == sorted(counts) and set(counts) == set(blocks.MOST_LAYERS)
    assert layers(1 << 40, on_host=True) == blocks.LAYERS


def test_a_gpu_runs_one_micro_batch_before_fewer_layers_and_before_it_refuses() -> None:
    model, seen = llama(), []
    for nbytes in range(1 << 18, 1 << 24, 1 << 16):
        device: Any = SimpleNamespace(on_host=False, memory_bytes=nbytes, name="a device")
        try:
            small, short, plan = blocks.reduced_job(device, model, RECIPE)
        except ValueError:
            assert not seen, "what fits fits with more memory too"
            continue
        seen.append((small.n_layers, plan.placement_of("layer", 0) == "resident", short.micro_batches))
    assert seen[-1] == (8, True, 2) and (8, True, 1) in seen and (4, True, 1) in seen
    assert [layers for layers, there, _ in seen if there] == sorted(layers for layers, there, _ in seen if there)
    assert seen[0][2] == 1


def test_what_does_not_fit_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_train", lambda *_, **__: pytest.fail("something ran"))
    with pytest.raises(ValueError, match=r"calibrate: model 'small, 2 layers' needs [\d,]+ bytes of device memory"):
        calibrate(device="cpu", model=llama(), recipe=replace(RECIPE, seq_len=10**8), budget_s=1.0)


def test_a_model_of_which_two_layers_do_not_fit_is_refused_with_the_bytes() -> None:
    host = Host("tiny machine", 1000, MB, 0)
    with pytest.raises(ValueError, match=r"calibrate: model 'small, 2 layers' needs [\d,]+ bytes .* has 1,000"):
        blocks.measure_blocks(host, model=llama(), recipe=RECIPE, budget_s=0.01, seed=0)


# ---- the whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Iterator[tuple[HardwareProfile, list[tuple[str, float]]]]:
    progress: list[tuple[str, float]] = []
    threads = torch.get_num_threads()
    profile = calibrate(
        device="cpu", model=llama(), recipe=RECIPE, budget_s=2.0, name="here", today=datetime.date(2030, 1, 2),
        progress=lambda what, done: progress.append((what, done)),
    )  # fmt: skip
    yield profile, progress
    torch.set_num_threads(threads)


def test_a_calibrated_profile_answers_all_that_a_prediction_asks(
    measured: tuple[HardwareProfile, list[tuple[str, float]]],
) -> None:
    profile, _ = measured
    for activations in ("keep", "recompute"):
        plan = Plan(
            placement={"default": "streamed", "0": "resident"}, activations={"default": activations},  # type: ignore[dict-item]
            chunk_bytes=4096,
        )  # fmt: skip
        for schedule in (lower(llama(), RECIPE, plan), lower_evaluation(llama(), RECIPE, plan)):
            assert works(schedule, profile).notes == ()
        predicted = simulate(lower(llama(), RECIPE, plan), profile)
        # What stays unmeasured is what compute and copies take from each other.
        assert all("compute" in note or "not steady" in note for note in predicted.notes), predicted.notes


def test_a_calibrated_profile_says_when_it_is_asked_about_another_recipe(
    measured: tuple[HardwareProfile, list[tuple[str, float]]],
) -> None:
    profile, _ = measured
    for change in ({"precision": "bf16"}, {"seq_len": 32}, {"loss_tile": 8}, {"attention": "eager"}):
        schedule = lower(llama(), replace(RECIPE, **change), Plan())  # type: ignore[arg-type]
        assert any("outside the measured durations" in note for note in works(schedule, profile).notes), change


def test_every_combination_of_traffic_was_measured(measured: tuple[HardwareProfile, list[tuple[str, float]]]) -> None:
    profile, _ = measured
    threads = [n for n, _ in profile.adam_rates]
    assert threads[0] == 1 and threads[-1] == profile.cores == usable_cores()
    combinations = {(r.adam_threads, r.h2d_bytes_per_s > 0, r.d2h_bytes_per_s > 0) for r in profile.sharing}
    links = [(True, False), (False, True), (True, True)]
    assert combinations == {(n, *link) for n in threads for link in links} | {(0, True, True)}
    assert Sharing(profile).notes == []
    # DRAM moves at least what one of its users alone was seen to move.
    assert profile.dram_bytes_per_s >= max(rate for _, rate in profile.adam_rates) // 2


def test_the_provenance_says_when_with_what_and_for_which_model(
    measured: tuple[HardwareProfile, list[tuple[str, float]]],
) -> None:
    profile, _ = measured
    for said in ("2030-01-02", cpu_name(), torch.__version__, "'small'", "fp32", "2 x 16 tokens", "threads", "typical to worst"):
        assert said in profile.provenance
    assert (profile.name, profile.host_memory_bytes) == ("here", usable_memory())
    assert profile.compute.on_host


def test_a_calibrated_profile_survives_its_file(
    measured: tuple[HardwareProfile, list[tuple[str, float]]], tmp_path: Path
) -> None:
    profile, _ = measured
    save_hardware(tmp_path / "here.json", profile)
    assert load_hardware(tmp_path / "here.json") == profile


def test_progress_goes_from_nothing_to_all(measured: tuple[HardwareProfile, list[tuple[str, float]]]) -> None:
    _, progress = measured
    shares = [done for _, done in progress]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0, 1)
    assert len({what for what, _ in progress}) == len(progress) >= 5


def test_without_a_model_there_are_rates_and_the_profile_says_so() -> None:
    profile = calibrate(device="cpu", budget_s=1.0, adam_threads=[1])
    assert profile.compute.measured == () and "no model's blocks measured" in profile.provenance
    assert [n for n, _ in profile.adam_rates] == [1]
    assert works(lower(llama(), RECIPE, Plan()), profile).notes == ()  # nothing was promised


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"model": llama()}, "recipe must be given with a model"),
        ({"budget_s": 0.1}, r"budget_s must be at least 1\.0, got 0\.1"),
        ({"adam_threads": [0, 1]}, r"adam_threads must be one or more counts in 1\.\.\d+, one a core, got \[0, 1\]"),
        ({"adam_threads": [100_000]}, r"got \[100000\]"),
        ({"adam_threads": []}, r"got \[\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_runs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"calibrate: {message}" if not message.startswith("got") else message):
        calibrate(**{"device": "cpu", **change})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_missing_device_is_an_error_that_says_so() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        calibrate(device="cuda", budget_s=1.0)
