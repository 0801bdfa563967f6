"""Files: what is written reads back equal; what is wrong is one line that names the file, the field and the rule; a failed write
changes nothing."""

from __future__ import annotations

import copy
import gzip
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain import files
from megatrain.files import (
    Job,
    Record,
    StepFigures,
    format_bytes,
    load_hardware,
    load_job,
    load_record,
    parse_bytes,
    save_hardware,
    save_job,
    save_record,
    write_file,
)
from megatrain.files.fields import plain
from megatrain.files.text import dump_json, read_text
from megatrain.hardware import H200, MOST, Compute, ComputeKind, HardwareProfile, Link, MeasuredOp, SharingRow
from megatrain.model import BlockKind
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from megatrain.schedule import lower
from megatrain.trace import Event, Trace
from sim.simulate import simulate
from tests.strategies import cases

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JOB = Job(model="llama3-8b", recipe=Recipe(), plan=Plan())

# ---- strategies ------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=20)
words = texts.filter(lambda t: bool(t.strip()))
rates, counts, durations = (st.integers(1, MOST[kind]) for kind in ("bytes_per_s", "bytes", "ns"))
optimizers = st.builds(
    AdamW,
    lr=st.floats(1e-30, 1.0), beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.99), eps=st.floats(1e-12, 1e-3),
    weight_decay=st.floats(0, 1), schedule=st.just("cosine"), warmup_steps=st.integers(0, 9), total_steps=st.integers(10, 99),
    min_lr=st.just(0.0),
)  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    _, recipe, plan = draw(cases())
    plan = replace(plan, chunk_bytes=draw(st.one_of(st.just(plan.chunk_bytes), st.integers(0, 2**40).map(lambda n: n * 512))))
    return Job(model=draw(words), recipe=replace(recipe, optimizer=draw(optimizers)), plan=plan)


@st.composite
def links(draw: st.DrawFn) -> Link:
    sizes = sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=5)))
    peak = draw(rates)
    rows = [(size, draw(st.integers(1, peak))) for size in sizes[:-1]]
    return Link(latency_ns=draw(st.integers(0, 10**9)), rates=(*rows, (sizes[-1], peak)))


measured_ops = st.builds(
    MeasuredOp, kind=st.sampled_from(get_args(ComputeKind)), block=st.sampled_from(get_args(BlockKind)), numel=counts,
    tokens=counts, seq_len=counts, duration_ns=durations, adds=st.just(False),
).flatmap(lambda row: st.just(row) | st.just(row._replace(kind="loss", adds=True)))  # fmt: skip


@st.composite
def profiles(draw: st.DrawFn) -> HardwareProfile:
    threads = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=5)))
    h2d, d2h, adam = draw(rates), draw(rates), draw(rates)
    sharing = [
        SharingRow(h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h),
        *(SharingRow(adam_threads=n, h2d_bytes_per_s=h2d, adam_bytes_per_s=adam) for n in threads),
    ]
    return HardwareProfile(
        name=draw(words), provenance=draw(words), device_memory_bytes=draw(counts), host_memory_bytes=draw(counts),
        cores=draw(st.integers(threads[-1], 512)), h2d=draw(links()), d2h=draw(links()),
        compute=Compute(
            flops_per_s={"bf16": draw(rates), "fp32": draw(rates)}, attention_flops_per_s=draw(rates),
            memory_bytes_per_s=draw(rates), launch_ns=draw(st.integers(0, 10**9)), on_host=draw(st.booleans()),
            measured=tuple(draw(st.lists(measured_ops, max_size=4, unique_by=lambda r: r._replace(duration_ns=0)))),
        ),
        adam_rates=tuple((n, draw(rates)) for n in threads), dram_bytes_per_s=draw(rates),
        host_op_ns=draw(st.integers(0, 10**9)), sharing=tuple(sharing[: draw(st.integers(0, len(sharing)))]),
    )  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> Record:
    """A record of an arbitrary trace: that it fits a schedule is for `compare` to say."""
    model, recipe, plan = draw(cases())
    times = st.integers(0, 2**62)
    events = draw(st.lists(st.builds(Event, times, times, times, times, times), max_size=8))
    parts = draw(st.lists(words, max_size=3))
    return Record(
        job=Job(model=draw(words), recipe=recipe, plan=plan),
        model_name=model.name,
        config_json=model.config_json,
        hardware=draw(texts),
        provenance=draw(texts),
        trace=Trace(
            source=draw(st.sampled_from(["sim", "null", "cpu", "cuda"])), parts=tuple(parts), digests=tuple(parts),
            events=tuple(events), notes=tuple(draw(st.lists(texts, max_size=2))),
        ),
        created=draw(st.datetimes()).isoformat(),
        notes=tuple(draw(st.lists(texts, max_size=2))),
        steps=tuple(draw(st.lists(st.builds(StepFigures, st.floats(), st.floats(), st.floats()), max_size=3))),
    )  # fmt: skip


