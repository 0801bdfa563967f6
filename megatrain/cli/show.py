"""What the verbs print: tables for people."""

from __future__ import annotations

import json
import math
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from megatrain.files import format_bytes

if TYPE_CHECKING:
    from megatrain.derive import Facts
    from megatrain.hardware import HardwareProfile
    from megatrain.schedule import Schedule
    from sim.ledger import Ledger
    from sim.sweep import Steady

# Nothing here is mark-up: paths, names of models and of ops may hold brackets.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)

SAID_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""
_SHORTEST_WAIT_S = 0.01
_READABLE = 12
"""Cells. A column is not broken into narrower ones: the table runs over the width instead."""
_GAP = 2
_begun = False


def begin() -> None:
    """A verb's output begins: blank lines stand between its parts, and none before the first."""
    global _begun
    _begun = False


def seconds(ns: float) -> str:
    """Nanoseconds in the unit that reads best."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}" if abs(ns) < 1000 * size else f"{ns / size:,.0f} {unit}"
    return f"{ns:.0f} ns"


def json_object(fields: Mapping[str, Any]) -> None:
    """One line of JSON; JSON has no number that is not finite."""
    kept = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    print(json.dumps(kept))


def pairs(title: str, rows: Mapping[str, str]) -> None:
    """A table of names and values; a long value goes on below itself."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    _titled(title, table, broken=_widest(rows.values()), fixed=_widest(rows) + _GAP, least=_READABLE)


