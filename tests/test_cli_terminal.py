"""The command line and what it is connected to: terminals that are narrow or cannot move their cursor, Ctrl-C, pipes whose
reader has gone, full disks and closed streams."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatrain.cli import demo, show
from tests.commands import Commands, without_progress

SIMULATE = ("simulate", "plan.yaml", "--hardware", "hw.json")


class Screen:
    """A terminal of `width`, and a clock that stands until it is set."""

    def __init__(self, width: int) -> None:
        self.now, self._file = 0.0, io.StringIO()
        self.console = Console(
            file=self._file, force_terminal=True, color_system=None, width=width, highlight=False, markup=False, emoji=False,
            get_time=lambda: self.now,
        )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """All that was drawn, in turn, without what moves the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._file.getvalue()).replace("\r", "\n").splitlines()


@pytest.fixture(autouse=True)
def term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


# ---- progress ----------------------------------------------------------------------------------------------------------


def _last_drawn(screen: Screen, monkeypatch: pytest.MonkeyPatch, *calls: tuple[float, float | None, str]) -> str:
    """The bar at the end of its context, after calls at these times."""
    monkeypatch.setattr(show, "err", screen.console)
    with show.progress("train") as bar:
        for time, done, text in calls:
            screen.now = time
            bar(done, text)
    return [line for line in screen.lines if "train" in line][-1]


@pytest.mark.parametrize("width", [40, 100])
def test_the_clock_of_a_bar_goes_on_when_a_phase_is_complete_and_the_next_begins(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    calls = ((0, 0.0, "load"), (5, 1.0, "load"), (65, 1.0, "load"), (70, 0.0, "step"), (75, None, "?"), (3800, 0.5, "step"))
    drawn = [_last_drawn(Screen(width), monkeypatch, *calls[:n]) for n in range(1, len(calls) + 1)]
    clocks = ["0:00:00", "0:00:05", "0:01:05", "0:01:10", "0:01:15", "1:03:20"]
    assert [re.findall(r"\d:\d\d:\d\d", line) for line in drawn] == [[clock] for clock in clocks]


def test_a_narrow_bar_cuts_what_is_being_done_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _last_drawn(Screen(40), monkeypatch, (0, 1.0, "step 3 of 10, loss 2.1234, 1,234 tokens/s"))
    assert re.fullmatch("━{16} 0:00:00 train: step 3 ?…", drawn)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen(80)
    monkeypatch.setattr(show, "err", screen.console)
    monkeypatch.setattr(show, "SAID_EVERY_S", math.inf)
    with show.progress("load PyTorch") as bar:
        bar(None, "short")
    assert screen.lines == []
    monkeypatch.setattr(show, "SAID_EVERY_S", 0.0)
    with show.progress("plan") as bar:
        bar(0.5, "long")
    assert "plan: 50%, 0 s: long" in screen.lines


# ---- tables ------------------------------------------------------------------------------------------------------------


def test_a_first_column_is_broken_between_words_and_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    body = [["+16 GiB of GPU memory", "-0.213 s", "re-planned"], ["model.layers.1.mlp", "no change", "re-simulated"]]
    for width, first in (
        (60, ["more", "+16 GiB of GPU memory", "model.layers.1.mlp"]),
        (43, ["more", "+16 GiB of GPU", "memory", "model.layers.1.mlp"]),
        (20, ["more", "+16 GiB of GPU", "memory", "model.layers.1.mlp"]),
    ):
        screen = Screen(width)
        monkeypatch.setattr(show, "out", screen.console)
        show.rows("What more would bring", ["more", "a step", "how found"], body)
        lines = screen.lines[-len(first) :]
        assert [line.split("  ")[0] for line in lines] == first
        assert [line.split("  ")[-1].strip() for line in lines if "  " in line] == ["how found", "re-planned", "re-simulated"]
    screen = Screen(30)
    monkeypatch.setattr(show, "out", screen.console)
    show.rows("Short words", ["", "predicted", "measured"], [["of the host, pinned", "1 GiB", "2 GiB"]])
    assert [line[:12].rstrip() for line in screen.lines[-2:]] == ["of the host,", "pinned"]


def test_values_in_a_narrow_terminal_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, values in ((60, ["0.95 (measured / predicted)"]), (20, ["0.95", "(measured /", "predicted)"])):
        screen = Screen(width)
        monkeypatch.setattr(show, "out", screen.console)
        show.pairs("In short", {"ratio of step times": "0.95 (measured / predicted)"})
        assert [line[21:] for line in screen.lines[-len(values) :]] == values


@pytest.mark.usefixtures("world")
def test_output_begins_with_a_title_and_its_parts_are_apart(megatrain: Commands) -> None:
    for _ in range(2):
        lines = megatrain(*SIMULATE).out.splitlines()
        assert lines[0].startswith("model on one-core")
        for title in ("Lanes, a step", "Largest in a step"):
            assert lines[lines.index(title) - 1] == ""
        assert "\n\n\n" not in "\n".join(lines)


# ---- Ctrl-C ------------------------------------------------------------------------------------------------------------

_CTRL_C = """
import os, runpy, signal, sys, time, weakref

class Anything:
    pass

class CtrlC:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            sys.argv[1:] = ["--help"]
            if not lost:
                os.kill(os.getpid(), signal.SIGINT)
            thing = Anything()
            kept = weakref.ref(thing, lambda _: [os.kill(os.getpid(), signal.SIGINT), None])  # raises nothing, by Python's rules
            del thing
            for _ in range(6000):
                time.sleep(0.01)

lost = sys.argv.pop() == "lost"
sys.meta_path.insert(0, CtrlC())
"""
_ENTRIES = {
    "module": "runpy.run_module('megatrain', run_name='__main__', alter_sys=True)",
    "script": "from megatrain.cli import main; sys.exit(main())",
}


@pytest.mark.parametrize("how", ["raised", "lost"])
@pytest.mark.parametrize("library", ["megatrain.cli.app", "typer", "rich.console", "yaml"])
@pytest.mark.parametrize("entry", _ENTRIES)
def test_ctrl_c_while_libraries_are_imported_is_one_line(entry: str, library: str, how: str) -> None:
    command = [sys.executable, "-c", _CTRL_C + _ENTRIES[entry], library, how]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("problem", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("no"), 1)])