# ---- what is written reads back equal --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0\x85", "\x85", "a\u2028b", "\u2029 ", "a\nb\n", "\r", "\r\n", " \x85 \ufeff", "a: b # c"])
def test_a_name_with_any_break_of_a_line_reads_back_equal(tmp_path: Path, text: str) -> None:
    job = Job(model=f"0{text}", recipe=Recipe(), plan=Plan())
    for model in (job.model, f"{text}0"):
        save_job(tmp_path / "plan.yaml", replace(job, model=model))
        assert load_job(tmp_path / "plan.yaml") == replace(job, model=model)


@QUICK
@given(job=jobs(), comment=texts)
def test_a_job_reads_back_equal(tmp_path: Path, job: Job, comment: str) -> None:
    save_job(tmp_path / "plan.yaml", job, comment)
    assert load_job(tmp_path / "plan.yaml") == job


@QUICK
@given(profile=profiles())
def test_a_profile_reads_back_equal(tmp_path: Path, profile: HardwareProfile) -> None:
    save_hardware(tmp_path / "hw.json", profile)
    assert load_hardware(tmp_path / "hw.json") == profile


@QUICK
@given(record=records(), suffix=st.sampled_from([".json", ".json.gz"]))
def test_a_record_reads_back_equal(tmp_path: Path, record: Record, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    save_record(path, record)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".json.gz")
    read = load_record(path)
    assert repr(read) == repr(record)  # NaN is no equal of NaN
    assert replace(read, steps=()) == replace(record, steps=())


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(layers=(2, 3)))
def test_a_record_lowers_to_the_schedule_that_ran_without_the_models_files(tmp_path: Path, case: Any) -> None:
    model, recipe, plan = case
    schedule = lower(model, recipe, plan)
    trace = simulate(schedule, H200, steps=2)
    record = Record(
        job=Job(model="a directory long gone", recipe=recipe, plan=plan), model_name=model.name, config_json=model.config_json,
        hardware=H200.name, provenance=H200.provenance, trace=trace, created="2026-01-31T12:00:00+00:00",
    )  # fmt: skip
    save_record(tmp_path / "run.json.gz", record)
    read = load_record(tmp_path / "run.json.gz")
    again = lower(read.model_spec(), read.job.recipe, read.job.plan)
    assert read.trace == trace
    assert again.digests() == schedule.digests()


def test_a_record_states_every_field_of_its_job(tmp_path: Path) -> None:
    """So that a later default does not change what an old record ran."""
    record = Record(
        job=JOB, model_name="m", config_json='{"model_type":"llama"}', hardware="h", provenance="p",
        trace=Trace(source="sim", parts=(), digests=(), events=()), created="2026-01-31",
    )  # fmt: skip
    save_record(tmp_path / "run.json", record)
    written = json.loads((tmp_path / "run.json").read_text())["job"]
    assert written["recipe"].keys() == set(Recipe.__slots__) and written["plan"].keys() == set(Plan.__slots__)


# ---- a job's file is for people --------------------------------------------------------------------------------------


