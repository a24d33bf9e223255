"""Readings that fail, that are late, or that nothing understands, in some worlds."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import count
from random import Random
from typing import Any

from mps_exporter.sources import SourceError, SourceTimeoutError
from mps_exporter.sources.child_process import ProcessResult
from mps_exporter.sources.nvml.pynvml_api import Code

MAX_ROUNDS = 12  # 6 s of the polls of logs.
OFTEN, SOMETIMES = 0.1, 0.02  # Shares of the readings, and of the smaller parts of a reading.
RUNS = (
    ProcessResult(None),
    ProcessResult(0, b"\xff\xfe ? \n100.0\n"),
    ProcessResult(0, b"1 2 3", output_exceeded=True),
    ProcessResult(1, stderr=b"Cannot access CUDA_MPS_PIPE_DIRECTORY=/tmp/mps\n"),
    ProcessResult(1, stderr=b"Cannot authenticate or connect to MPS control daemon process\n"),
    ProcessResult(127, stderr=b"error while loading shared libraries\n"),
)
LINES = (
    b"\xff\xfe\x00\n",
    b"[2026-11-18 08:00:00.000 Control 7] The daemon has learnt something\n",
    b"[2026-11-18 08:00:00.000 Other 7] " + b"x" * 9000 + b"\n",
    b"NEW CLIENT 7 from user\n\n",
)
CODES = (Code.NO_PERMISSION, Code.TIMEOUT, Code.GPU_IS_LOST, Code.UNKNOWN, Code.NOT_SUPPORTED)


class Obstacles:
    """The obstacles that one reader meets; each depends on its number only."""

    def __init__(self, seed: int, reader: str, *, there: bool) -> None:
        self._reader, self.there, self._numbers = f"{seed}/{reader}", there, count()

    def random(self, share: float) -> Random | None:
        """Return a generator for the next obstacle; None: there is none this time."""
        random = Random(f"{self._reader}/{next(self._numbers)}") if self.there else None
        return random if random is not None and random.random() < share else None

    def fail(self, source: str) -> None:
        if (random := self.random(OFTEN)) is not None:
            raise random.choice((SourceTimeoutError(), SourceError(f"{source} cannot be read")))

    def run(self) -> ProcessResult | None:
        """Return the result of a run of the control tool that failed."""
        if (random := self.random(OFTEN)) is None:
            return None
        if random.random() < OFTEN:
            raise random.choice((FileNotFoundError, PermissionError))("nvidia-cuda-mps-control")
        return random.choice(RUNS)


class AtOnce:
    """The interface sources/blocking.BlockingCalls, without threads; obstacles hang."""

    def __init__(self, obstacles: Obstacles | None = None) -> None:
        self._obstacles = obstacles or Obstacles(0, "", there=False)
        self._results, self.errors = dict[Hashable, Any](), dict[Hashable, OSError]()
        self._rounds = Counter[Hashable]()  # Key -> rounds for which its call hangs.
        self.old = frozenset[Hashable]()

    def start(self, calls: Mapping[Hashable, tuple[object, Callable[[], Any]]]) -> None:
        self._results, self.errors = {}, {}
        for key, (_, function) in calls.items():
            if (random := self._obstacles.random(SOMETIMES)) is not None:
                self._rounds[key] = random.randint(0, MAX_ROUNDS)
                if not self._rounds[key]:
                    self.errors[key] = PermissionError(13, "Permission denied")
                    continue
            if self._rounds[key] > 0:
                self._rounds[key] -= 1
                continue
            try:
                self._results[key] = function()
            except OSError as error:
                self.errors[key] = error

    def wait(self, seconds: float, users_seconds: float = 0.0) -> None:
        """Nothing is under way."""

    async def wait_async(self, seconds: float, users_seconds: float) -> None:
        """Nothing is under way."""

    def results(self, keys: Iterable[Hashable]) -> dict[Hashable, Any]:
        return {key: self._results[key] for key in keys if key in self._results}
