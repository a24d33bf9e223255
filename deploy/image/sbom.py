"""Prints what the image consists of, as CycloneDX 1.6 (JSON): Python and Debian packages.

The licence of each Python package is in its metadata; one that is unknown ends the program, and
with it the build.

It runs in the image itself, with the exporter's own interpreter, so it lists what is installed and
not what was meant to be installed. `sbom.py FOLDER` lists the Python packages in a folder only, as
the Debian and RPM packages have one, and `sbom.py --licences FOLDER` prints their licences.
"""

# ruff: noqa: INP001 - a script of the image, no part of the package
from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = Path("/var/lib/dpkg/status")
LICENCES = {
    "Apache-2.0",
    "Apache 2.0",
    "Apache 2",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "MIT",
    "PSF-2.0",
}
"""Licences that permit what the image and the packages do, as their authors write them."""

LICENCE_FILE = re.compile(r"LICEN[CS]E|COPYING|NOTICE|AUTHORS", re.IGNORECASE)


def licence_of(distribution: metadata.Distribution) -> dict[str, Any]:
    """Return the licence of a package, by an SPDX expression or by another name.

    Raises:
        SystemExit: It has none, or another than those in LICENCES.
    """
    found = distribution.metadata.json
    classified = [str(one).rpartition(" :: ") for one in found.get("classifier", [])]
    of_class = [name for group, _, name in classified if group.startswith("License")]
    expression = str(found.get("license_expression", ""))
    name = expression or str(found.get("license", "")) or ", ".join(of_class)
    if not {one.removesuffix(" License") for one in re.split(r" AND | OR ", name)} <= LICENCES:
        package = f"{distribution.metadata['Name']} {distribution.version}"
        raise SystemExit(f"the licence of {package} is unknown: {name!r}")
    return {"expression": expression} if expression else {"license": {"name": name}}


def component(kind: str, purl: str, name: str, version: str) -> dict[str, Any]:
    """Return an entry of the bill."""
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def python_packages(path: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the distributions in these folders."""
    for distribution in metadata.distributions(path=path):
        name, version = distribution.metadata["Name"], distribution.version
        purl = f"pkg:pypi/{name.lower()}@{version}"
        kind = "application" if name == "mps-exporter" else "library"
        yield component(kind, purl, name, version) | {"licenses": [licence_of(distribution)]}


def licences(folder: Path) -> str:
    """Return the licence of each Python package in the folder, with all texts that it ships."""
    texts = []
    for path in sorted(folder.glob("*.dist-info")):
        one = metadata.Distribution.at(path)
        ((_, licence),) = licence_of(one).items()
        name = licence["name"] if isinstance(licence, dict) else licence
        texts.append(f"{'=' * 70}\n{one.metadata['Name']} {one.version}: {name}\n")
        files = (file for file in sorted(path.rglob("*")) if LICENCE_FILE.match(file.name))
        texts += [file.read_text("utf-8").strip("\n") + "\n" for file in files if file.is_file()]
    return "\n".join(texts)


def debian_packages(status: str, distribution: str) -> Iterator[dict[str, Any]]:
    """Yield the installed packages of dpkg's status file."""
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in paragraph.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name, version = fields["Package"], fields["Version"]
        purl = (
            f"pkg:deb/debian/{name}@{version.replace('+', '%2B')}"
            f"?arch={fields['Architecture']}&distro={distribution}"
        )
        yield component("library", purl, name, version)


def bill(components: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the document: the exporter, with all else as its components."""
    components = sorted(components, key=lambda one: one["purl"])
    product = next((one for one in components if one["name"] == "mps-exporter"), None)
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [one for one in components if one is not product],
    }
    return document if product is None else document | {"metadata": {"component": product}}


def main() -> None:
    """Print it."""
    if sys.argv[1:2] == ["--licences"]:
        sys.stdout.write(licences(Path(sys.argv[2])))
        return
    if len(sys.argv) > 1:
        _print(list(python_packages(sys.argv[1:])))
        return
    python = platform.python_version()
    own = component("platform", f"pkg:generic/python@{python}", "python", python)
    components = [*python_packages(sys.path), own]
    if PACKAGES.exists():
        system = platform.freedesktop_os_release()
        distribution = "-".join(system[key] for key in ("ID", "VERSION_ID") if key in system)
        components += debian_packages(PACKAGES.read_text("utf-8"), distribution)
    _print(components)


def _print(components: list[dict[str, Any]]) -> None:
    json.dump(bill(components), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