def test_a_job_is_written_short_in_order_and_with_its_comment(tmp_path: Path) -> None:
    job = Job(
        model="qwen2.5-7b",
        recipe=Recipe(seq_len=2048, clip_norm=None, optimizer=AdamW(lr=1e-5)),
        plan=Plan(placement={"default": "streamed", "3": "resident", "0-2": "resident"}, chunk_bytes=64 << 20, adam_threads=8),
    )
    save_job(tmp_path / "plan.yaml", job, "predicted: 1.5 s a step\n\nsecond paragraph")
    assert (tmp_path / "plan.yaml").read_text().splitlines() == [
        "# predicted: 1.5 s a step", "#", "# second paragraph",
        "model: qwen2.5-7b",
        "recipe:", "  seq_len: 2048", "  clip_norm: null", "  optimizer:", "    lr: 1.0e-05",
        "plan:", "  placement:", "    default: streamed", "    '3': resident", "    0-2: resident",
        "  chunk_bytes: 64MiB", "  adam_threads: 8",
    ]  # fmt: skip
    save_job(tmp_path / "plan.yaml", JOB)
    assert (tmp_path / "plan.yaml").read_text() == "model: llama3-8b\nrecipe: {}\nplan: {}\n"


BY_HAND = """\
\ufeff# a plan someone edited
plan:                       # sections in any order
    weight_slots: 3
    chunk_bytes: {chunk}
    placement: {{default: streamed, 3: resident, 0-2: resident}}
recipe:                     # nothing here: all defaults
    # seq_len: 4096
model: "on"
"""


@pytest.mark.parametrize("chunk", ["32MiB", "33554432", "033_554_432", '"32 mib"', "0.03125 GiB"])
def test_what_people_write_by_hand_is_read(tmp_path: Path, chunk: str) -> None:
    (tmp_path / "plan.yaml").write_text(BY_HAND.format(chunk=chunk), encoding="utf-8")
    placement: dict[str, Any] = {"default": "streamed", "3": "resident", "0-2": "resident"}
    assert load_job(tmp_path / "plan.yaml") == Job(
        model="on", recipe=Recipe(), plan=Plan(weight_slots=3, chunk_bytes=32 << 20, placement=placement)
    )


@pytest.mark.parametrize("lr", ["1e-4", "1E-4", "0.0001", "+.0001", "1.0e-04"])
def test_a_number_is_a_number_however_it_is_spelt(tmp_path: Path, lr: str) -> None:
    (tmp_path / "plan.yaml").write_text(f"model: 0-2\nrecipe: {{optimizer: {{lr: {lr}, weight_decay: 0}}}}\nplan:\n")
    job = load_job(tmp_path / "plan.yaml")
    assert job.recipe.optimizer == AdamW(lr=1e-4, weight_decay=0.0) and job.model == "0-2"


def test_a_model_beside_the_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here / "tiny", elsewhere / "other", here / "empty"):
        folder.mkdir(parents=True)
    (here / "tiny" / "config.json").write_text("{}")
    (elsewhere / "other" / "config.json").write_text("{}")
    monkeypatch.chdir(elsewhere)

    def read(model: str) -> str:
        (here / "plan.yaml").write_text(f"model: {model}\nrecipe:\nplan:\n")
        return load_job(here / "plan.yaml").model

    assert read("tiny") == str(here / "tiny")
    assert read("tiny/config.json") == str(here / "tiny" / "config.json")
    assert read("x" * 5000) == "x" * 5000
    assert read("other") == "other" and read("empty") == "empty" and read("llama3-8b") == "llama3-8b"
    assert read(str(elsewhere / "other")) == str(elsewhere / "other")

    # Both move together, and one that stays away keeps its place.
    save_job(here / "plan.yaml", load_job(here / "plan.yaml"))
    save_job(here / "tiny.yaml", replace(JOB, model=str(here / "tiny")))
    assert load_job(here / "plan.yaml").model == str(elsewhere / "other")
    here.rename(tmp_path / "moved")
    assert load_job("../moved/tiny.yaml").model == str(elsewhere / "../moved/tiny")


# ---- what is wrong is one line ---------------------------------------------------------------------------------------

