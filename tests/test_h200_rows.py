"""`papers.h200.rows`: what it refuses, and what its figures are of."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.calibrate import calibrate
from megatrain.engine.engine import Engine
from megatrain.files import load_hardware, load_job, save_hardware
from megatrain.hardware import H200, HardwareProfile
from megatrain.plan import Plan
from megatrain.schedule import lower
from papers.h200 import rows, sustained
from papers.h200.clocks import Clocks
from papers.h200.models import qwen
from papers.h200.rates import MACHINE_RATES, rates_of
from papers.h200.rows import ROWS, Known, checksums, main
from papers.h200.workload import RandomWeights, batches


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "foo"], "row: must be of 7b-all-4096, "),
        (["measure", "7b-all-4096", "foo"], ", got foo"),
        (["calibrate", "foo"], ", got foo"),
        (["measure", "--machine", "/nope"], "--machine: is not JSON: "),
        (["measure", "--machine", "[1]"], "--machine: h2d_bytes_per_s: must be a number > 0, got null"),
        (["measure", "--machine", json.dumps(dict.fromkeys(MACHINE_RATES, 0))], "must be a number > 0, got 0"),
    ],
)
def test_what_cannot_begin_is_one_line_and_writes_nothing(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments if arguments[0] == "plan" else [*arguments, "--device", "cpu", "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err
    assert not out.exists()


def test_rates_that_a_row_has_are_taken_from_it() -> None:
    rates = dict.fromkeys(MACHINE_RATES, 2e9)
    assert rates_of("null") is None
    assert rates_of(json.dumps(rates | {"layer_forward_s": 0.1})) == rates


def test_blocks_are_calibrated_once_for_all_rows_that_they_are_the_same_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = rows.blocks_of
    later: list[str] = []

    def counted(device: rows.Device, model: rows.ModelSpec, recipe: rows.Recipe) -> tuple[rows.MeasuredOp, ...]:
        later.append(model.name)
        return tuple(op._replace(tokens=op.tokens + len(later)) for op in honest(device, model, recipe))

    def quickly(*, budget_s: float, **asked: Any) -> HardwareProfile:
        return calibrate(budget_s=4.0, **asked)

    monkeypatch.setattr(rows, "blocks_of", counted)
    monkeypatch.setattr(rows, "calibrate", quickly)
    names = ["7b-all-16384", "7b-all-65536", "7b-24-16384-unclipped", "7b-24-16384"]
    assert main(["calibrate", *names, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["7b-all-16384: calibrated", "7b-24-16384-unclipped: calibrated"]
    assert len(later) == 1
    measured = load_hardware(tmp_path / "calibrated.json").compute.measured
    assert {len({op.tokens for op in measured if op.kind == kind}) for kind in ("forward", "recompute_backward")} == {2}


def test_blocks_of_further_rows_are_added_to_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "calibrate", None)  # the machine is not measured again
    file = tmp_path / "old.json"
    save_hardware(file, H200)
    assert main(["calibrate", "3b-all-4096", "--device", "cpu", "--out", str(tmp_path / "new"), "--onto", str(file)]) == 0
    found = load_hardware(tmp_path / "new" / "calibrated.json")
    assert found.compute.measured and not H200.compute.measured
    assert found.provenance == f"{H200.provenance}; later, on a machine of the same kind, blocks of 3b-all-4096"
    assert dataclasses.replace(found, provenance=H200.provenance, compute=H200.compute) == H200
    assert main(["calibrate", "3b-all-4096", "--device", "cpu", "--out", str(tmp_path), "--onto", str(tmp_path / "none")]) == 2


def test_a_row_that_fails_is_a_line_with_an_error_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import json, sys; input(); {}"
    works = "print('measured'); print(json.dumps({'step_s': 1}))"
    commands = {"7b-all-4096": code.format("sys.exit('too bad')"), "7b-24-16384": code.format(works)}
    monkeypatch.setattr(rows, "child_command", lambda name, *rest: [sys.executable, "-c", commands[name]])
    assert main(["measure", *commands, "--device", "cpu", "--out", str(tmp_path)]) == 1
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert capsys.readouterr().out.splitlines() == (tmp_path / "rows.jsonl").read_text().splitlines()
    assert lines[0] == {"row": "7b-all-4096", "error": "ended with 1: too bad", "out_of_memory": None}
    assert lines[1]["row"] == "7b-24-16384" and lines[1]["step_s"] == 1


@pytest.mark.parametrize("name", ROWS)
def test_every_row_can_be_rehearsed_under_its_plan(name: str) -> None:
    job, model = load_job(rows.PLANS / f"{name}.yaml"), qwen(ROWS[name].model, "cpu")
    lower(*rows.rehearsal(model, job.recipe, job))


def test_a_calls_rates_are_measured_once_for_the_machine_and_once_for_blocks_that_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a child is told is what the rows before it said."""
    told: list[Known] = []
    rates = dict.fromkeys(MACHINE_RATES, 2e9) | {"layer_forward_s": 0.1, "loss_s": 0.2}
    code = f"import json; input(); print('measured'); print(json.dumps({{'rates': {rates}}}))"

    def child_command(name: str, device: str, commit: str, known: Known, out: Path) -> list[str]:
        told.append(known)
        return [sys.executable, "-c", code]

    monkeypatch.setattr(rows, "child_command", child_command)
    names = ["7b-all-16384", "7b-all-65536", "7b-all-4096"]
    assert main(["measure", *names, "--device", "cpu", "--out", str(tmp_path)]) == 0
    machine = dict.fromkeys(MACHINE_RATES, 2e9)
    blocks = {"layer_forward_s": 0.1, "loss_s": 0.2}
    assert told == [Known(), Known(machine=machine, blocks=blocks), Known(machine=machine)]