def test_a_demo_that_does_not_finish_leaves_what_was_there(
    megatrain: Commands, monkeypatch: pytest.MonkeyPatch, problem: BaseException, code: int
) -> None:
    monkeypatch.setattr(demo, "TEXT_BYTES", 60_000)
    monkeypatch.setattr(demo, "SIZES", {"layers": 3, "hidden_size": 64, "intermediate_size": 96, "heads": 2, "kv_heads": 2})
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    Path("there").mkdir()
    Path("there/mine").touch()
    before = sorted(Path().rglob("*"))
    made = []

    def calibrate(**options: Any) -> Any:
        made.append(len(sorted(Path().rglob("*"))))
        raise problem

    monkeypatch.setattr(demo, "calibrate", calibrate)
    folders = ["new", "new/deep/er", "there/new", "empty", "link"]
    for folder in folders:
        assert megatrain("demo", "--device", "cpu", "--out", folder).code == code
        assert sorted(Path().rglob("*")) == before
    assert len(made) == len(folders) and min(made) > len(before)


# ---- streams -----------------------------------------------------------------------------------------------------------

_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")


def _shell(arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$0" -m megatrain {arguments}', sys.executable]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@_full
@pytest.mark.usefixtures("world")
def test_standard_output_that_is_full_is_named() -> None:
    for arguments in (" ".join(SIMULATE), " ".join((*SIMULATE, "--json")), "--help", "--version"):
        ended = _shell(f"{arguments} >/dev/full")
        assert ended.returncode == 1, arguments
        assert without_progress(ended.stderr) == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("stderr", ["2>&-", pytest.param("2>/dev/full", marks=_full)])
def test_bad_input_is_code_2_where_nobody_can_be_told(stderr: str) -> None:
    for arguments in ("simulate nowhere.yaml", "--nope"):
        ended = _shell(f"{arguments} {stderr}")
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_that_has_had_enough_is_no_failure(more: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "megatrain", *SIMULATE, "--out", "predicted.json", *more]
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, without_progress(ended.stderr)) == (0, "")
    assert Path("predicted.json").is_file()


def test_help_says_the_exit_codes(megatrain: Commands) -> None:
    said = " ".join(megatrain("--help").out.split())
    for code in ("0 done", "1 failed", "2 bad input or infeasible", "130 interrupted"):
        assert code in said