PLAN = "model: m\nrecipe: {}\nplan: "
RECIPE = "model: m\nplan: {}\nrecipe: "
WRONG_JOBS: list[tuple[str, str]] = [
    (PLAN + "{weight_slots: 0}", "plan.weight_slots: must be an integer >= 1, got 0"),
    (PLAN + "{weight_slots: two}", "plan.weight_slots: must be an integer, got 'two'"),
    (PLAN + "{weight_slots: 2.5}", "plan.weight_slots: must be an integer, got 2.5"),
    (PLAN + "{weight_slots: true}", "plan.weight_slots: must be an integer, got true"),
    (PLAN + "{weight_slots: }", "plan.weight_slots: must be an integer, got null"),
    (PLAN + "{weight_slots: 0x12}", "plan.weight_slots: must be an integer, got '0x12'"),
    (PLAN + "{weight_slotz: 2}", "plan.weight_slotz: is no field; did you mean weight_slots?"),
    (PLAN + "{seq_len: 2}", "plan.seq_len: is no field; it belongs to recipe"),
    (PLAN + "{lr: 2}", "plan.lr: is no field; it belongs to recipe.optimizer"),
    (PLAN + "{chunk_bytes: 32G}", "plan.chunk_bytes: must be a size in bytes, such as 24GiB, .*, got '32G'"),
    (PLAN + "{chunk_bytes: -1}", r"plan.chunk_bytes: must be an integer >= 0 \(0: whole blocks\), got -1"),
    (PLAN + "{update: later}", "plan.update: must be one of after, during_backward, next_forward, got 'later'"),
    (PLAN + "{placement: streamed}", "plan.placement: must be a table, got 'streamed'"),
    (PLAN + "{placement: {3: residnt}}", r"plan.placement\['3'\]: must be one of streamed, .*, got 'residnt'"),
    (PLAN + "{placement: {3: resident, '3': streamed}}", "line 3, column 33: the key 3 stands twice"),
    (PLAN + "{placement: {x: resident}}", "plan.placement: 'x' is no block; .*"),
    (PLAN + "[2]", r"plan: must be a table of fields, got \[2\]"),
    (PLAN + "{}\nweight_slots: 2", "weight_slots: is no field; it belongs to plan"),
    (PLAN + "{}\nplann: {}", "plann: is no field; did you mean plan?"),
    (PLAN + "{}\nnotes: {}", "notes: is no field; the fields are model, recipe, plan"),
    (PLAN + "{}\nplan: {}", "line 4, column 1: the key plan stands twice"),
    (PLAN + "{weight_slots: 2, weight_slots: 3}", "line 3, column 25: the key weight_slots stands twice"),
    (PLAN + "{<<: {weight_slots: 2}}", "plan.<<: is no field; .*"),
    (PLAN + "{? [a] : 2}", "line 3, column 10: a key must be a single word"),
    (RECIPE + "{seq_len: 1}", "recipe.seq_len: must be an integer >= 2: .*, got 1"),
    (RECIPE + "{clip_norm: none}", "recipe.clip_norm: must be a number or null, got 'none'"),
    (RECIPE + "{clip_norm: .inf}", "recipe.clip_norm: must be a finite number .*, got inf"),
    (RECIPE + "{compiled: yes}", "recipe.compiled: must be true or false, got 'yes'"),
    (RECIPE + "{precision: fp16}", "recipe.precision: must be one of bf16, fp32, got 'fp16'"),
    (RECIPE + "{optimizer: {beta1: 2}}", r"recipe.optimizer.beta1: must be in \[0, 1\), in FP32 too, got 2.0"),
    (RECIPE + "{optimizer: {lr: 2024-01-01}}", "recipe.optimizer.lr: must be a number, got '2024-01-01'"),
    (RECIPE + "{optimizer: {schedule: cosine}}", "recipe.optimizer.total_steps: must be given .*, got None"),
    ("model: m\nrecipe: {}\n", "plan: is missing"),
    ("recipe: {}\nplan: {}\n", "model: is missing"),
    ("model: 3\nrecipe: {}\nplan: {}", "model: must be a text, got 3"),
    ("model: ' '\nrecipe: {}\nplan: {}", "model: must be a name or a path, got ' '"),
    ("model:\nrecipe: {}\nplan: {}", "model: must be a text, got null"),
    ("", "is empty"),
    ("# only a comment\n", "is empty"),
    ("- model\n", r"must hold a table of fields, got \['model'\]"),
    ("just words", "must hold a table of fields, got 'just words'"),
    ("model: [m", "cannot be read as YAML: line 1, column 10: .*"),
    ("a: 1\n---\nb: 2", "cannot be read as YAML: line 2, column 1: .*single document.*"),
    ("model: !!python/object/apply:os.getcwd []", "cannot be read as YAML: line 1, column 8: .*python/object.*"),
    ("model: !!timestamp soon", "cannot be read as YAML: .*"),
    ("model: \x00", "cannot be read as YAML: .*"),
    ("[" * 2000, "cannot be read as YAML: .*"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG_JOBS, ids=[m for _, m in WRONG_JOBS])
def test_a_wrong_job_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"^plan\.yaml: (cannot be read as YAML: )?{message.replace('?', '.')}$") as refusal:
        load_job("plan.yaml")
    assert len(str(refusal.value).splitlines()) == 1 and len(str(refusal.value)) < 400