def rows(title: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """A table whose first column is text, broken between words where it is too long, and whose others are figures."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="left" if i == 0 else "right", no_wrap=i > 0, overflow="fold")
    for line in body:
        table.add_row(*map(Text, line))
    first, *others = zip(header, *body, strict=True)
    words = _widest(word for cell in first for word in cell.split())
    fixed = sum(_GAP + _widest(column) for column in others)
    _titled(title, table, broken=_widest(first), fixed=fixed, least=max(words, _READABLE))


def text(block: str) -> None:
    """Text that is laid out already. In a terminal, prose (a line without columns) is broken between words where it is too
    long; in a file every line stays whole."""
    global _begun
    _begun = True
    for line in block.rstrip("\n").split("\n"):
        prose = out.is_terminal and "  " not in line.strip()
        indent = line[: len(line) - len(line.lstrip())] + "  "
        broken = textwrap.wrap(
            line, out.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
        for piece in (broken if prose else None) or [line]:
            out.print(piece, soft_wrap=True)


def _gap() -> None:
    global _begun
    if _begun:
        out.print()
    _begun = True


def _widest(cells: Iterable[str]) -> int:
    return max(map(cell_len, cells), default=0)


def _titled(title: str, table: Table, *, broken: int, fixed: int, least: int) -> None:
    """`table` under its title. One column, `broken` wide by itself, may be broken, though to no less than `least`; the others and
    the gaps take what they take, `fixed`."""
    _gap()
    out.print(title, style="bold", soft_wrap=True)  # not the table's own title: it would be as narrow as the table
    table.width = fixed + min(broken, max(least, out.width - fixed))
    with out.capture() as drawn:
        out.print(table, crop=False)
    for line in drawn.get().splitlines():
        out.file.write(line.rstrip() + "\n")  # rich fills the last column up with spaces


def memory(found: Ledger, device_has: int, host_has: int) -> None:
    """The ledger by phase, and what a step's memory consists of."""
    from sim.ledger import PHASES

    short = format_bytes_short
    body = [
        [phase, short(found.device_nbytes(phase)), *(short(found.nbytes(phase, of)) for of in ("pinned", "pageable"))]
        for phase in PHASES
    ]
    there = f"device {short(device_has)}{', of the host' if found.on_host else ''}; host {short(host_has)}"
    rows(f"Memory (there are: {there})", ["phase", "device", "host, pinned", "host, pageable"], body)
    step = sorted((item for item in found.items if "step" in item.phases), key=lambda item: -item.nbytes)
    rows("Largest in a step", ["what", "space", "bytes"], [[i.what, i.space, format_bytes_short(i.nbytes)] for i in step[:10]])


def lanes(schedule: Schedule, steady: Steady, step_ns: int, facts: Facts) -> None:
    """What each lane does in a settled step, what the compute lane waits for in it, and how much of the copies is hidden."""
    written = dict.fromkeys(steady.busy, 0)
    for op in schedule.body.ops:
        written[op.lane] += op.nbytes
    body = [
        [lane, seconds(share * step_ns), f"{share:.0%}", format_bytes_short(written[lane])] for lane, share in steady.busy.items()
    ]
    rows("Lanes, a step", ["lane", "busy", "of the time", "written"], body)
    if steady.stalls:
        rows("The compute lane waits, a step", ["for", "time"], [[cause, seconds(ns)] for cause, ns in steady.stalls.items()])
    shares = [[lane, f"{overlap.fraction:.0%}"] for lane, overlap in facts.overlap.items()]
    if shares:
        rows("Copies under compute", ["lane", "share"], shares)


def notes(lines: Sequence[str]) -> None:
    if lines:
        _gap()
    for line in lines:
        text(f"note: {line}")


def note(line: str | None) -> None:
    """A line on standard error for whoever reads no table, if there is one to say."""
    if line is not None:
        err.print(f"note: {line}", soft_wrap=True)


def profile(found: HardwareProfile) -> None:
    """A calibrated machine, in its main figures."""
    rate = found.compute.flops_per_s
    threads = ", ".join(f"{n}: {r / 1e9:.0f}" for n, r in found.adam_rates)
    pairs(
        found.name,
        {
            "copies": f"{found.h2d.peak_bytes_per_s / 1e9:.1f} GB/s up, {found.d2h.peak_bytes_per_s / 1e9:.1f} GB/s down",
            "CPU optimizer": f"GB/s by threads {threads}",
            "DRAM": f"{found.dram_bytes_per_s / 1e9:.0f} GB/s",
            "products": f"{rate['bf16'] / 1e12:.3g} TFLOP/s in bf16, {rate['fp32'] / 1e12:.3g} in fp32",
            "device memory": format_bytes_short(found.device_memory_bytes),
            "host memory": format_bytes_short(found.host_memory_bytes),
            "cores": str(found.cores),
            "blocks timed": str(len(found.compute.measured)),
        },
    )
    notes([found.provenance])


@contextmanager
def progress(title: str) -> Iterator[Callable[[float | None, str], None]]:
    """A bar on standard error, gone when it is done; a call gives the share that is done (None: unknown) and what is being done.
    Where standard error is no terminal, or one that cannot take a line back, nothing is drawn; there, what takes long says so in
    a line every `SAID_EVERY_S` seconds, called or not, for as long as the context lasts."""
    if not err.is_terminal or err.is_dumb_terminal:
        lines = _Lines(title)
        with lines:
            yield lines.say
        return
    # A column that may be broken is what gives way in a narrow terminal: what is being done, which cuts itself.
    columns = (BarColumn(bar_width=16, table_column=Column(no_wrap=True)), _Clock(table_column=Column(no_wrap=True)), _What())
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task(title, total=None)

        def draw(done: float | None, text: str) -> None:
            bars.tasks[0].total = None if done is None else 1.0  # None is for update() the total as it was
            bars.update(task, completed=done or 0.0, description=f"{title}: {text}")

        yield draw


class _Clock(ProgressColumn):
    """Time since the bar was made. rich's own stops at the first 100%, after which another phase may begin here."""

    def render(self, task: Task) -> Text:
        return Text(str(timedelta(seconds=int(task.elapsed or 0))), style="progress.elapsed")


class _What(ProgressColumn):
    """A task's description in one line."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _Lines:
    """Progress in lines. One is due every `SAID_EVERY_S`: whoever calls `say` prints it, or a thread does where nobody calls for
    longer than that (a step of minutes)."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._done: float | None = None
        self._text = ""
        self._begin = self._said = monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._wait, name=f"megatrain progress: {title}", daemon=True)

    def __enter__(self) -> None:
        if SAID_EVERY_S <= threading.TIMEOUT_MAX:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()  # so that no line follows what the caller prints next

    def say(self, done: float | None, text: str) -> None:
        with self._lock:
            self._done, self._text = done, text
            self._print_if_due()

    def _wait(self) -> None:
        while not self._ended.wait(max(self._said + SAID_EVERY_S - monotonic(), _SHORTEST_WAIT_S)):
            with self._lock:
                self._print_if_due()

    def _print_if_due(self) -> None:
        now = monotonic()
        if now - self._said >= SAID_EVERY_S and not self._ended.is_set():
            self._said = now
            share = "" if self._done is None else f"{self._done:.0%}, "
            what = f": {self._text}" if self._text else ""
            err.print(f"{self._title}: {share}{now - self._begin:.0f} s{what}", soft_wrap=True)


def format_bytes_short(nbytes: int) -> str:
    """Two or three digits and a binary unit; `format_bytes` is exact, for files."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:.0f} {unit}"
    return format_bytes(nbytes)
