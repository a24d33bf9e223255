"""Follows the logs of all daemons although the file system of one may hang.

Reading from a dead NFS server does not return, for hours. So the logs of each daemon are read on a
thread of their own, and what hangs costs that thread and that daemon only. What comes late is given
with the next poll: those bytes are read, and would not be read again.

Between polls the threads go on looking by themselves, and one that finds something new says so.
Asking each of them five times a second whether there is something took 0.9 ms of CPU each time, of
which the look itself was 0.2 ms. Where the kernel has reported a change before (inotify), a thread
looks every WATCHED_LOOK_SECONDS only, and a poll without a reported change wakes no thread: to wake
one takes 0.3 ms, and 0.17 ms of CPU (H200).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mps_exporter.logging import TransitionLogger
from mps_exporter.observations import LogChunk, LogName, LogsObservation, LogState
from mps_exporter.sources.file_changes import FileChanges
from mps_exporter.sources.host import SourceTimeoutError
from mps_exporter.sources.log_reader import LogReader, LogTarget, unread_states
from mps_exporter.sources.worker_thread import WorkerThread

MAX_THREADS = 64
"""More than a host has daemons: eight GPUs of seven MIG instances make 56."""

MAX_LIMITED_THREADS = 16
"""Those for daemons of ordinary users, whose logs may hang for as long as these like."""

LOOK_SECONDS = 0.2
"""How often a thread looks at what it follows: one fstat for each log."""

WHOLE_LOOK_SECONDS = 1.0
"""How often such a look also sees whether the logs' names stand for other files by now."""

WATCHED_LOOK_SECONDS = 2.0
"""How often a thread looks at logs of which the kernel tells each change."""

MAX_WATCHED = 4
"""Of so many daemons the kernel is asked to tell: by default a user has 128 descriptors for that,
and where this program runs as root, so do the kubelet and the container runtime."""

USER_POLL_BYTES = 64 * 1024
LIMITED_POLL_BYTES = 128 * 1024
"""How much one poll reads of all logs of one user, and of all users, but root's and those that were
configured. Five polls a second make 0.33 and 0.66 MB/s, 6 and 13 % of what a core can take in;
daemons write some kB/s."""

MIN_POLL_BYTES = 4096
"""Of each log."""

HUNG_SECONDS = 1.0
"""A poll does not wait for the logs of a daemon whose reading takes so long already."""

PASS_SECONDS = 2.0
"""So long a poll waits at most: logs that hang must not use up the deadline of a scrape."""

UNREADABLE_AFTER_SECONDS = 5.0
"""After so long those logs are no longer called readable."""

_HANGS = "reading it does not return: the file system does not answer"
_NO_THREAD = "the logs of other daemons hang, and no thread is left to read it"


@dataclass(slots=True)
class _Watch:
    """What the kernel tells of the logs of one daemon."""

    _changes: FileChanges = field(default_factory=FileChanges)
    proved: bool = False
    """A change was reported, and since then none was found that had not been."""

    @property
    def descriptor(self) -> int | None:
        return self._changes.descriptor

    def begin(self, files: Iterable[int] | None) -> bool:
        """Watch these files; False: they cannot be watched. May block, on any thread."""
        return files is not None and self._changes.watch(files)

    def changed(self) -> bool:
        """Whether a change has been told."""
        happened = self._changes.happened()
        self.proved |= happened
        return happened