def _without(*path: str) -> dict[str, Any]:
    return _with(path, None)


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The fields of a written H200 with one of them replaced, or left out for None."""
    fields: dict[str, Any] = json.loads(json.dumps(plain(H200)))
    *outer, last = path
    table = fields
    for key in outer:
        table = table[key]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return fields


WRONG_PROFILES: list[tuple[dict[str, Any], str]] = [
    (_without("adam_rates"), "adam_rates: is missing"),
    (_without("h2d", "rates"), "h2d.rates: is missing"),
    (_without("compute", "launch_ns"), "compute.launch_ns: is missing"),
    (_without("compute", "flops_per_s", "fp32"), r"compute.flops_per_s\['fp32'\]: must be > 0, got 0"),
    (_with(("compute", "flops_per_s", "bf16"), 1e3), r"compute.flops_per_s\['bf16'\]: must be an integer, got 1000.0"),
    (_with(("dram_bytes_per_sec",), 1), r"dram_bytes_per_sec: is no field; did you mean dram_bytes_per_s\?"),
    (_with(("cores",), "16"), "cores: must be an integer, got '16'"),
    (_with(("cores",), 4), "adam_rates: must be of at most 4 threads, one a core, got .*"),
    (_with(("d2h", "latency_ns"), -1), "d2h.latency_ns: must be >= 0, got -1"),
    (_with(("d2h", "rates"), [[1, 2], [3]]), r"d2h.rates\[1\]: must be a list of length 2, got \[3\]"),
    (_with(("d2h", "rates"), [[2, 2], [1, 3]]), "d2h.rates: must be sorted .*"),
    (_with(("adam_rates",), [[1, "fast"]]), r"adam_rates\[0\]\[1\]: must be an integer, got 'fast'"),
    (_with(("adam_rates",), {}), r"adam_rates: must be a list, got \{\}"),
    (_with(("sharing",), [{"h2d_bytes_per_s": 1}]), r"sharing\[0\]: must be rates >= 0, two or more .*"),
    (_with(("sharing",), [{"h2d": 1}]), r"sharing\[0\].h2d: is no field; .*"),
    (_with(("sharing",), [1]), r"sharing\[0\]: must be a table, got 1"),
    (_with(("compute", "measured"), [{"kind": "forward"}]), r"compute.measured\[0\].block: is missing"),
    (_with(("compute", "measured"), [["forward", "layer", 1, 1, 1, "x"]]), r"compute.measured\[0\]\[5\]: must be an integer, .*"),
    (_with(("compute", "measured"), [["a", "layer", 1, 1, 1, 1]]), r"compute.measured\[0\]\[0\]: must be one of .*, got 'a'"),
    (_with(("name",), ""), "name: must be a text, got ''"),
    (_with(("device_memory_bytes",), "24 gigs"), "device_memory_bytes: must be a size in bytes, .*, got '24 gigs'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), WRONG_PROFILES, ids=[m for _, m in WRONG_PROFILES])
def test_a_wrong_profile_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hw.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"^hw\.json: {message}$"):
        load_hardware("hw.json")


def test_a_profile_takes_sizes_and_rows_as_people_write_them(tmp_path: Path) -> None:
    row = MeasuredOp("forward", "layer", 10, 8, 8, 5)
    fields = _with(("device_memory_bytes",), "24GiB")
    for written in ([list(row)], [row._asdict()], [list(row)[:6]]):
        fields["compute"]["measured"] = written
        (tmp_path / "hw.json").write_text(json.dumps(fields))
        read = load_hardware(tmp_path / "hw.json")
        assert read.device_memory_bytes == 24 << 30 and read.compute.measured == (row,)


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Any]:
    """A record's fields as they stand in its file."""
    trace = Trace(source="sim", parts=("body",), digests=("d",), events=(Event(0, 0, 1, 2, 3),))
    save_record(
        tmp_path / "run.json",
        Record(
            job=JOB, model_name="m", config_json='{"model_type":"llama"}', hardware="h", provenance="p", trace=trace,
            created="2026-01-31T12:00:00+00:00", steps=(StepFigures(math.nan, math.inf, 0.5),),
        ),
    )  # fmt: skip
    fields: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    return fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"record": 2}, "record: must be 1, the version of a record of a run, got 2"),
        ({"record": None}, "record: must be 1, .*, got null"),
        ({"created": "yesterday"}, "created: must be an ISO 8601 time, got 'yesterday'"),
        ({"config_json": "{"}, "config_json: is not JSON: .*"),
        ({"config_json": "[]"}, r"config_json: must hold a JSON object, got \[\]"),
        ({"config_json": '{"model_type":"gpt2"}'}, "config_json: config.model_type: must be one of .*"),
        ({"trace": {}}, "trace.source: is missing"),
        ({"trace": {"source": "gpu", "parts": [], "digests": [], "events": []}}, "trace.source: must be one of .*, got 'gpu'"),
        ({"trace": {"source": "sim", "parts": ["a"], "digests": [], "events": []}}, "trace: 1 parts but 0 digests"),
        (
            {"trace": {"source": "sim", "parts": [], "digests": [], "events": [[0, 0, 0, 1]]}},
            r"trace.events\[0\]: must be a list of length 5, got \[0, 0, 0, 1\]",
        ),
        ({"job": {"model": "m", "recipe": {"seqlen": 3}, "plan": {}}}, "job.recipe.seqlen: is no field; did you mean seq_len."),
        ({"steps": [["much", 1, 1]]}, r"steps\[0\]\[0\]: must be a number, got 'much'"),
        ({"steps": 3}, "steps: must be a list, got 3"),
    ],
)  # fmt: skip
def test_a_wrong_record_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps(written | change))
    with pytest.raises(ValueError, match=rf"^run\.json: {message}$"):
        load_record("run.json")


