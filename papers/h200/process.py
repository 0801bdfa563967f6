"""A run in a process of its own: `in_its_own_process` starts it and watches it, `answer` is what it does there.

The two speak by lines. The run waits for one on its standard input (until the watcher has seen what is there without it), writes
`measured` when nothing more of it is to be seen, and ends with one line of JSON. A run that fails writes one line of JSON alone:
`error`, what happened, and `out_of_memory`, `"gpu"` or `"host"` where that memory ran out, else null.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TextIO

import torch

from papers.h200.models import Device


class Watcher:
    """A process beside this one that sees what the GPU has left, whoever took it, every few milliseconds."""

    CODE = (
        "import select, sys, torch\n"
        "print(torch.cuda.mem_get_info()[0], flush=True)\n"
        "least, host, statm = 1 << 60, 0, f'/proc/{sys.argv[1]}/statm'\n"
        "while True:\n"
        "    least = min(least, torch.cuda.mem_get_info()[0])\n"
        "    host = max(host, int(open(statm).read().split()[1]) * 4096)\n"
        "    if select.select([sys.stdin], [], [], 0.002)[0]:\n"
        "        if not sys.stdin.readline(): break\n"
        "        print(least, host, flush=True)\n"
        "        least, host = 1 << 60, 0\n"
    )

    def __init__(self, device: Device, pid: int) -> None:
        self._process: subprocess.Popen[str] | None = None
        if device == "cuda":
            self._process = subprocess.Popen(
                [sys.executable, "-c", self.CODE, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._process.stdout is not None
            self._free = int(self._process.stdout.readline())

    def peaks(self) -> tuple[int, int]:
        """(GPU, host) bytes in use at most since this was last asked."""
        if self._process is None:
            return 0, 0
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        least, host = map(int, self._process.stdout.readline().split())
        return self._free - least, host

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()


def in_its_own_process(
    command: Sequence[str], environment: Mapping[str, str], *, title: str, log: Path, device: Device, timeout_s: float
) -> dict[str, Any]:
    """What the command answers, with its peaks in GiB as the watcher saw them; or `error` and `out_of_memory` if it failed or
    outlasted its time: then it is stopped, with all that it started. What it prints is appended to `log` under the title."""
    with log.open("a") as opened:
        print(f"==== {title}", file=opened, flush=True)
        begins = opened.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=opened, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        try:
            with Watcher(device, child.pid) as watcher:
                with contextlib.suppress(BrokenPipeError):  # of one that has ended already; why is in the log
                    child.stdin.write("go\n")
                    child.stdin.close()
                first = child.stdout.readline().strip()
                gpu, host = watcher.peaks() if first == "measured" else (0, 0)
            lines = child.stdout.read().splitlines()
            code = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                stop()
                child.wait()
    if late.is_set():
        return _failed(f"took longer than {timeout_s:g} s")
    if code == -signal.SIGKILL:  # and not by us
        return _failed("was killed, as the kernel does when the host's memory ends", "host")
    if code == 0 and first == "measured" and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found | {"gpu_peak_gib": round(gpu / 2**30, 3), "host_peak_gib": round(host / 2**30, 3)}
    told = [json.loads(line) for line in (first, *lines) if line.startswith("{")]
    if told:
        return _failed(f"ended with {code}: {told[-1]['error']}", told[-1]["out_of_memory"])
    said = [text for text in log.read_bytes()[begins:].decode(errors="replace").split("\n") if text.strip()]
    return _failed(f"ended with {code}: {said[-1].strip() if said else 'nothing said'}")


def _failed(error: str, out_of_memory: str | None = None) -> dict[str, Any]:
    return {"error": error[:2000], "out_of_memory": out_of_memory}


def answer(work: Callable[[TextIO], dict[str, Any]]) -> NoReturn:
    """Do the work as a run, and end the process. The work gets the stream on which it says `measured`; nothing else writes there:
    standard output, on which libraries write too, goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdin.readline()
    try:
        print(json.dumps(work(answers)), file=answers, flush=True)
    except Exception as problem:
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        print(json.dumps({"error": error, "out_of_memory": ran_out(problem)}), file=answers, flush=True)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # at once: what libraries do when the interpreter ends is no part of the run, and may fail


def ran_out(problem: BaseException | None) -> Literal["gpu", "host"] | None:
    """Whose memory has run out by an exception or by one that it was raised for. PyTorch has a type for its GPU allocator alone;
    other allocations fail with the name of what failed in a text, which is read here, where it was raised."""
    while problem is not None:
        text = str(problem)
        if isinstance(problem, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in text:
            return "gpu"
        if isinstance(problem, MemoryError) or "DefaultCPUAllocator" in text:
            return "host"
        if isinstance(problem, torch.AcceleratorError) and "out of memory" in text:
            # The driver says the same of the GPU's memory and of pinned memory.
            return "host" if torch.cuda.mem_get_info()[0] > 1 << 30 else "gpu"
        problem = problem.__cause__ or problem.__context__
    return None