class _Following:
    """Looks at the logs of one daemon until something is new, or until somebody asks.

    Args:
        tails: What reads them.
        target: Whose logs.
        limit: How much of each log is read at most.
        states: What was told of them last: something else is new.
        clock: Monotonic time.
        watch: Tells when they change; None: nothing does.
        settled: The last look found nothing, and had nothing more to say of that.
    """

    def __init__(
        self,
        tails: LogReader,
        target: LogTarget,
        limit: int | None,
        states: tuple[LogState, ...],
        clock: Callable[[], float],
        watch: _Watch | None,
        *,
        settled: bool,
    ) -> None:
        self.target = target
        self.states = states
        self.since: float | None = None
        """When the look that is under way began, on the monotonic clock; None: none is."""
        self._tails = tails
        self._limit = limit
        self._clock = clock
        self.watch = watch
        self._settled = settled
        self._watched = False
        """The kernel tells of each change from now on, and before that nothing had changed."""
        self._loop = asyncio.get_running_loop()
        self._asked = threading.Event()
        self._request: tuple[LogTarget, float, int | None] | None = None
        self.answered = False
        """It returned what was asked for, not only what it had found before."""

    def ask(self, target: LogTarget, at: float, limit: int | None) -> None:
        """Let it return at once, with what these logs gained."""
        self._request = target, at, limit
        self._asked.set()

    def stop(self) -> None:
        """Let it return at once, without another look."""
        self._asked.set()

    @property
    def is_unchanged(self) -> bool:
        """It is certain that a look would find nothing."""
        watch = self.watch
        if watch is None or not (watch.proved and self._watched and self._settled):
            return False
        return self.since is None and not watch.changed()

    def judge_watch(self, found: LogsObservation) -> None:
        """Doubt what the kernel tells, if it has not told of what was found."""
        if self.watch is not None and any(one.data for one in found.chunks):
            self.watch.proved = self.watch.changed()

    def run(self) -> LogsObservation | None:
        """Give what is new; None: it was stopped."""
        whole_at = self._clock() + WHOLE_LOOK_SECONDS
        pause = LOOK_SECONDS
        if self.watch is not None:
            self.since = self._clock()
            files = self._tails.open_files(self.target.pipe_directory)
            self._watched = self.watch.begin(files)
            pause = 0.0  # something may have come before they were watched
        while not self._asked.wait(pause):
            if self._loop.is_closed():
                return None
            self.since = self._clock()
            whole = self.since >= whole_at
            if whole or self._tails.may_have_gained(self.target.pipe_directory):
                if whole:
                    whole_at = self.since + WHOLE_LOOK_SECONDS
                part = self._tails.read_daemon(self.target, self._tails.clock(), self._limit)
                if part.chunks or part.states != self.states:
                    return part
            is_told = self._watched and self.watch is not None and self.watch.proved
            pause = WATCHED_LOOK_SECONDS if is_told else LOOK_SECONDS
            self.since = None
        if self._request is None:
            return None
        self.since, self.answered = self._clock(), True
        return self._tails.read_daemon(*self._request)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A look at the logs of one daemon, under way or done."""

    began: float
    task: asyncio.Task[LogsObservation | None]
    user: int | None
    """Who has a limit; None: nobody has."""
    following: _Following | None = None
    """It returns when something is new."""

    @property
    def since(self) -> float:
        """When the look that is under way began; infinite: none is."""
        if self.following is None:
            return self.began
        since = self.following.since
        return math.inf if since is None else since


class LogReaderPool:
    """The logs of many daemons, read by a thread each.

    Args:
        tails: What reads them.
        clock: Monotonic time.
    """

    def __init__(
        self, tails: LogReader | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tails = LogReader() if tails is None else tails
        self._clock = clock
        self._readings: dict[str, _Reading] = {}
        """By pipe directory."""
        self._on_threads: set[str] = set()
        """Those that have a thread."""
        self._free_threads = {
            False: asyncio.Semaphore(MAX_THREADS),
            True: asyncio.Semaphore(MAX_LIMITED_THREADS),
        }
        self._idle: list[WorkerThread] = []
        self._parts: list[tuple[str, LogsObservation]] = []
        """What was read, by pipe directory, and not given yet."""
        self._fresh: set[str] = set()
        """Those that were read for the poll under way."""
        self._watches: dict[str, _Watch] = {}
        """By pipe directory."""
        self._news = asyncio.Event()
        """A look at logs that are followed is done, or a change was told."""
        self._transitions = TransitionLogger(logging.getLogger(__name__))

    async def poll(
        self, targets: Sequence[LogTarget], deadline_seconds: float, *, kept: Collection[str] = ()
    ) -> LogsObservation:
        """Give what the logs of these daemons gained; the files of all others are closed.

        (But of those that are kept, given by their pipe directories, the place is remembered.)

        Nothing is said of daemons whose logs are not read at the deadline, and what they gained
        comes with a later call.

        Raises:
            SourceTimeoutError: Nothing at all can be said.
        """
        at, began = self._tails.clock(), self._clock()
        self._take_finished()
        self._fresh.clear()
        names = {target.pipe_directory for target in targets}
        shares = _shares(targets)
        for _ in range(2):  # what is followed has to be left first
            self._let_go(names, kept)
            for target in targets:
                self._look(target, at, shares.get(target.limited))
            left = min(deadline_seconds, PASS_SECONDS) - (self._clock() - began)
            await self._wait(left)
            self._take_finished()
            if self._fresh >= names and self._tails.daemons() <= {*names, *kept}:
                break
        parts = [part for pipe, part in self._parts if pipe in names]
        self._parts.clear()
        if any(part.at != at for part in parts) or self._clock() - began >= HUNG_SECONDS:
            at, parts = self._tails.clock(), [_with_idle_chunks(part) for part in parts]
        states = {
            (state.pipe_directory, state.log): state for part in parts for state in part.states
        }
        for target in targets:
            states |= self._check(target, read=(target[0], "control") in states)
        if names - self._fresh and not states:
            waited = min(deadline_seconds, PASS_SECONDS)
            raise SourceTimeoutError(f"the logs were not read within {waited:.3g} s")
        chunks = tuple(chunk for part in parts for chunk in part.chunks)
        self._follow(targets, shares, states.values(), chunks)
        return LogsObservation(at=at, chunks=chunks, states=tuple(states.values()))

    async def wait_for_news(self, targets: Sequence[LogTarget], timeout_seconds: float) -> bool:
        """Wait until a poll of these may bring something; False: not in this time, or wake()."""
        if not self._may_have_news(targets):
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._news.wait()
        return self._may_have_news(targets)

    def wake(self) -> None:
        self._news.set()

    def _may_have_news(self, targets: Sequence[LogTarget]) -> bool:
        """Whether something new was read of one of these, or one is not followed."""
        for target in targets:
            reading = self._readings.get(target.pipe_directory)
            if reading is None or reading.following is None or reading.task.done():
                return True
            if reading.following.target != target:
                return True
            if (watch := reading.following.watch) is not None and watch.changed():
                return True
        return False

    def _follow(
        self,
        targets: Sequence[LogTarget],
        shares: Mapping[int | None, int],
        told: Iterable[LogState],
        found: Iterable[LogChunk],
    ) -> None:
        """Go on looking at these, as far as half of the threads go; the others must be asked."""
        busy = {chunk.pipe_directory for chunk in found}
        states: dict[str, list[LogState]] = {}
        for state in told:
            states.setdefault(state.pipe_directory, []).append(state)
        room = Counter({False: MAX_THREADS // 2, True: MAX_LIMITED_THREADS // 2})
        for target in targets:
            pipe, user = target.pipe_directory, target.limited
            limited = user is not None
            room[limited] -= 1
            if pipe in self._readings or room[limited] < 0:
                continue
            following = _Following(
                self._tails,
                target,
                shares.get(user),
                tuple(states.get(pipe, ())),
                self._clock,
                # What an ordinary user writes must not wake the event loop each time.
                None if limited else self._watch(pipe),
                settled=pipe not in busy,
            )
            self._start(pipe, following.run, user=user, following=following)

    def _watch(self, pipe_directory: str) -> _Watch | None:
        watch = self._watches.get(pipe_directory)
        if watch is None and len(self._watches) < MAX_WATCHED:
            watch = self._watches[pipe_directory] = _Watch()
            if watch.descriptor is not None:
                loop = asyncio.get_running_loop()
                loop.add_reader(watch.descriptor, self._note_change, watch)
        return watch

    def _note_change(self, watch: _Watch) -> None:
        watch.changed()
        self._news.set()

    def _unwatch(self, gone: Iterable[str]) -> None:
        for pipe_directory in gone:
            descriptor = self._watches.pop(pipe_directory).descriptor
            if descriptor is not None:
                asyncio.get_running_loop().remove_reader(descriptor)

    def _let_go(self, names: Collection[str], kept: Collection[str]) -> None:
        """Follow only these, and close the files of those that are not kept."""
        for pipe, reading in self._readings.items():
            if reading.following is not None and pipe not in names:
                reading.following.stop()
        self._unwatch(self._watches.keys() - names)
        for gone in self._tails.daemons() - {*names, *kept}:
            self._start(gone, self._tails.forget, [gone])

    def _look(self, target: LogTarget, at: float, limit: int | None) -> None:
        """Read what these logs gained, unless that is being done, or was done in this poll."""
        pipe = target.pipe_directory
        reading = self._readings.get(pipe)
        if reading is not None:
            following = reading.following
            if following is not None and following.target == target and target.limited is not None:
                # It tells by itself: a poll is not to wait for eight threads more of each user.
                self._fresh.add(pipe)
            elif following is not None and following.target == target and following.is_unchanged:
                self._fresh.add(pipe)
                self._parts.append((pipe, LogsObservation(at=at, states=following.states)))
            elif following is not None:
                following.ask(target, at, limit)
            return
        if pipe in self._fresh:
            return
        if limit is not None:
            chunks = (chunk for name, part in self._parts if name == pipe for chunk in part.chunks)
            limit -= max((len(chunk.data) for chunk in chunks), default=0)
            if limit <= 0:
                return
        self._start(pipe, self._tails.read_daemon, target, at, limit, user=target.limited)

    async def close(self) -> None:
        """Close all files that are not being read, and end the threads."""
        with suppress(SourceTimeoutError):
            await self.poll((), 1.0)
        tasks = [one.task for one in self._readings.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for worker in self._idle:
            worker.close()

    def _start(
        self,
        pipe_directory: str,
        function: Callable[..., LogsObservation | None],
        *arguments: Any,
        user: int | None = None,
        following: _Following | None = None,
    ) -> None:
        """Call it on a thread, unless an earlier call for this daemon has not returned."""
        if pipe_directory not in self._readings:
            work = self._on_thread(pipe_directory, user, partial(function, *arguments))
            task = asyncio.create_task(work)
            if following is not None:
                task.add_done_callback(lambda _: self._news.set())
            self._readings[pipe_directory] = _Reading(self._clock(), task, user, following)

    async def _on_thread(
        self,
        pipe_directory: str,
        user: int | None,
        function: Callable[[], LogsObservation | None],
    ) -> LogsObservation | None:
        async with self._free_threads[user is not None]:
            worker = self._idle.pop() if self._idle else WorkerThread("logs")
            self._on_threads.add(pipe_directory)
            try:
                return await worker.call(function, deadline_seconds=math.inf)
            finally:
                self._on_threads.remove(pipe_directory)
                if worker.busy_since is None:  # else this was cancelled
                    self._idle.append(worker)

    async def _wait(self, timeout_seconds: float) -> None:
        now = self._clock()
        readings = self._readings.values()
        # Of a user one of whose logs hangs, another may.
        slow = {one.user for one in readings if one.user and now - one.since >= HUNG_SECONDS}
        tasks = [
            one.task
            for pipe, one in self._readings.items()
            if now - one.since < HUNG_SECONDS and one.user not in slow and pipe not in self._fresh
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=max(timeout_seconds, 0.0))

    def _take_finished(self) -> None:
        """Raises what one of them raised."""
        for pipe_directory, reading in list(self._readings.items()):
            if reading.task.done():
                del self._readings[pipe_directory]
                following = reading.following
                if following is None or following.answered:
                    self._fresh.add(pipe_directory)
                if (part := reading.task.result()) is not None:
                    self._parts.append((pipe_directory, part))
                    if following is not None and not following.answered:
                        following.judge_watch(part)

    def _check(self, target: LogTarget, *, read: bool) -> dict[tuple[str, LogName], LogState]:
        """Give the states of logs whose reading has taken too long; say so once."""
        pipe = target[0]
        reading = self._readings.get(pipe)
        if read:
            self._transitions.recovered(pipe, message="a daemon's logs are read again", daemon=pipe)
        elif reading and self._clock() - reading.since >= UNREADABLE_AFTER_SECONDS:
            message = "reading a daemon's logs does not return"
            self._transitions.failed(pipe, message=message, daemon=pipe, path=target[1])
            why = _HANGS if pipe in self._on_threads else _NO_THREAD
            return {(pipe, state.log): state for state in unread_states(target, why)}
        return {}


def _shares(targets: Sequence[LogTarget]) -> dict[int | None, int]:
    """Give how many bytes of each log of a limited user are read."""
    daemons = Counter(target.limited for target in targets if target.limited is not None)
    share = min(USER_POLL_BYTES, LIMITED_POLL_BYTES // max(1, len(daemons)))
    return {user: max(MIN_POLL_BYTES, share // (2 * count)) for user, count in daemons.items()}


def _with_idle_chunks(part: LogsObservation) -> LogsObservation:
    """Say of each log that gained nothing when that was so.

    (In an observation of a later moment its silence would be taken for that moment's.)
    """
    busy = {(chunk.pipe_directory, chunk.log) for chunk in part.chunks}
    quiet = [
        LogChunk(part.at, state.pipe_directory, state.log, complete_until=part.at)
        for state in part.states
        if state.readable and (state.pipe_directory, state.log) not in busy
    ]
    return LogsObservation(at=part.at, chunks=(*part.chunks, *quiet), states=part.states)