LOADERS: list[Callable[[Path], object]] = [load_job, load_hardware, load_record]


@pytest.mark.parametrize("load", LOADERS, ids=["job", "hardware", "record"])
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path: Path, load: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    with pytest.raises(ValueError, match=rf"^{path}: no such file$"):
        load(path)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: is a directory, not a file$"):
        load(tmp_path)
    for data, message in ((b"a: \xff", "is not UTF-8 text .byte 3."), (b" \n", "is empty"), (b"[1]", "must hold a table .*")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"^{path}: {message}"):
            load(path)


plain_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["model", "recipe", "plan", "name", "record"]), inner),
)


@QUICK
@given(st.one_of(st.text(), st.binary(), plain_values))
def test_whatever_a_file_holds_it_is_a_noun_or_one_line(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_bytes(content.encode(errors="surrogatepass"))
    else:
        path.write_text(json.dumps(content))
    for load in LOADERS:
        with pytest.raises(ValueError) as refusal:
            load(path)
        assert str(refusal.value).startswith(f"{path}: ") and len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["job", "hardware", "record", "record.gz"])
def test_a_file_cut_short_is_never_read_as_something_else(tmp_path: Path, written: dict[str, Any], kind: str) -> None:
    path = tmp_path / ("cut.gz" if kind == "record.gz" else "cut")
    load: Callable[[Path], Any] = {"job": load_job, "hardware": load_hardware}.get(kind, load_record)
    if kind == "job":
        save_job(path, replace(JOB, recipe=Recipe(seq_len=64), plan=Plan(placement={"default": "resident"})))
    elif kind == "hardware":
        save_hardware(path, H200)
    else:
        save_record(path, load_record(tmp_path / "run.json"))
    whole = path.read_bytes()
    expected = load(path)
    for length in range(0, len(whole), 1 if len(whole) < 200 else 37):
        path.write_bytes(whole[:length])
        try:
            found = load(path)
        except ValueError as refusal:
            assert str(refusal).startswith(f"{path}: ")
        else:  # white space at the end is all that may be missing, and of a job's last section what the file cannot show
            assert found == expected or (kind == "job" and found.recipe == expected.recipe)


