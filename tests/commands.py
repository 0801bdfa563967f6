"""The command line in tests: called in this process, and a small world of files for it to read."""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatrain.cli import main, show
from megatrain.files import Job, save_hardware, save_job
from megatrain.hardware import H200
from megatrain.plan import Plan
from megatrain.recipe import AdamW, Recipe
from megatrain.toy import make_toy_model

ONE_CORE = replace(H200, name="one-core", cores=1, adam_rates=((1, 16 * 10**9),), sharing=())
RECIPE = Recipe(micro_batch_size=2, seq_len=32, loss_tile=16, optimizer=AdamW(lr=1e-2))
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60


def without_progress(stderr: str) -> str:
    """What a command said beside the lines that tell of long waits, which are there or not by how busy the machine is."""
    return re.sub(r"^[\w ]+: (\d+%, )?\d+ s(: .*)?\n", "", stderr, flags=re.MULTILINE)


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Commands:
    """`megatrain(...)` as a shell would call it, but in this process; a bug's exception goes through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr(show, "SAID_EVERY_S", math.inf)  # how long anything takes is no matter of what it says

    def __call__(self, *arguments: object) -> Ended:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["megatrain", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else int(code is not None), out, err)

    def refused(self, *arguments: object) -> str:
        """The message of a call that must fail with code 2 and one line, and leave every file as it was and none new."""
        before = files(Path())
        ended = self(*arguments)
        assert ended.code == 2, ended
        assert ended.out == ""
        assert ended.err.startswith("error: ") and ended.err.count("\n") == 1 and ended.err.endswith("\n"), ended.err
        assert files(Path()) == before
        return ended.err.removeprefix("error: ").rstrip()


def files(folder: Path) -> dict[str, str]:
    """Every file and folder below, hidden ones too, with a hash of what it holds, or of what kind it is."""

    def found() -> Iterator[tuple[str, str]]:
        for path in sorted(folder.rglob("*")):
            kind = stat.filemode(path.lstat().st_mode)[0]
            yield str(path), hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else kind

    return dict(found())


def make_world(folder: Path) -> None:
    """model/ (three layers), text/, hw.json (a machine of one core) and plan.yaml (the model's, for that machine)."""
    make_toy_model(folder / "model", layers=3, hidden_size=64, intermediate_size=96, heads=2, kv_heads=2)
    (folder / "text").mkdir()
    (folder / "text" / "fox.txt").write_text(TEXT)
    save_hardware(folder / "hw.json", ONE_CORE)
    save_job(folder / "plan.yaml", Job(model=str(folder / "model"), recipe=RECIPE, plan=Plan(chunk_bytes=4096)))


def edit(path: str, old: str, new: str) -> None:
    """Replace a text that is there."""
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def edit_json(path: str, **fields: Any) -> None:
    """Set fields of a JSON file; `...` removes one."""
    found = json.loads(Path(path).read_text())
    found |= fields
    Path(path).write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def job(**plan: Any) -> Job:
    """The world's job, with another plan."""
    return Job(model="model", recipe=RECIPE, plan=Plan(**plan))

