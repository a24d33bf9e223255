"""Makes docs/images: ``python -m tests.browser.screenshots``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.browser.recorded import draw, played

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
DESK = (1200, 800)
PHONE = (360, 740)
SHOTS = (
    # file, recording, seconds, screen, dark
    ("status-wait.png", "tour", 40, DESK, False),
    ("status-fault.png", "fault-held", 6, DESK, False),
    ("status-crash.png", "server-killed", 3, DESK, False),
    ("status-ghost.png", "wait-abandoned-sigkill", 10, DESK, False),
    ("status-limits-dark.png", "limits", 8, DESK, True),
    ("status-phone.png", "tour", 40, PHONE, False),
    ("scenario-training-direct.png", "training-10-direct", 10, DESK, False),
    ("scenario-training-mps.png", "training-10-mps", 5, DESK, False),
    ("scenario-streams-mps.png", "streams", 25, DESK, False),
    ("scenario-percentages.png", "percentages", 17, DESK, False),
    ("scenario-data-parallel-direct.png", "data-parallel", 18, DESK, False),
    ("scenario-data-parallel-mps.png", "data-parallel", 27, DESK, False),
    ("scenario-containers.png", "containers", 12, DESK, False),
    ("scenario-three-users.png", "three-users", 2.5, DESK, False),
    ("scenario-starved.png", "starved", 4.5, DESK, False),
    ("scenario-stranded.png", "stranded", 2, DESK, False),
)


async def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for file, recording, seconds, screen, dark in SHOTS:
        await draw(await played(recording, seconds), {IMAGES / file: (*screen, dark)})


if __name__ == "__main__":
    asyncio.run(main())
