"""A fluid resource: flows that run together slow each other down, and the rates change only when one starts or ends.

A flow is an amount that drains at an integer rate (units a second) over integer nanoseconds. What remains is kept in units of
1e-9: in `dt` nanoseconds exactly `rate x dt` of them pass, so no amount is lost or gained whatever the number of rate changes,
and a flow ends at the first nanosecond at which nothing remains (it overshoots by less than one nanosecond's worth).

At every start or end the rates are solved anew, once for all starts and ends of one nanosecond (a combination that lasts no
time has no rates). A flow whose rate came out the same keeps its plan; the others settle what has passed and plan their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import simpy
from simpy.events import Event, EventPriority

from sim.cost import NS_PER_S, Work, ceil_div
from sim.sharing import SharingRule

_LAST = EventPriority(2)
"""A SimPy priority after NORMAL (1): behind everything else of this nanosecond."""


class Segment(NamedTuple):
    """Flow `key` ran at `rate_per_s` from `start_ns` to `end_ns`."""

    key: int
    start_ns: int
    end_ns: int
    rate_per_s: int


class _Flow:
    __slots__ = ("done", "key", "plan", "rate", "remaining", "since_ns", "work")

    def __init__(self, key: int, work: Work, done: Event, now_ns: int) -> None:
        self.key, self.work, self.done = key, work, done
        self.remaining = work.amount * NS_PER_S  # at `since_ns`
        self.since_ns = now_ns
        self.rate = 0
        self.plan: Event | None = None


class Fluid:
    """The shared bandwidth of one machine. `segments`, when given, receives every stretch of constant rate."""

    def __init__(self, env: simpy.Environment, sharing: SharingRule, segments: list[Segment] | None = None) -> None:
        self.env, self.sharing, self.segments = env, sharing, segments
        self.flows: list[_Flow] = []
        self.solving = False

    def flow(self, key: int, work: Work) -> Event:
        """Start a flow of `work.amount`; the event fires when all of it has passed."""
        done = self.env.event()
        self.flows.append(_Flow(key, work, done, int(self.env.now)))
        self._solve_later()
        return done

    def _solve_later(self) -> None:
        if self.solving:
            return
        self.solving = True
        # An event that has happened already, scheduled by hand: `succeed` knows no priority.
        event = self.env.event()
        event._ok, event._value = True, None
        event.callbacks.append(self._solve)
        self.env.schedule(event, priority=_LAST)

    def _solve(self, _: Event) -> None:
        self.solving = False
        if not self.flows:
            return
        works: Sequence[Work] = [flow.work for flow in self.flows]
        for flow, rate in zip(self.flows, self.sharing(works), strict=True):
            if rate != flow.rate:
                self._settle(flow)
                flow.rate = rate
                flow.plan = self.env.timeout(ceil_div(flow.remaining, rate))
                flow.plan.callbacks.append(self._end)

    def _settle(self, flow: _Flow) -> None:
        """Account for what has passed since the flow's rate was last set."""
        now = int(self.env.now)
        if self.segments is not None and now > flow.since_ns:
            self.segments.append(Segment(flow.key, flow.since_ns, now, flow.rate))
        flow.remaining -= flow.rate * (now - flow.since_ns)
        flow.since_ns = now

    def _end(self, plan: Event) -> None:
        flow = next((f for f in self.flows if f.plan is plan), None)
        if flow is None:
            return  # planned at a rate that has changed since
        self._settle(flow)
        self.flows.remove(flow)
        flow.done.succeed()
        self._solve_later()