def test_a_key_that_stands_twice_is_refused_in_json_too(tmp_path: Path, written: dict[str, Any]) -> None:
    (tmp_path / "hw.json").write_text(dump_json(plain(H200)).replace('"cores": 16', '"cores": 16, "cores": 4'))
    with pytest.raises(ValueError, match=r"hw\.json: the key cores stands twice$"):
        load_hardware(tmp_path / "hw.json")
    (tmp_path / "twice.json").write_text(json.dumps(written).replace('"source"', '"source": "cpu", "source"'))
    with pytest.raises(ValueError, match=r"twice\.json: the key source stands twice$"):
        load_record(tmp_path / "twice.json")


def test_no_more_of_a_file_is_read_than_its_kind_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in ("LARGEST_JOB", "LARGEST_HARDWARE"):
        monkeypatch.setattr(files, most, 100)
    monkeypatch.setattr(read_text, "__defaults__", (100,))
    for name, load in (("plan.yaml", load_job), ("hw.json", load_hardware), ("run.json.gz", load_record)):
        for length, said in ((100, "must hold a table|is not JSON|is missing"), (101, "must hold at most 100 bytes of text$")):
            data = b"1" * length
            (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
            with pytest.raises(ValueError, match=rf"{re.escape(name)}: ({said})"):
                load(tmp_path / name)


def test_damaged_gzip_is_refused(tmp_path: Path, written: dict[str, Any]) -> None:
    whole = gzip.compress(json.dumps(written).encode())
    for data in (b"plain", whole[:-9] + b"\0\0\0\0" + whole[-5:], whole[:30] + b"\xff" * 30 + whole[60:]):
        (tmp_path / "run.json.gz").write_bytes(data)
        with pytest.raises(ValueError, match=r"run\.json\.gz: is not (whole gzip data|UTF-8 text|JSON)"):
            load_record(tmp_path / "run.json.gz")


def _integers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the integers of plain values stand."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, entry in inner for found in _integers(entry, (*path, key))]


FULL = json.loads(json.dumps(plain(replace(
    H200,
    h2d=Link(latency_ns=1, rates=((1, 1), (2, 2))), d2h=Link(latency_ns=1, rates=((1, 1),)), adam_rates=((1, 1), (2, 2)),
    sharing=(SharingRow(adam_threads=1, h2d_bytes_per_s=1, d2h_bytes_per_s=1, adam_bytes_per_s=1),),
    compute=replace(H200.compute, measured=(MeasuredOp("forward", "layer", 1, 1, 1, 1),)),
))))  # fmt: skip
"""A written profile that has a number in every field."""


@pytest.mark.parametrize("value", [2**62 * 10**3, 10**30, 10**400], ids=["4.6e21", "1e30", "1e400"])
@pytest.mark.parametrize("path", _integers(FULL), ids=lambda path: ".".join(map(str, path)))
def test_every_number_of_a_profile_has_a_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple[Any, ...], value: int
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = copy.deepcopy(FULL)
    *outer, last = path
    table = fields
    for key in outer:
        table = table[key]
    table[last] = value
    Path("hw.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError) as refused:
        load_hardware("hw.json")
    message = str(refused.value)
    assert message.startswith(f"hw.json: {path[0]}") and ": must be at most " in message and ", got " in message
    named = [name for name in (*path, MeasuredOp._fields[path[-1]] if "measured" in path else path[-1]) if isinstance(name, str)]
    assert named[-1] in message and "\n" not in message and len(message) < 200


# ---- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["OSError", "KeyboardInterrupt"])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    save_job(tmp_path / "plan.yaml", JOB)
    before = (tmp_path / "plan.yaml").read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    for path in (tmp_path / "plan.yaml", tmp_path / "new.yaml"):
        with pytest.raises(type(error)):
            save_job(path, replace(JOB, model="another"))
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]
    assert (tmp_path / "plan.yaml").read_bytes() == before


def test_a_write_is_on_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real: Callable[..., Any] = getattr(os, name)

        def noted(*args: Any, name: str = name, real: Callable[..., Any] = real) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, noted)
    write_file(tmp_path / "f", b"x")
    assert calls[:2] == ["fsync", "replace"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path}: is a directory, not a file$"):
        write_file(tmp_path, b"")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/no/f: there is no directory {tmp_path}/no$"):
        write_file(tmp_path / "no" / "f", b"")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    os.mkfifo("pipe")
    Path("to-pipe").symlink_to("pipe")
    Path("to-itself").symlink_to("to-itself")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        before = {path.name: path.lstat().st_ino for path in Path().iterdir()}
        for name in ("pipe", "to-pipe", "to-itself", "socket"):
            with pytest.raises(ValueError, match=rf"^{name}: must be a regular file or new, not a device, .*$"):
                write_file(name, b"x")
        assert {path.name: path.lstat().st_ino for path in Path().iterdir()} == before
    assert Path("pipe").is_fifo() and Path("socket").is_socket()


