"""``mps-exporter demo``: serves a recording instead of this host."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from mps_exporter.commands.serve import serve
from mps_exporter.config import Settings

BUILT_IN_RECORDING = "demo.rec.gz"


async def demo(settings: Settings, *, recording: str | None, speed: float) -> int:
    """Serve the metrics of a recording (None: the built-in one) until told to stop."""
    path = recording or str(built_in_recording())
    return await serve(replace(settings, replay=path, replay_speed=speed), demo=True)


def built_in_recording() -> Path:
    """The recording that comes with the program."""
    return Path(str(resources.files("mps_exporter") / "recordings" / BUILT_IN_RECORDING))
