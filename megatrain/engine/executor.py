"""The executor: parts of a schedule, run on a thread a lane.

For each op of its lane a thread waits until every dep has ended, lets the backend run the op, and records when and what. That is
all the order there is; which op comes next, what it waits for and which bytes it gets stand in the schedule.

A failure on any lane cancels the clock, so every other wait ends at once, and surfaces as `LaneError` with the op's text form.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from megatrain.engine.backend import Backend, Ran, Timeline
from megatrain.engine.clock import Cancelled, Clock, Signal
from megatrain.schedule.nouns import LANES, Lane, Op, Part, Schedule, part_digest, place, ran_line
from megatrain.trace import Event, Trace

TRACED_PARTS = 64
"""A trace keeps this many parts, so that memory stays flat however long the run."""


class LaneError(RuntimeError):
    """A lane failed; the message names the op, the lane and the reason."""


class Issue(Signal):
    """The issuing of one op, and the mark its lane had right after it."""

    __slots__ = ("mark",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.mark: Any = None


class PartRun:
    """One run of a part: what its ops wait for, and what was done so far.

    An op of a lane that runs ahead of its thread (a stream) is `issued` when it has been enqueued, any other when it has ended.
    """

    def __init__(self, number: int, part: Part, previous: PartRun | None, step: Any, base: Any, recorded: bool) -> None:
        self.number, self.part, self.step, self.base, self.recorded = number, part, step, base, recorded
        self.issued = [Issue(part.text(i)) for i in range(len(part.ops))]
        self.by_name = {op.name: issue for op, issue in zip(part.ops, self.issued, strict=True)}
        self.before = previous.by_name if previous is not None else {}
        self.marks: dict[int, tuple[int, Any, Any]] = {}
        self.lines: dict[str, list[str]] = {lane: [] for lane in LANES}

    def finished(self) -> bool:
        """Whether every op has been issued."""
        return all(issue.happened for issue in self.issued)

    def order_of(self, lane: Lane) -> list[int]:
        """The ops of `lane`, in order, as positions in the part."""
        return [i for i, op in enumerate(self.part.ops) if op.lane == lane]

    def deps_of(self, op: Op) -> list[tuple[str, Issue]]:
        """What `op` waits for: names as a digest has them, and the issues."""
        waits = [(self.part.ops[d].name, self.issued[d]) for d in op.deps]
        return waits + [(f"-1:{name}", self.before[name]) for name in op.prev]


class _Mailbox:
    """What one lane has yet to run; one thread puts, one takes."""

    def __init__(self, clock: Clock, lane: Lane) -> None:
        self._clock, self._lane = clock, lane
        self._items: deque[PartRun] = deque()
        self._arrival = Signal("more work")

    def put(self, run: PartRun) -> None:
        self._items.append(run)
        arrived, self._arrival = self._arrival, Signal("more work")
        self._clock.signal(arrived)

    def take(self) -> PartRun:
        while True:
            arrival = self._arrival  # read before looking, so that what arrives after the look has signalled it
            if self._items:
                return self._items.popleft()
            self._clock.wait(arrival, f"lane {self._lane} (idle)")


class Executor:
    """Lane threads over one backend. `submit` appends a part and returns at once; `drain` waits for all that was submitted."""

    def __init__(self, backend: Backend, *, tracing: bool = True) -> None:
        self.backend, self.clock, self.tracing = backend, backend.clock, tracing
        self.runs: list[PartRun] = []
        self._unrecorded = 0
        self._latest: PartRun | None = None  # what the next part's `prev` names refer to; None when everything has ended
        self._mail = {lane: _Mailbox(self.clock, lane) for lane in LANES}
        self._unfinished: list[PartRun] = []  # parts with ops that have not been issued
        self._reached: dict[Lane, Any] = {}  # each lane's latest mark
        self._lines: dict[int, tuple[Op, list[str], Ran, str]] = {}
        self._failure: LaneError | None = None
        self._lock = threading.Lock()  # guards the first failure only
        self._closed = False
        self._threads = {
            lane: threading.Thread(target=self._lane, args=(lane,), name=f"lane {lane}", daemon=True) for lane in LANES
        }
        for thread in self._threads.values():
            self.clock.adopt(thread)
        for thread in self._threads.values():
            thread.start()

    def submit(self, part: Part, step: Any = None, *, from_cold: bool = False, record: bool = True) -> PartRun:
        """Run `part` after what was submitted before. `step` goes to the backend with every op. `record=False` leaves the run
        out of the trace, as does a trace that has `TRACED_PARTS` already. Raises `LaneError` if a lane has failed.

        A part that starts `from_cold` names no op of the part before it: everything before it is drained first.
        """
        self._raise_failure()
        if from_cold:
            self.drain()
        try:
            return self._submit(part, step, record)
        except BaseException as error:  # an interrupt included: lanes that got the part unevenly would wait for each other
            self._fail(LaneError(f"{part.name}: interrupted while it was submitted"), error)
            raise

    def _submit(self, part: Part, step: Any, record: bool) -> PartRun:
        recorded = record and self.tracing and len(self.runs) < TRACED_PARTS
        base = self.backend.base() if recorded else None
        run = PartRun(len(self.runs), part, self._latest, step, base, recorded)
        self._latest = run
        if recorded:
            self.runs.append(run)
        elif record:
            self._unrecorded += 1
        for old in self._unfinished:
            if old.finished():
                old.step = None  # a trace need not hold on to its batches
        self._unfinished = [r for r in self._unfinished if not r.finished()] + [run]
        for mailbox in self._mail.values():
            mailbox.put(run)
        return run

    def wait(self, issues: Sequence[Issue]) -> None:
        """Wait until these ops have ended. Raises `LaneError`."""
        try:
            for issue in issues:
                self.clock.wait(issue, "the caller")
            for issue in issues:
                self.backend.settle(issue.mark)
        except Cancelled as cancelled:
            self._raise_failure(cancelled)

    def drain(self) -> None:
        """Wait for everything; what is submitted next depends on nothing that ran before."""
        # Each of them: the last part may be empty, or shorter than the one before.
        for run in self._unfinished:
            self.wait(run.issued)
            run.step = None
        for mark in self._reached.values():
            self.backend.settle(mark)
        self._unfinished, self._latest = [], None

    def restart_trace(self) -> None:
        """Forget what ran, after a `drain`; recording starts again."""
        self.runs, self._unrecorded = [], 0

    def trace(self) -> Trace:
        """What has run, after a `drain`, up to `TRACED_PARTS` parts. Digests are recomputed from what the lanes did.
        ValueError if the executor does not trace."""
        if not self.tracing:
            raise ValueError("trace: tracing is off")
        timeline = self.backend.timeline([run.base for run in self.runs])
        events, notes = _events(self.runs, timeline), list(timeline.notes)
        if self._unrecorded:
            notes.append(f"recording ended after {TRACED_PARTS} parts; {self._unrecorded} more ran")
        return Trace(
            source=self.backend.source,
            parts=tuple(run.part.name for run in self.runs),
            digests=tuple(part_digest(run.lines) for run in self.runs),
            events=tuple(events),
            notes=tuple(notes),
        )

    def close(self) -> None:
        """Stop the lanes and wait for their threads. Work that was submitted and not drained is abandoned."""
        if self._closed:
            return
        self._closed = True
        self.clock.cancel(RuntimeError("the engine was closed"))
        for thread in self._threads.values():
            thread.join()

    # ---- on the lanes' threads ---------------------------------------------------------------------------------------

    def _lane(self, lane: Lane) -> None:
        thread, current = threading.current_thread(), f"lane {lane}"
        try:
            self.backend.enter_lane(lane)
            while True:
                run = self._mail[lane].take()
                for i in run.order_of(lane):
                    current = f"{run.part.name} {run.part.text(i)} on {lane}"
                    self._run_op(run, i, lane)
        except Cancelled as cancelled:
            # A lane's own failure is noted before it cancels the clock, so this is the clock's: a deadlock, a dead thread.
            if not self._closed:
                self._fail(LaneError(str(cancelled.cause)), cancelled.cause)
        except BaseException as error:  # whatever ends a lane must end the run
            self._fail(LaneError(f"{current}: {type(error).__name__}: {error}"), error)
        finally:
            self.clock.leave(thread)

    def _run_op(self, run: PartRun, i: int, lane: Lane) -> None:
        op, clock = run.part.ops[i], self.clock
        who = run.part.text(i)
        issued = clock.now_ns()
        deps = run.deps_of(op)
        for _, issue in deps:
            clock.wait(issue, who)
            self.backend.follow(lane, issue.mark)
        start = self.backend.mark(lane, timed=True) if run.recorded else None
        ran: Ran = self.backend.run(op, run.step)
        end = run.issued[i].mark = self._reached[lane] = self.backend.mark(lane, timed=run.recorded)
        if run.recorded:
            run.marks[i] = (issued, start, end)
            run.lines[lane].append(self._line(op, [name for name, _ in deps], ran))
        clock.signal(run.issued[i])


    def _line(self, op: Op, waited: list[str], ran: Ran) -> str:
        """The op as the digest sees it. What it does is the same in most steps, so the last line is kept with what it says."""
        known = self._lines.get(id(op))
        if known is None or known[0] is not op or known[1] != waited or known[2] != ran:
            line = ran_line(op.name, waited, ran.reads, ran.writes, ran.nbytes)
            known = self._lines[id(op)] = (op, waited, ran, line)
        return known[3]

    def _fail(self, failure: LaneError, cause: BaseException | None) -> None:
        self.clock.cancel(self._failed(failure, cause))

    def _failed(self, failure: LaneError, cause: BaseException | None) -> LaneError:
        """The run's one failure: this one, unless another came first."""
        failure.__cause__ = cause
        with self._lock:
            if self._failure is None:
                self._failure = failure
            return self._failure

    def _raise_failure(self, cancelled: Cancelled | None = None) -> None:
        if self._failure is None and cancelled is not None:
            self._failed(LaneError(str(cancelled.cause)), cancelled.cause)
        if self._failure is not None:
            # A fresh exception each time: one that is raised again and again collects the frames of all who met it.
            raise LaneError(str(self._failure)) from self._failure.__cause__