def test_a_link_is_written_through_and_permissions_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_file(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"x"
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 << 30), ("24 GB", 24 * 10**9), ("1.5TB", 1_500_000_000_000), ("1.5tib", 3 << 39), ("0.5KiB", 512),
        ("4096", 4096), (" 12 B ", 12), (0, 0), (7, 7), ("1.0001KiB", 1024),
    ],
)  # fmt: skip
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "24G", "24 g", "-1GiB", "1e9", "1,5TB", "1.GiB", "2 4GB", "٣GB", "1" * 99, -1, 1.5, True, None]
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be a size in bytes, such as 24GiB, 24 GB, 1\.5TB or 4096, got "):
        parse_bytes(text)


@given(st.integers(0, 2**62))
def test_a_formatted_size_is_within_half_a_hundredth_of_its_unit(nbytes: int) -> None:
    text = format_bytes(nbytes)
    unit = parse_bytes("1" + text.lstrip("0123456789."))
    assert abs(parse_bytes(text) - nbytes) <= unit / 200 + 1
    assert unit == 1 or nbytes >= unit
    assert format_bytes(-nbytes) == ("-" + text if nbytes else "0B")


@given(st.integers(0, 1023), st.integers(0, 5))
def test_a_whole_number_of_units_reads_back_exactly(count: int, power: int) -> None:
    nbytes = count * 1024**power
    assert parse_bytes(format_bytes(nbytes)) == nbytes


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_the_written_yaml_is_yaml_to_others_too(tmp_path: Path) -> None:
    job = replace(JOB, plan=Plan(placement={"default": "resident", "3": "streamed"}))
    save_job(tmp_path / "plan.yaml", job)
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["plan"]["placement"] == {"default": "resident", "3": "streamed"}


@pytest.mark.parametrize("module", ["megatrain.files", "megatrain.catalog"])
def test_files_and_catalog_load_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
