"""For all tests."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more of the machine than of the code. The same examples each time:
# what fails in one run fails in all. To look for new ones: --hypothesis-profile=search.
_ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", parent=_ANY_PACE, derandomize=True)
settings.register_profile("search", parent=_ANY_PACE, print_blob=True)
settings.load_profile("default")

# Programs that `make tools` installed go before those of the machine, also for a bare pytest.
_TOOLS = Path(__file__).parents[1] / ".tools" / "bin"
os.environ["PATH"] = f"{_TOOLS}{os.pathsep}{os.environ['PATH']}"

# Under nohup(1) SIGHUP is ignored, also by the programs that tests start: those ignore it on
# purpose then, and the tests that send it would wait for ever.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """What was imported stays to the end: it is not worth being looked at by each collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True)
def _the_log_as_it_was() -> Iterator[None]:
    """A test that runs the program's main() configures the log: for itself only."""
    root, ours = logging.getLogger(), logging.getLogger("mps_exporter")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