def _events(runs: Sequence[PartRun], timeline: Timeline) -> list[Event]:
    """The events of drained runs. Where clocks are read less exactly than ops follow each other, an op may seem to start before
    what it waited for has ended; within the timeline's resolution it is moved there."""
    events: list[Event] = []
    ended: dict[Lane, int] = {}
    before: dict[str, int] = {}
    for run in runs:
        ends: dict[str, int] = {}
        for i, op in enumerate(run.part.ops):
            if i not in run.marks:
                continue  # not run, which the digest says
            issued, start, end = run.marks[i]
            start_ns, end_ns = timeline.ns(run.number, start), timeline.ns(run.number, end)
            waited = [ends.get(run.part.ops[d].name, 0) for d in op.deps] + [before.get(name, 0) for name in op.prev]
            earliest = max([ended.get(op.lane, 0), *waited])
            if earliest - timeline.resolution_ns <= start_ns < earliest:
                start_ns = earliest
            end_ns = max(end_ns, start_ns)
            ended[op.lane] = ends[op.name] = end_ns
            events.append(Event(run.number, i, min(issued, start_ns), start_ns, end_ns))
        before = ends
    return events


def run_schedule(schedule: Schedule, backend: Backend, steps: int) -> Trace:
    """Run `schedule.parts(steps)` on a backend that needs no batches, and return the trace. ValueError for no step."""
    parts = schedule.parts(steps)
    place(parts)  # a `prev` that names nothing is found before anything runs
    executor = Executor(backend)
    try:
        for part in parts:
            executor.submit(part)
        executor.drain()
        return executor.trace()
    finally:
        executor.close()
