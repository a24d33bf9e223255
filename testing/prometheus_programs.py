"""Real programs, and our files made fit for them: rules at another pace."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import yaml

from testing.rule_files import ROOT, RULE_FILES

TREE = ROOT.parent


def program(name: str) -> Path:
    """A program of .tools/bin, of this Python's environment or of PATH.

    A test without it proves nothing, and fails.
    """
    ours = (TREE / ".tools" / "bin", Path(sys.executable).parent)
    places = os.pathsep.join((*map(str, ours), os.environ.get("PATH", "")))
    found = shutil.which(name, path=places)
    assert found, f"{name} is neither on PATH nor in .tools/bin: run `make tools`"
    return Path(found)


UNITS = {"s": 1, "m": 60, "h": 3600}
_RANGE = re.compile(r"\[(\d+)([smh])\]")
_OFFSET = re.compile(r"\boffset (\d+)([smh])\b")
_MINUTES = re.compile(r"(?<![\w.])(\d+) \* 60(?![\w.])")


def _milliseconds(number: str, unit: str, factor: float) -> str:
    return f"{max(1, round(int(number) * UNITS[unit] * 1000 / factor))}ms"


def faster(expr: str, factor: float) -> str:
    """The same expression with its ranges, offsets and times in minutes (`5 * 60`) cut down."""
    expr = _RANGE.sub(lambda found: f"[{_milliseconds(found[1], found[2], factor)}]", expr)
    expr = _OFFSET.sub(lambda found: f"offset {_milliseconds(found[1], found[2], factor)}", expr)
    return _MINUTES.sub(lambda found: f"{int(found[1]) * 60 / factor:g}", expr)


def write_faster_rules(folder: Path, factor: float) -> None:
    """All our rule files with every duration divided by the factor, and nothing else changed."""
    for file in RULE_FILES:
        content = yaml.safe_load(file.read_text())
        for group in content["groups"]:
            if "interval" in group:
                group["interval"] = _milliseconds(
                    group["interval"][:-1], group["interval"][-1], factor
                )
            for rule in group["rules"]:
                rule["expr"] = faster(rule["expr"], factor)
                for name in ("for", "keep_firing_for"):
                    if name in rule:
                        rule[name] = _milliseconds(rule[name][:-1], rule[name][-1], factor)
                for name, text in rule.get("annotations", {}).items():
                    rule["annotations"][name] = faster(text, factor)
        (folder / file.name).write_text(yaml.safe_dump(content, width=10_000))


DEBIAN_TEMPLATES = Path("/usr/share/prometheus/alertmanager")


def alertmanager() -> list[str]:
    """The command that starts Alertmanager.

    Debian's looks for its standard templates in one fixed place. Where its package lies unpacked
    in .tools instead of being installed, it gets to see that place in a mount namespace of its own.
    """
    found = program("alertmanager").resolve()
    share = found.parents[1] / "share"
    if DEBIAN_TEMPLATES.exists() or not (share / "prometheus" / "alertmanager").exists():
        return [str(found)]
    script = 'mount --bind "$0" /usr/share && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(share), str(found)]
