"""Sharing: what rate each of several running works gets. A table where the machine was measured, a stated rule elsewhere.

The table: for each combination of running traffic (h2d, d2h, Adam at n threads) what each reached, linear in n between rows,
where n = 0 is the same combination without Adam. It is a table because no theory fits: on a measured machine the DRAM traffic
summed to 118 GB/s with Adam alone, 161 with one direction of the link and 181 with both, so it is no fixed capacity.

The rule, for a combination the table lacks: all share the DRAM's capacity in proportion to what each would move alone. A
combination that needed the rule is named in `notes`, once.

Cores, in both cases: when the works want more host cores than there are, those that use cores slow down in proportion.

Whatever table and rule say, no work is faster than alone and one that runs alone has its full rate: measured tables contain
noise, and a simulation without overlap must equal the longest path. Works of one traffic that run together split its rate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from megatrain.hardware import HardwareProfile
from sim.cost import Traffic, Work, adam_bytes_per_s, interpolate


class SharingRule(Protocol):
    """Integer rates for works that run at the same time, in their order; each in 1..`rate_per_s` of its work."""

    def __call__(self, running: Sequence[Work]) -> tuple[int, ...]: ...


class Sharing:
    """The sharing rule of one machine. `notes` collects the combinations for which the table had no row."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self.hardware = hardware
        self.notes: list[str] = []
        self._solved: dict[tuple[Work, ...], tuple[int, ...]] = {}
        self._tables: dict[tuple[bool, bool], list[tuple[int, dict[Traffic, int]]]] = {}
        for row in sorted(hardware.sharing, key=lambda r: r.adam_threads):
            rates: dict[Traffic, int] = {
                "h2d": row.h2d_bytes_per_s, "d2h": row.d2h_bytes_per_s, "adam": row.adam_bytes_per_s,
            }  # fmt: skip
            key = (row.h2d_bytes_per_s > 0, row.d2h_bytes_per_s > 0)
            self._tables.setdefault(key, []).append((row.adam_threads, rates))
        # One direction alone is the row without Adam of its combination.
        for key, link, traffic in (((True, False), hardware.h2d, "h2d"), ((False, True), hardware.d2h, "d2h")):
            alone: dict[Traffic, int] = {"h2d": 0, "d2h": 0, "adam": 0}
            alone["h2d" if traffic == "h2d" else "d2h"] = link.peak_bytes_per_s
            self._tables.setdefault(key, []).insert(0, (0, alone))

    def __call__(self, running: Sequence[Work]) -> tuple[int, ...]:
        # Rates depend on a work's shares, not on how much of it there is; but works of one schedule repeat, so this is enough.
        key = tuple(running)
        rates = self._solved.get(key)
        if rates is None:
            rates = self._solved[key] = (key[0].rate_per_s,) if len(key) == 1 else self._solve(key)
        return rates

    def _solve(self, running: tuple[Work, ...]) -> tuple[int, ...]:
        rates = self._from_table(running)
        if rates is None:
            rates = self._in_proportion(running)
        wanted, cores = sum(w.threads for w in running), self.hardware.cores
        if wanted > cores:
            rates = [r if w.threads == 0 else min(r, w.rate_per_s * cores // wanted) for w, r in zip(running, rates, strict=True)]
        return tuple(max(1, min(r, w.rate_per_s)) for w, r in zip(running, rates, strict=True))

    def _from_table(self, running: tuple[Work, ...]) -> list[int] | None:
        """Rates by the table, or None where it lacks the combination."""
        count: dict[Traffic | None, int] = {}
        for w in running:
            count[w.traffic] = count.get(w.traffic, 0) + 1
        if not count.keys() <= {"h2d", "d2h", "adam"}:
            return None
        threads = sum(w.threads for w in running if w.traffic == "adam")
        if count.keys() == {"adam"}:
            rates: dict[Traffic, int] = {"adam": adam_bytes_per_s(self.hardware, threads)}
        else:
            rows = self._tables.get(("h2d" in count, "d2h" in count), [])
            i = bisect_left(rows, threads, key=lambda row: row[0])
            if i == len(rows):
                return None
            if rows[i][0] == threads:
                rates = rows[i][1]
            elif i == 0:
                return None
            else:
                (n0, low), (n1, high) = rows[i - 1], rows[i]
                rates = {t: interpolate((n0, low[t]), (n1, high[t]), threads) for t in low}
        return [rates[w.traffic] // count[w.traffic] for w in running if w.traffic is not None]

    def _in_proportion(self, running: tuple[Work, ...]) -> list[int]:
        """Everyone at one fraction of its rate alone: the DRAM's capacity over what all together would move."""
        demand = [w.dram_bytes * w.rate_per_s // max(1, w.amount) for w in running]
        capacity, total = self.hardware.dram_bytes_per_s, sum(demand)
        self._note(running)
        if total <= capacity:
            return [w.rate_per_s for w in running]
        return [w.rate_per_s * capacity // total if d else w.rate_per_s for w, d in zip(running, demand, strict=True)]

    def _note(self, running: tuple[Work, ...]) -> None:
        names = sorted(f"{w.traffic}({w.threads} threads)" if w.threads else str(w.traffic) for w in running)
        note = (
            f"{self.hardware.name}: no measured rates for {' + '.join(names)}; "
            f"DRAM's {self.hardware.dram_bytes_per_s / 1e9:.1f} GB/s shared in proportion"
        )
        if note not in self.notes:
            self.notes.append(note)
