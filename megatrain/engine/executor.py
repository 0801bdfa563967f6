"""The executor: parts of a schedule, run on the backend's threads.

For each op of its lanes a thread waits until every dep has ended, lets the backend run the op, and records when and what. That is
all the order there is; which op comes next, what it waits for and which bytes it gets stand in the schedule.

A backend whose lanes do their work themselves (streams) has one thread that issues the ops of all of them, in the order of the
part. It never waits for a lane that works on its thread (the cpu lane): its own lanes are told to, and it goes on. Nothing can
lock up: of all ops that have not ended take the first; what it depends on has ended, and its thread is not held up by an op that
comes later, since ops are issued in this very order.

A failure on any lane cancels the clock, so every other wait ends at once, and surfaces as `LaneError` with the op's text form.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatrain.engine.backend import Backend, Ran, Timeline
from megatrain.engine.clock import Cancelled, Clock, Signal
from megatrain.schedule.nouns import LANES, Lane, Op, Part, Schedule, part_digest, place, ran_line
from megatrain.trace import Event, Trace

TRACED_PARTS = 64
"""A trace keeps this many parts, so that memory stays flat however long the run."""

_AT_REST_S = 0.5


class LaneError(RuntimeError):
    """A lane failed; the message names the op, the lane and the reason."""


class Issue(Signal):
    """The issuing of one op: the mark its lane had right after it, and which op of its lane it is, counted from 1."""

    __slots__ = ("count", "lane", "mark")

    def __init__(self, name: str, lane: Lane, count: int) -> None:
        super().__init__(name)
        self.lane, self.count = lane, count
        self.mark: Any = None


class _Outline:
    """What the runs of a part have in common: names, text forms, and each lane's ops."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.names = [op.name for op in part.ops]
        self.texts = [part.text(i) for i in range(len(part.ops))]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.waits = [([(self.names[d], d) for d in op.deps], [(f"-1:{name}", name) for name in op.prev]) for op in part.ops]
        totals = dict.fromkeys(LANES, 0)
        self.places = []  # (lane, which of its ops in this part, from 1)
        for op in part.ops:
            totals[op.lane] += 1
            self.places.append((op.lane, totals[op.lane]))
        self.totals = totals


class PartRun:
    """One run of a part: what its ops wait for, and what was done so far.

    An op of a lane that runs ahead of its thread (a stream) is `issued` when it has been enqueued, any other when it has ended.
    `ended` says how many ops each lane had when the part began.
    """

    def __init__(
        self, number: int, outline: _Outline, previous: PartRun | None, ended: Mapping[Lane, int], step: Any, base: Any,
        recorded: bool,
    ) -> None:  # fmt: skip
        self.number, self.part, self.outline = number, outline.part, outline
        self.step, self.base, self.recorded, self.previous = step, base, recorded, previous
        self.issued = [
            Issue(text, lane, ended[lane] + nth) for text, (lane, nth) in zip(outline.texts, outline.places, strict=True)
        ]
        self.marks: dict[int, tuple[int, Any, Any]] = {}
        self.lines: dict[str, list[str]] = {lane: [] for lane in LANES}

    def named(self, name: str) -> Issue:
        """The issuing of the op of this name."""
        return self.issued[self.outline.index[name]]

    def finished(self) -> bool:
        """Whether every op has been issued."""
        return all(issue.happened for issue in self.issued)

    def order_of(self, lanes: Sequence[Lane]) -> list[int]:
        """The ops of these lanes, in the part's order, as positions in it."""
        return [i for i, (lane, _) in enumerate(self.outline.places) if lane in lanes]

    def deps_of(self, i: int) -> list[tuple[str, Issue]]:
        """What the op at `i` waits for: names as a digest has them, and the issues."""
        within, before = self.outline.waits[i]
        waits = [(name, self.issued[d]) for name, d in within]
        if before:
            assert self.previous is not None, f"{self.outline.texts[i]} waits for a part that did not run"
            waits += [(text, self.previous.named(name)) for text, name in before]
        return waits


