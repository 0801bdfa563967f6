"""Clocks: every wait of the engine goes through one of these.

A wait is for a `Signal` (a dep has ended, work has come), for time to pass, or for a lock. `RealClock` is the machine's monotonic
clock. `VirtualClock` advances only when every participating thread waits, straight to the next thing due; so a run takes no real
time and its trace is exact. When all wait and nothing is due it is a deadlock, and the error names who waits for what.

Both clocks can be cancelled: all waits, present and future, then raise `Cancelled` with the cause. Waits look now and then
whether the threads they rely on still live, so a thread that dies silently cancels the clock instead of hanging the others.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from typing import Protocol

_LIVENESS_S = 0.2


class Cancelled(Exception):
    """Raised out of every wait once the clock is cancelled; `cause` is the failure that cancelled it."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Deadlock(RuntimeError):
    """All threads wait and nothing is due; the message names each waiting op and what it waits for."""


class Signal:
    """Something that happens once. Waiters count themselves so that a virtual clock knows whom it wakes."""

    __slots__ = ("happened", "name", "waiters")

    def __init__(self, name: str) -> None:
        self.name = name
        self.happened = False
        self.waiters = 0


class Clock(Protocol):
    """What the engine needs of time. `who` names the waiting op in errors."""

    def now_ns(self) -> int: ...
    def signal(self, signal: Signal) -> None: ...
    def wait(self, signal: Signal, who: str) -> None: ...
    def sleep(self, ns: int, who: str) -> None: ...
    def adopt(self, thread: threading.Thread) -> None: ...
    def leave(self, thread: threading.Thread) -> None: ...
    def cancel(self, cause: BaseException) -> None: ...


class ClockLock:
    """A lock whose waiting the clock sees; first come, first served."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name
        self._inner = threading.Lock()  # guards the fields only, never held across a wait
        self._held = False
        self._queue: deque[Signal] = deque()

    def acquire(self, who: str) -> None:
        with self._inner:
            if not self._held:
                self._held = True
                return
            turn = Signal(f"lock {self._name}")
            self._queue.append(turn)
        self._clock.wait(turn, who)

    def release(self) -> None:
        with self._inner:
            if not self._queue:
                self._held = False
                return
            turn = self._queue.popleft()
        self._clock.signal(turn)


class RealClock:
    """The machine's monotonic clock, from 0 at its creation. A signal wakes those who wait for it and nobody else."""

    def __init__(self) -> None:
        self._base = time.monotonic_ns()
        self._inner = threading.Lock()  # guards the fields only, never held across a wait
        self._blocked: dict[threading.Lock, Signal] = {}
        self._threads: list[threading.Thread] = []
        self._cause: BaseException | None = None

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._base

    def signal(self, signal: Signal) -> None:
        with self._inner:
            signal.happened = True
            if signal.waiters:
                for gate in [gate for gate, waited in self._blocked.items() if waited is signal]:
                    del self._blocked[gate]
                    gate.release()

    def wait(self, signal: Signal, who: str) -> None:
        with self._inner:
            if signal.happened:  # what has happened stays so, whatever failed since
                return
            if self._cause is not None:
                raise Cancelled(self._cause)
            gate = self._gate(signal)
        while not gate.acquire(timeout=_LIVENESS_S):
            self._look_for_the_dead()
        if not signal.happened:
            assert self._cause is not None
            raise Cancelled(self._cause)

    def sleep(self, ns: int, who: str) -> None:
        end = self.now_ns() + ns
        never = Signal(f"{ns} ns")
        with self._inner:
            if self._cause is not None:
                raise Cancelled(self._cause)
            gate = self._gate(never)
        while (left := end - self.now_ns()) > 0:
            if gate.acquire(timeout=left / 1e9):
                assert self._cause is not None
                raise Cancelled(self._cause)
        with self._inner:
            self._blocked.pop(gate, None)

    def adopt(self, thread: threading.Thread) -> None:
        with self._inner:
            self._threads.append(thread)

    def leave(self, thread: threading.Thread) -> None:
        with self._inner:
            self._threads.remove(thread)

    def cancel(self, cause: BaseException) -> None:
        """End all waits with `Cancelled`. The first cause stands."""
        with self._inner:
            if self._cause is None:
                self._cause = cause
            for gate in self._blocked:
                gate.release()
            self._blocked.clear()

    def _gate(self, signal: Signal) -> threading.Lock:
        gate = threading.Lock()
        gate.acquire()
        self._blocked[gate] = signal
        signal.waiters += 1
        return gate

    def _look_for_the_dead(self) -> None:
        for thread in dead(self._threads):
            self.cancel(RuntimeError(f"thread {thread.name} died"))