def test_a_checksum_sees_every_byte_of_a_blocks_weights() -> None:
    model = qwen("7B", "cpu")
    recipe = dataclasses.replace(ROWS["7b-all-4096"].recipe, micro_batch_size=2, seq_len=16, compiled=False, loss_tile=16)
    with Engine(model, recipe, Plan(chunk_bytes=0, adam_threads=2), RandomWeights(model, "cpu")) as engine:
        before = checksums(engine)
        assert checksums(engine) == before
        for block in (0, len(before) - 1):
            weights = engine.memory.named(f"weights[{block}]")
            for at in (0, weights.numel() - 1):
                weights[at] ^= 1
                changed = [a != b for a, b in zip(before, checksums(engine), strict=True)]
                assert changed == [i == block for i in range(len(before))]
                weights[at] ^= 1
        engine.step(batches(model, recipe, 1)[0])
        assert all(a != b for a, b in zip(before, checksums(engine), strict=True))


def test_clock_and_power_are_medians_of_what_nvidia_smi_says_from_a_time_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    later = r"[N/A], 9\n1500, 700.5\n1980, 400\n1600, 600\n"
    smi.write_text(f"#!/bin/sh\necho '100, 10.0'\nread go < \"$0.go\"\nprintf '{later}'\nexec sleep 60\n")
    smi.chmod(0o755)
    os.mkfifo(tmp_path / "nvidia-smi.go")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Clocks("cuda") as clocks:
        wait_for(lambda: clocks.since(0.0) == {"sm_mhz": 100.0, "power_w": 10.0, "samples": 1})
        began = time.perf_counter()
        assert clocks.since(began) == {}
        (tmp_path / "nvidia-smi.go").write_text("go\n")
        wait_for(lambda: clocks.since(began).get("samples") == 3)
        assert clocks.since(began) == {"sm_mhz": 1600.0, "power_w": 600.0, "samples": 3}
    with Clocks("cpu") as clocks:
        assert clocks.since(0.0) == {} and clocks.each_second(0.0) == []
        clocks._samples += [(7.5, 100.0, 10.0), (8.1, 1000.0, 300.0), (8.2, 1100.0, 500.0), (8.9, 1500.0, 400.0)]
        assert clocks.each_second(8.0) == [[-1, 100.0, 10.0], [0, 1100.0, 400.0]]


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rows_trace_tells_sustained_work_from_what_follows_a_pause(capsys: pytest.CaptureFixture[str]) -> None:
    assert sustained.main(["14bx62-all-1024", "7b-all-4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["14bx62-all-1024"] * 3 + ["7b-all-4096"]
    found = {line["op"]: line for line in sustained.layer_times("14bx62-all-1024")}
    ran = [found[op][f"{column}, of"] for op in ("backward", "recompute backward") for column in sustained.WORKED]
    assert sum(ran) == 62 * rows.MEASURED  # type: ignore[arg-type]
    assert all(line["sustained, of"] == 0 for line in found.values()), "the GPU waits for the host most of the time"


def test_traces_of_other_schedules_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows").mkdir()
    shutil.copy(rows.RESULTS / "rows" / "7b-all-4096.measured.json.gz", tmp_path / "rows" / "7b-all-16384.measured.json.gz")
    monkeypatch.setattr(sustained, "RESULTS", tmp_path)
    for name, says in (("7b-all-16384", "digests: must be"), ("7b-all-4096", "no such file"), ("8b", "row: must be of")):
        assert sustained.main([name]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and says in err