class _Mailbox:
    """What one thread has yet to run; another puts, it takes."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name
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
            self._clock.wait(arrival, f"{self._name} (idle)")


class Executor:
    """Threads over one backend. `submit` appends a part and returns at once; `drain` waits for all that was submitted."""

    def __init__(self, backend: Backend, *, tracing: bool = True) -> None:
        self.backend, self.clock, self.tracing = backend, backend.clock, tracing
        self.runs: list[PartRun] = []
        self._unrecorded = 0
        self._latest: PartRun | None = None  # what the next part's `prev` names refer to; None when everything has ended
        self._mail = {lanes: _Mailbox(self.clock, _name_of(lanes)) for lanes in backend.lanes.threads}
        self._unfinished: list[PartRun] = []  # parts with ops that have not been issued
        self._reached: dict[Lane, Any] = {}  # each lane's latest mark
        self._submitted: dict[Lane, int] = dict.fromkeys(LANES, 0)  # ops of each lane, in all parts
        self._outlines: dict[int, _Outline] = {}
        self._lines: dict[int, tuple[Op, list[str], Ran, str]] = {}
        self._failure: LaneError | None = None
        self._lock = threading.Lock()  # guards the first failure only
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run_lanes, args=(lanes,), name=_name_of(lanes), daemon=True)
            for lanes in backend.lanes.threads
        ]
        for thread in self._threads:
            self.clock.adopt(thread)
        for thread in self._threads:
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
        outline = self._outlines.get(id(part))
        if outline is None or outline.part is not part:
            outline = self._outlines[id(part)] = _Outline(part)
        recorded = record and self.tracing and len(self.runs) < TRACED_PARTS
        base = self.backend.lanes.base() if recorded else None
        run = PartRun(len(self.runs), outline, self._latest, self._submitted, step, base, recorded)
        self._submitted = {lane: count + outline.totals[lane] for lane, count in self._submitted.items()}
        self._latest = run
        if recorded:
            self.runs.append(run)
        elif record:
            self._unrecorded += 1
        self._unfinished = [old for old in self._unfinished if not self._retired(old)] + [run]
        for mailbox in self._mail.values():
            mailbox.put(run)
        return run

    def _retired(self, run: PartRun) -> bool:
        """Whether `run` is done with; then it holds on to nothing that a trace does not need."""
        if not run.finished():
            return False
        if run.previous is not None and not run.previous.recorded:
            # What could wait for an op is in its own part and the next; both have been issued.
            self.backend.lanes.recycle([issue.mark for issue in run.previous.issued], timed=False)
        run.step = run.previous = None
        return True

    def wait(self, issues: Sequence[Issue]) -> None:
        """Wait until these ops have ended. Raises `LaneError`."""
        try:
            for issue in issues:
                self.clock.wait(issue, "the caller")
            for issue in issues:
                self.backend.lanes.settle(issue.mark)
        except Cancelled as cancelled:
            self._raise_failure(cancelled)

    def drain(self) -> None:
        """Wait for everything; what is submitted next depends on nothing that ran before."""
        # Each of them: the last part may be empty, or shorter than the one before.
        for run in self._unfinished:
            self.wait(run.issued)
            self._retired(run)
        for mark in self._reached.values():
            self.backend.lanes.settle(mark)
        self._unfinished, self._latest = [], None

    def restart_trace(self) -> None:
        """Forget what ran, after a `drain`; recording starts again."""
        self.runs, self._unrecorded = [], 0

    def trace(self) -> Trace:
        """What has run, after a `drain`, up to `TRACED_PARTS` parts. Digests are recomputed from what the lanes did.
        ValueError if the executor does not trace."""
        if not self.tracing:
            raise ValueError("trace: tracing is off")
        timeline = self.backend.lanes.timeline([run.base for run in self.runs])
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
        self.backend.lanes.abandon()
        for thread in self._threads:
            thread.join()

    # ---- on the lanes' threads ---------------------------------------------------------------------------------------

    def _run_lanes(self, lanes: tuple[Lane, ...]) -> None:
        thread, current = threading.current_thread(), _name_of(lanes)
        try:
            self.backend.lanes.enter(lanes)
            while True:
                run = self._mail[lanes].take()
                for series in self._series(run, run.order_of(lanes)):
                    i = series[0]
                    current = f"{run.part.name} {run.outline.texts[i]} on {run.part.ops[i].lane}"
                    if len(series) == 1:
                        self._run_op(run, i)
                    else:
                        self._run_series(run, series)
        except Cancelled as cancelled:
            # A lane's own failure is noted before it cancels the clock, so this is the clock's: a deadlock, a dead thread.
            if not self._closed:
                self._fail(LaneError(str(cancelled.cause)), cancelled.cause)
        except BaseException as error:  # whatever ends a lane must end the run
            self._fail(LaneError(f"{current}: {type(error).__name__}: {error}"), error)
        finally:
            self.clock.leave(thread)

    def _series(self, run: PartRun, order: Sequence[int]) -> Iterator[list[int]]:
        """The same order, in pieces that the backend runs at once: an op, with those after it that it joins and that wait for
        nothing. While they run, their thread neither fails nor tells the host's other threads that they have ended."""
        piece: list[int] = []
        for i in order:
            op = run.part.ops[i]
            joins = self.backend.joins(op)
            if piece and (not joins or op.deps or op.prev):
                yield piece
                piece = []
            piece.append(i)
            if not joins:
                yield piece
                piece = []
        if piece:
            yield piece

    def _run_op(self, run: PartRun, i: int) -> None:
        op, lanes = run.part.ops[i], self.backend.lanes
        issued = self.clock.now_ns()
        waited = self._follow(run, i)
        start = lanes.mark(op.lane, timed=True) if run.recorded else None
        ran: Ran = self.backend.run(op, run.step)
        end = lanes.mark(op.lane, timed=run.recorded)
        lanes.ended(op.lane, run.issued[i].count)
        self._issued(run, i, (issued, start, end), waited, ran)

    def _run_series(self, run: PartRun, series: Sequence[int]) -> None:
        ops, counts = [run.part.ops[i] for i in series], [run.issued[i].count for i in series]
        issued: Any = self.clock.now_ns()
        waited = self._follow(run, series[0])
        done = self.backend.run_series(ops, run.step, counts[0])
        if len(done) < len(ops):
            raise Cancelled(RuntimeError(f"{run.outline.texts[series[len(done)]]}: left out, as of a run that was abandoned"))
        self.backend.lanes.ended(ops[0].lane, counts[-1])
        for i, (start, ran, end) in zip(series, done, strict=True):
            self._issued(run, i, (issued, start, end), waited, ran)
            issued, waited = end, []

    def _follow(self, run: PartRun, i: int) -> list[str]:
        """Make the op's lane wait for what the op waits for; the names of that."""
        lane, lanes, deps = run.part.ops[i].lane, self.backend.lanes, run.deps_of(i)
        for _, issue in deps:
            if not issue.happened:
                if lanes.follow_count(lane, issue.lane, issue.count):
                    continue
                self.clock.wait(issue, run.outline.texts[i])
            lanes.follow(lane, issue.mark)
        return [name for name, _ in deps]

    def _issued(self, run: PartRun, i: int, marks: tuple[int, Any, Any], waited: list[str], ran: Ran) -> None:
        op, mine = run.part.ops[i], run.issued[i]
        mine.mark = self._reached[op.lane] = marks[2]
        if run.recorded:
            run.marks[i] = marks
            run.lines[op.lane].append(self._line(op, waited, ran))
        self.clock.signal(mine)

    def _line(self, op: Op, waited: list[str], ran: Ran) -> str:
        """The op as the digest sees it. What it does is the same in most steps, so the last line is kept with what it says."""
        known = self._lines.get(id(op))
        if known is None or known[0] is not op or known[1] != waited or known[2] != ran:
            line = ran_line(op.name, waited, ran.reads, ran.writes, ran.nbytes)
            known = self._lines[id(op)] = (op, waited, ran, line)
        return known[3]

    def _fail(self, failure: LaneError, cause: BaseException | None) -> None:
        self.clock.cancel(self._failed(failure, cause))
        self.backend.lanes.abandon()

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
            # Whoever hears of it finds the lanes at rest, or nearly: a caller may want to look at the device.
            for thread in self._threads:
                thread.join(_AT_REST_S)
            # A fresh exception each time: one that is raised again and again collects the frames of all who met it.
            raise LaneError(str(self._failure)) from self._failure.__cause__


def _name_of(lanes: Sequence[Lane]) -> str:
    return f"lane {'+'.join(lanes)}"


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