def dead(threads: list[threading.Thread]) -> list[threading.Thread]:
    """Threads that were started, are counted on, and no longer live."""
    return [thread for thread in threads if thread.ident is not None and not thread.is_alive()]


class VirtualClock:
    """Time that passes only while every participant waits. The thread that drives the engine is a participant too, adopted
    implicitly: virtual time stands still while it computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._cause: BaseException | None = None
        self._now = 0
        self._running = 1
        self._count = 0
        self._sleepers: list[tuple[int, int, Signal]] = []
        self._waiting: dict[int, tuple[str, str]] = {}

    def now_ns(self) -> int:
        return self._now

    def signal(self, signal: Signal) -> None:
        with self._changed:
            self._happen(signal)

    def wait(self, signal: Signal, who: str) -> None:
        with self._changed:
            self._wait(signal, who)

    def sleep(self, ns: int, who: str) -> None:
        if ns <= 0:
            return
        with self._changed:
            self._count += 1
            due = Signal(f"{self._now + ns} ns")
            heapq.heappush(self._sleepers, (self._now + ns, self._count, due))
            self._wait(due, who)

    def adopt(self, thread: threading.Thread) -> None:
        """Count `thread` as running from now on; call it before the thread starts, so that time cannot run ahead of it."""
        with self._changed:
            self._threads.append(thread)
            self._running += 1

    def leave(self, thread: threading.Thread) -> None:
        with self._changed:
            self._threads.remove(thread)
            self._running -= 1
            self._advance_if_all_wait()

    def cancel(self, cause: BaseException) -> None:
        """End all waits with `Cancelled`. The first cause stands."""
        with self._changed:
            self._cancel(cause)

    def _cancel(self, cause: BaseException) -> None:
        if self._cause is None:
            self._cause = cause
        self._changed.notify_all()

    def _block(self) -> None:
        """One wait on the condition, which the caller holds; cancels the clock if a thread has died."""
        if not self._changed.wait(_LIVENESS_S):
            for thread in dead(self._threads):
                self._cancel(RuntimeError(f"thread {thread.name} died"))
        if self._cause is not None:
            raise Cancelled(self._cause)

    def _happen(self, signal: Signal) -> None:
        signal.happened = True
        self._running += signal.waiters
        signal.waiters = 0
        self._changed.notify_all()

    def _wait(self, signal: Signal, who: str) -> None:
        if signal.happened:  # what has happened stays so, whatever failed since
            return
        if self._cause is not None:
            raise Cancelled(self._cause)
        self._count += 1
        key = self._count
        self._waiting[key] = (who, signal.name)
        signal.waiters += 1
        self._running -= 1
        try:
            self._advance_if_all_wait()
            while not signal.happened:
                self._block()
        finally:
            del self._waiting[key]

    def _advance_if_all_wait(self) -> None:
        while self._running == 0 and self._cause is None:
            if not self._sleepers:
                if self._waiting:
                    waits = "; ".join(f"{who} waits for {what}" for who, what in sorted(self._waiting.values()))
                    self._cancel(Deadlock(f"all wait and nothing is due: {waits}"))
                return
            self._now = self._sleepers[0][0]
            while self._sleepers and self._sleepers[0][0] == self._now:
                self._happen(heapq.heappop(self._sleepers)[2])
