"""What Prometheus' exporter-toolkit says of each web configuration file, as a table for a test.

    python -m tools.exporter_toolkit

Needs Go. Writes tests/unit/web/toolkit_verdicts.json.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from testing.web_configurations import configurations, filled_in, write_certificates

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "tests" / "unit" / "web" / "toolkit_verdicts.json"


def main() -> None:
    """Ask the toolkit and write the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_certificates(folder)
        texts = configurations()
        paths = {key: str(folder / f"{number}.yml") for number, key in enumerate(texts)}
        for key, text in texts.items():
            filled = filled_in(text, folder)
            Path(paths[key]).write_text(filled, "utf-8", "surrogateescape", newline="")
        done = subprocess.run(
            ["go", "run", ".", *paths.values()],  # noqa: S607 - whichever Go there is
            cwd=HERE,
            capture_output=True,
            check=True,
        )
        answer = json.loads(done.stdout)
    verdicts = {
        key: {"text": texts[key], "error": answer["errors"][path].replace(name, "@FOLDER@")}
        for key, path in paths.items()
    }
    table = {"toolkit": answer["toolkit"], "go": answer["go"], "verdicts": verdicts}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    starts = sum(not verdict["error"] for verdict in verdicts.values())
    print(f"{len(verdicts)} configurations: {starts} start, {len(verdicts) - starts} are refused")


if __name__ == "__main__":
    main()
