"""For all tests."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# Programs that `make tools` installed go before those of the machine, also for a bare pytest.
_TOOLS = Path(__file__).parents[1] / ".tools" / "bin"
os.environ["PATH"] = f"{_TOOLS}{os.pathsep}{os.environ['PATH']}"
