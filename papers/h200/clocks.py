"""What a GPU's clock and power were while something ran: `nvidia-smi` says so ten times a second."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import threading
import time
from types import TracebackType

from papers.h200.models import Device

QUERY = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=100"]


class Clocks:
    """Samples from entry to exit; none on the cpu backend or without `nvidia-smi`."""

    def __init__(self, device: Device) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        command = shutil.which("nvidia-smi")
        if device == "cuda" and command:
            self._process = subprocess.Popen(
                [command, *QUERY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, args=[self._process], daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                mhz, watts = map(float, line.split(","))
            except ValueError:  # "[N/A]", or a message
                continue
            self._samples.append((time.perf_counter(), mhz, watts))

    def since(self, started: float) -> dict[str, float]:
        """Medians of the samples since a time of `time.perf_counter`: of the SM clock in MHz, of the power in W, and how many
        there are; empty without any."""
        found = [(mhz, watts) for at, mhz, watts in list(self._samples) if at >= started]
        if not found:
            return {}
        mhz, watts = (statistics.median(values) for values in zip(*found, strict=True))
        return {"sm_mhz": mhz, "power_w": watts, "samples": len(found)}

    def each_second(self, origin: float) -> list[list[float]]:
        """[second since `origin`, MHz, W], medians of the samples in it; seconds without any are left out."""
        seconds: dict[int, list[tuple[float, float]]] = {}
        for at, mhz, watts in list(self._samples):
            seconds.setdefault(math.floor(at - origin), []).append((mhz, watts))
        return [[second, *map(statistics.median, zip(*found, strict=True))] for second, found in seconds.items()]

    def __enter__(self) -> Clocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
