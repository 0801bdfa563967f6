"""Bad input to the command line, kind by kind: exit code 2, one line that names the file or option and the field, and not a file
written, changed or left behind (`Commands.refused` asserts these of every call here)."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatrain import data as data_module
from megatrain import training
from megatrain.cli import main
from megatrain.cli import run as run_verb
from megatrain.files import save_job
from tests.commands import Commands, edit, edit_json, job

pytestmark = pytest.mark.usefixtures("world")
RUN = ("run", "plan.yaml", "--data", "text", "--device", "cpu", "--steps", 1)
SIMULATE = ("simulate", "plan.yaml", "--hardware", "hw.json", "--steps", 2)


def holds(text: str, *parts: str) -> None:
    assert all(part in text for part in parts), text


# ---- models and weights ------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _corrupt(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[8:40] = b"\xff" * 32
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(Path.unlink, "it has neither"), (_cut, "truncated"), (_corrupt, "corrupt"), (lambda p: p.write_bytes(b""), "is empty")],
)
def test_weights_that_are_not_whole(megatrain: Commands, damage: Any, said: str) -> None:
    damage(Path("model/model.safetensors"))
    holds(megatrain.refused(*RUN), "model", "safetensors", said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_configs_that_are_no_model(megatrain: Commands, changes: dict[str, Any], said: str) -> None:
    edit_json("model/config.json", head_dim=..., **changes)
    for verb in (RUN, SIMULATE, ("plan", "--model", "model", "--hardware", "hw.json", "--out", "found.yaml")):
        text = megatrain.refused(*verb)
        holds(text.lower(), "config.json", said)


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "is not finite"), (3.4e38, "must be finite as BF16")])
def test_a_weight_that_cannot_be_trained_is_named_with_its_file(megatrain: Commands, value: float, said: str) -> None:
    path, name = Path("model/model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors = {key: tensor.float() for key, tensor in load_file(path).items()}
    tensors[name][3, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    text = megatrain.refused(*RUN)
    assert text.startswith(f"{path.absolute()}: ") and name in text and said in text


def test_a_config_that_is_no_json(megatrain: Commands) -> None:
    Path("model/config.json").write_text("{")
    holds(megatrain.refused(*SIMULATE), "config.json", "JSON")


def test_a_shape_has_no_weights_and_no_tokenizer(megatrain: Commands) -> None:
    Path("plan.yaml").write_text("model: qwen2.5-0.5b\nrecipe: {seq_len: 32}\nplan: {}\n")
    holds(megatrain.refused(*RUN), "qwen2.5-0.5b", "--random-weights")
    holds(megatrain.refused(*RUN, "--random-weights"), "--tokenizer", "qwen2.5-0.5b")


@pytest.mark.parametrize(
    ("arguments", "near"),
    [(("--model", "qwen2.5-7bb"), "qwen2.5-7b"), (("--model", "model", "--hardware", "h2000"), "h200"),
     (("--model", "model", "--hardware", "nowhere.json"), "built in are")],
)  # fmt: skip
def test_names_that_are_not_known(megatrain: Commands, arguments: tuple[str, ...], near: str) -> None:
    for verb in (("simulate",), ("plan", "--out", "found.yaml")):
        holds(megatrain.refused(*verb, *arguments), arguments[-1], near)
    Path("plan.yaml").write_text("model: qwen2.5-7bb\nrecipe: {}\nplan: {}\n")
    holds(megatrain.refused(*RUN), "qwen2.5-7bb", "did you mean qwen2.5-7b?")


# ---- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  chunk_bytes: 4KiB", "  chunk_byte: 4KiB", ("plan.chunk_byte", "did you mean chunk_bytes?")),
        ("  seq_len: 32", "  sequence_len: 32", ("recipe.sequence_len", "seq_len")),
        ("recipe:", "receipt:", ("receipt", "did you mean recipe?")),
        ("  chunk_bytes: 4KiB", "  chunk_bytes: -4096", ("plan.chunk_bytes", "-4096")),
        ("  chunk_bytes: 4KiB", "  chunk_bytes: 4K", ("plan.chunk_bytes", "4K")),
        ("  chunk_bytes: 4KiB", "  weight_slots: 0", ("plan.weight_slots", "got 0")),
        ("  chunk_bytes: 4KiB", "  update: during_backward", ("plan.update", "clip_norm")),
        ("  chunk_bytes: 4KiB", "  placement: {7: resident}", ("plan.placement", "7")),
        ("  chunk_bytes: 4KiB", "  placement: {default: nowhere}", ("plan.placement['default']", "nowhere")),
        ("  seq_len: 32", "  seq_len: 1", ("recipe.seq_len", "got 1")),
        ("  chunk_bytes: 4KiB", "\tchunk_bytes: 4KiB", ("line",)),
        ("model: model", "model: ''", ("model",)),
    ],
)
def test_plans_that_hold_what_no_plan_does(megatrain: Commands, old: str, new: str, said: tuple[str, ...]) -> None:
    edit("plan.yaml", old, new)
    for verb in (RUN, SIMULATE, ("plan", "plan.yaml", "--hardware", "hw.json", "--out", "found.yaml")):
        holds(megatrain.refused(*verb), "plan.yaml", *said)


def test_more_threads_than_cores(megatrain: Commands) -> None:
    cores = len(os.sched_getaffinity(0))
    save_job("plan.yaml", job(adam_threads=cores + 1))
    holds(megatrain.refused(*RUN), "plan.yaml: plan.adam_threads", f"at most the {cores} cores", f"got {cores + 1}")
    save_job("plan.yaml", replace(job(), recipe=replace(job().recipe, compute_threads=10**18)))
    holds(megatrain.refused(*RUN), "plan.yaml: recipe.compute_threads", f"at most the {cores} cores", f"got {10**18}")


def test_plan_files_that_are_none(megatrain: Commands) -> None:
    Path("empty.yaml").touch()
    said_of = {"nowhere.yaml": "no such file", "model": "is a directory", "empty.yaml": "is empty", "hw.json": "is no field"}
    for name, said in said_of.items():
        holds(megatrain.refused("simulate", name), name, said)
        holds(megatrain.refused("run", name, "--data", "text"), name, said)


# ---- data --------------------------------------------------------------------------------------------------------------


def test_data_that_is_none(megatrain: Commands) -> None:
    Path("empty").mkdir()
    Path("empty.txt").touch()
    Path("short.txt").write_text("short")
    Path("odd.bin").write_bytes(b"\0")
    Path("latin.txt").write_bytes(b"caf\xe9 " * 100)
    Path("bad.jsonl").write_text('{"text": 1}\n')
    for name in ("nowhere", "empty", "empty.txt", "short.txt", "odd.bin", "latin.txt", "bad.jsonl"):
        holds(megatrain.refused("run", "plan.yaml", "--device", "cpu", "--data", name, "--save", "trained"), name)


def test_tokenizers_that_are_none(megatrain: Commands) -> None:
    holds(megatrain.refused(*RUN, "--tokenizer", "nowhere"), "nowhere", "tokenizer")
    holds(megatrain.refused(*RUN, "--tokenizer", "text"), "text", "tokenizer")
    Path("model/tokenizer.json").unlink()
    holds(megatrain.refused(*RUN), "model", "tokenizer")


# ---- machines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adam_rates": ...}, "adam_rates"), ({"adam_rates": []}, "adam_rates"), ({"compute": ...}, "compute"),
        ({"adam_rate": []}, "did you mean adam_rates?"), ({"cores": 0}, "cores"), ({"h2d": {"latency_ns": 1}}, "h2d.rates"),
        ({"host_memory_bytes": -1}, "host_memory_bytes"),
    ],
)  # fmt: skip
def test_hardware_files_that_are_no_machine(megatrain: Commands, changes: dict[str, Any], said: str) -> None:
    edit_json("hw.json", **changes)
    holds(megatrain.refused(*SIMULATE), "hw.json", said)
    holds(megatrain.refused("plan", "plan.yaml", "--hardware", "hw.json", "--out", "found.yaml"), "hw.json", said)


def test_a_hardware_file_that_is_no_json(megatrain: Commands) -> None:
    holds(megatrain.refused("simulate", "plan.yaml", "--hardware", "plan.yaml"), "plan.yaml", "is not JSON")


# ---- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "--model", "model", "--clip", "abc"), ("--clip", "abc")),
        (("simulate", "--model", "model", "--clip", "-1"), ("--clip", "-1")),
        (("simulate", "--model", "model", "--batch", "0"), ("--batch", "got 0")),
        (("simulate", "--model", "model", "--seq-len", "1"), ("--seq-len", "got 1")),
        (("simulate", "--model", "model", "--precision", "fp64"), ("--precision", "fp64")),
        (("simulate", "--model", "model", "--gpu-memory", "24G"), ("--gpu-memory", "24G", "24GiB")),
        (("simulate", "--model", "model", "--host-memory", "0"), ("--host-memory", "> 0")),
        (("simulate", "--model", "model", "--steps", "0"), ("--steps", "2")),
        (("simulate", "--model", "model", "--depths", "1-2"), ("--sweep",)),
        (("simulate", "--model", "model", "--sweep", "new", "--depths", "0-2"), ("--depths", "0-2")),
        (("simulate", "--model", "model", "--sweep", "new", "--depths", "1-99999999999"), ("--depths",)),
        (("simulate", "--model", "model", "--sweep", "new", "--chunks", "1MB,x"), ("--chunks", "'x'")),
        (("simulate", "--model", "model", "--sweep", "new", "--out", "a.json"), ("--out", "--sweep")),
        (("simulate",), ("--model",)),
        (("simulate", "--modle", "model"), ("--modle", "--model")),
        (("plan", "--model", "model"), ("--out",)),
        (("plan", "--model", "model", "--out", "a.yaml", "--lr", "nan"), ("--lr",)),
        ((*RUN, "--steps", "0"), ("--steps", "1")),
        ((*RUN, "--steps", "many"), ("--steps", "integer")),
        ((*RUN, "--seed", "-1"), ("--seed",)),
        ((*RUN, "--device", "tpu"), ("--device", "tpu")),
        (("run", "plan.yaml"), ("--data",)),
        (("run",), ("PLAN.yaml",)),
        (("calibrate", "--out", "a.json", "--budget", "0"), ("--budget",)),
        (("compare", "a.json", "b.json", "--tolerance", "nan"), ("--tolerance",)),
        (("demo", "--steps", "9"), ("--steps", "10")),
        (("demo", "--out", "text"), ("--out", "text", "empty")),
        (("demo", "--out", "plan.yaml"), ("--out", "plan.yaml")),
        (("trian",), ("trian",)),
        (("--nope",), ("--nope",)),
    ],
)  # fmt: skip
def test_options_that_say_nothing(megatrain: Commands, arguments: tuple[str, ...], said: tuple[str, ...]) -> None:
    holds(megatrain.refused(*arguments), *said)


# ---- outputs -----------------------------------------------------------------------------------------------------------


def _unwritable(folder: Path) -> Path:
    """A directory that takes no file, of root either."""
    if os.geteuid() == 0:
        return Path("/proc")
    folder.mkdir()
    folder.chmod(0o500)
    return folder


@pytest.mark.parametrize(
    "verb",
    [
        ("calibrate", "--device", "cpu"), SIMULATE, ("plan", "plan.yaml", "--hardware", "hw.json"),
        ("run", "plan.yaml", "--data", "text", "--device", "cpu"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_written_are_refused_before_the_work(
    megatrain: Commands, verb: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the work began")

    for place in ("megatrain.calibrate.calibrate", "sim.planner.plan_for", "megatrain.cli.predict.predict",
                  "megatrain.cli.run.train", "megatrain.cli.run.open_data"):  # fmt: skip
        monkeypatch.setattr(place, work)
    holds(megatrain.refused(*verb, "--out", "nowhere/a.json"), "--out", "nowhere")
    holds(megatrain.refused(*verb, "--out", "text"), "--out", "text", "is a directory")
    holds(megatrain.refused(*verb, "--out", "plan.yaml/a.json"), "--out", "plan.yaml")
    os.mkfifo("pipe")
    Path("to-pipe").symlink_to("pipe")
    for name in ("pipe", "to-pipe"):
        holds(megatrain.refused(*verb, "--out", name), f"--out: {name}: must be a regular file or new")
    locked = _unwritable(Path("locked"))
    holds(megatrain.refused(*verb, "--out", locked / "a.json"), "--out", str(locked))
    if verb[0] in ("run", "simulate"):
        holds(megatrain.refused(*verb, "--out", "plan.yaml"), "--out", "plan.yaml")


def test_folders_that_cannot_be_written_are_refused_before_the_work(
    megatrain: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = _unwritable(Path("locked"))
    assert megatrain(*SIMULATE, "--steps", 3, "--out", "a.json").code == 0
    for option, *verb in (
        ("--sweep", "simulate", "plan.yaml"), ("--save", *RUN), ("--out", "compare", "a.json", "a.json"), ("--out", "demo"),
    ):  # fmt: skip
        holds(megatrain.refused(*verb, option, "plan.yaml"), option, "plan.yaml")
        holds(megatrain.refused(*verb, option, "plan.yaml/new"), option, "plan.yaml")
        holds(megatrain.refused(*verb, option, locked / "new"), option, str(locked))
    holds(megatrain.refused(*RUN, "--save", "model"), "--save", "model", "empty")
    for name, option, *verb in (
        ("report.md", "--out", "compare", "a.json", "a.json"), ("throughput.png", "--out", "compare", "a.json", "a.json"),
        ("sweep.csv", "--sweep", "simulate", "plan.yaml"), ("sweep.png", "--sweep", "simulate", "plan.yaml"),
    ):  # fmt: skip
        Path(f"of-{name}").mkdir()
        os.mkfifo(f"of-{name}/{name}")
        holds(megatrain.refused(*verb, option, f"of-{name}"), f"{option}: of-{name}/{name}: must be a regular file or new")
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    holds(megatrain.refused(*RUN, "--save", "trained"), "--save", "1,000")


# ---- records -----------------------------------------------------------------------------------------------------------


def test_records_that_do_not_compare(megatrain: Commands) -> None:
    assert megatrain(*SIMULATE, "--steps", 3, "--out", "predicted.json.gz").code == 0
    assert megatrain(*RUN, "--steps", 3).code == 0
    holds(megatrain.refused("compare", "run.json.gz", "predicted.json.gz"), "the first file must be a prediction")
    holds(megatrain.refused("compare", "predicted.json.gz", "predicted.json.gz"), "the second file must be a run")
    holds(megatrain.refused("compare", "predicted.json.gz", "run.json.gz", "predicted.json.gz"), "in pairs")
    save_job("other.yaml", job(chunk_bytes=8192))
    assert megatrain("simulate", "other.yaml", "--hardware", "hw.json", "--out", "other.json").code == 0
    holds(megatrain.refused("compare", "other.json", "run.json.gz"), "different schedules")
    whole = Path("run.json.gz").read_bytes()
    Path("cut.json.gz").write_bytes(whole[: len(whole) // 2])
    Path("cut.json").write_bytes(gzip.decompress(whole)[:1000])
    record = json.loads(gzip.decompress(whole))
    record["trace"]["events"] = record["trace"]["events"][:-5]
    Path("fewer.json").write_text(json.dumps(record))
    for name in ("cut.json.gz", "cut.json", "fewer.json", "hw.json", "plan.yaml", "nowhere.json", "text"):
        holds(megatrain.refused("compare", "predicted.json.gz", name), name)


def test_a_damaged_trace_is_named_by_its_file(megatrain: Commands) -> None:
    assert megatrain(*SIMULATE, "--steps", 3, "--out", "p.json").code == 0
    run = json.loads(Path("p.json").read_text())
    run["trace"]["source"] = "cpu"
    Path("m.json").write_text(json.dumps(run))
    assert megatrain("compare", "p.json", "m.json").code == 0
    shutil.rmtree("report")
    for place, whole in enumerate(("p.json", "m.json")):
        record = json.loads(Path(whole).read_text())
        traces = {
            "no such op": record["trace"] | {"events": [[0, 999999, 0, 0, 0], *record["trace"]["events"]]},
            "part 0 (prologue) ran x": record["trace"] | {"digests": ["x", *record["trace"]["digests"][1:]]},
            "must end after the one before, got 0 ns": record["trace"]
            | {"events": [[*e[:2], 0, 0, 0] for e in record["trace"]["events"]]},
            "not in this order": record["trace"] | {"events": [[*e[:4], -1] for e in record["trace"]["events"]]},
            "part 0 is 'x'": record["trace"] | {"parts": ["x", *record["trace"]["parts"][1:]]},
        }
        for said, trace in traces.items():
            Path("bad.json").write_text(json.dumps(record | {"trace": trace}))
            pair = ["p.json", "m.json"]
            pair[place] = "bad.json"
            text = megatrain.refused("compare", *pair)
            assert text.startswith("bad.json: ") and said in text
            assert megatrain.refused("compare", "p.json", "m.json", *pair) == text  # a further pair's too


@pytest.mark.filterwarnings("error")
def test_names_that_no_font_has_are_drawn_as_spaces(megatrain: Commands) -> None:
    assert megatrain(*SIMULATE, "--steps", 3, "--out", "p.json").code == 0
    run = json.loads(Path("p.json").read_text()) | {"model_name": "a\n\x1b[31mb", "hardware": "\x07|"}
    Path("p.json").write_text(json.dumps(run))
    run["trace"]["source"] = "cpu"
    Path("m.json").write_text(json.dumps(run))
    assert megatrain("compare", "p.json", "m.json").code == 0
    assert "a  [31mb" in Path("report/report.md").read_text().splitlines()[0]


def test_what_a_longer_run_has_beyond_the_prediction_is_to_be_whole_too(megatrain: Commands) -> None:
    assert megatrain(*SIMULATE, "--steps", 3, "--out", "p.json").code == 0
    assert megatrain(*SIMULATE, "--steps", 5, "--out", "longer.json").code == 0
    run = json.loads(Path("longer.json").read_text())
    run["trace"]["source"] = "cpu"
    Path("m.json").write_text(json.dumps(run))
    assert megatrain("compare", "p.json", "m.json").code == 0
    for events in (run["trace"]["events"][:-1], [*run["trace"]["events"], run["trace"]["events"][-1]]):
        Path("bad.json").write_text(json.dumps(run | {"trace": run["trace"] | {"events": events}}))
        holds(megatrain.refused("compare", "p.json", "bad.json"), "bad.json: ", "epilogue")


# ---- what is nobody's mistake ------------------------------------------------------------------------------------------


def test_ctrl_c_ends_in_one_line_and_130(megatrain: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(data_module.Data, "batch", interrupted)
    ended = megatrain(*RUN, "--save", "trained")
    assert (ended.code, ended.out, ended.err.strip()) == (130, "", "error: interrupted")
    assert not Path("trained").exists() and not Path("run.json.gz").exists()


def test_a_failed_run_is_code_1_and_a_bug_is_no_usage_error(megatrain: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(problem: Exception) -> Any:
        def train(*arguments: Any, **options: Any) -> training.Trained:
            raise problem

        return train

    monkeypatch.setattr(run_verb, "train", failing(RuntimeError("3:load[1.0]\nfailed")))
    ended = megatrain(*RUN)
    assert (ended.code, ended.err) == (1, "error: 3:load[1.0] failed\n")

    def foreign(*arguments: Any, **options: Any) -> Any:
        json.loads("{")  # a ValueError from somebody else's code

    monkeypatch.setattr(importlib.import_module("megatrain.cli.app"), "load_record", foreign)
    monkeypatch.setattr("sys.argv", ["megatrain", "compare", "a", "b"])
    with pytest.raises(json.JSONDecodeError):
        main()
