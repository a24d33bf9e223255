"""Withholds names (users, programs, folders, containers) and serial numbers from recordings."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from mps_exporter.mps.log_parser import SERVER_ADDED_LINE
from mps_exporter.mps.protocol_v3 import READ_ONLY_V3, anonymised
from mps_exporter.observations import (
    CgroupMemory,
    ControlObservation,
    Exchange,
    GpuObservation,
    LogChunk,
    Observation,
    ProcessFacts,
    ProcfsObservation,
)

if TYPE_CHECKING:
    from cattrs.preconf.json import JsonConverter

_WITHHELD = "(withheld)"

_KEPT_NAME = re.compile(
    r"|\d+|name_[0-9a-f]+|default|proc|root|self|fd|tmp|var|run|dev|mnt|opt|usr|bin|etc|lib|sys|log|logs"
    r"|mps|pipe|nvidia|nvidia[.-]mps|nvidia-cuda-mps-(?:control|server)(?:\.pid)?|nvidia\.com|gpu"
    r"|(?:control|server)(?:\.log|_lock|_privileged)?|kmsg|cuda\.shm\.[\d.]+"
)
"""Parts of paths that every host has, or that MPS or this program chose; others may be names:
homes may be anywhere."""
# Only the middle parts of a path in a text may contain spaces; a path in a log ends its line.
_PATH_IN_TEXT = re.compile(r"(?<![^\s=:\"'(])/(?:[^/\n:;,\"')]*/)*[^\s/:;,\"')]*")
_PATH_IN_LOG = re.compile(r"(?<![^\s=:\"'(])/.*")

_KNOWN_VARIABLES = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_CLIENT_PRIORITY",
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
        "CUDA_MPS_LOG_DIRECTORY",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_PROTOCOL_VERSION",
        "CUDA_MPS_SM_PARTITION",
        "CUDA_VISIBLE_DEVICES",
    }
)


class Anonymiser:
    """Replaces names and UUIDs; a name of one kind always by the same replacement.

    Most replacements are hashes with a secret key: users choose names, so a table would grow.
    """

    _UUID = re.compile(
        r"\b(GPU|MIG)-([0-9a-f]{8}(?:-[0-9a-f]{4}){0,3}(?:-[0-9a-f]{12})?)\b", re.IGNORECASE
    )

    def __init__(self, converter: JsonConverter) -> None:
        from cattrs.gen import make_dict_unstructure_fn, override

        self._key = secrets.token_bytes()
        self._converter = converter
        self._converter.register_unstructure_hook(str, self._text)
        changes: dict[type, Callable[[Any], Any]] = {  # parts before what contains the parts
            CgroupMemory: lambda memory: memory,
            ProcessFacts: self._process,
            ProcfsObservation: lambda observation: replace(observation, containers=()),
            Exchange: self._exchange,
            ControlObservation: self._control,
            LogChunk: self._chunk,
            GpuObservation: lambda gpu: replace(gpu, serial=None),
        }
        kept = {CgroupMemory: ("path",), ProcessFacts: ("cgroup", "frozen_group")}

        def changed(kind: type, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
            fields: Any = {name: override(unstruct_hook=str) for name in kept.get(kind, ())}
            unstructure: Callable[[Any], Any] = make_dict_unstructure_fn(
                kind, self._converter, _cattrs_omit_if_default=True, **fields
            )
            return lambda one: unstructure(change(one))

        for kind, change in changes.items():
            self._converter.register_unstructure_hook(kind, changed(kind, change))

    def unstructure(self, observation: Observation) -> Any:
        """Return the observation as JSON types, without names and serial numbers."""
        return self._converter.unstructure(observation)

    def _process(self, facts: ProcessFacts) -> ProcessFacts:
        tracer, _, debugger = facts.tracer.partition(" ")
        environment = facts.mps_environment
        return replace(
            facts,
            name=self._rename("program", facts.name),
            user=facts.user if facts.user in (None, "root") else f"user-{facts.uid}",
            tracer=f"{tracer} ({self._rename('program', debugger[1:-1])})" if debugger else tracer,
            mps_environment=environment
            and {
                name: self._path(value) if name.endswith("_DIRECTORY") else value
                for name, value in environment.items()
                if name in _KNOWN_VARIABLES
            },
        )

    def _control(self, observation: ControlObservation) -> ControlObservation:
        named = any(map(_has_names, observation.exchanges))
        return replace(observation, error=_WITHHELD) if named and observation.error else observation

    def _exchange(self, one: Exchange) -> Exchange:
        """Replace names that users chose in a v3 reply; withhold its errors."""
        if not _has_names(one):
            return one
        return replace(
            one,
            stdout=anonymised(one.commands[0], one.stdout, self._rename),
            stderr=one.stderr and _WITHHELD,
            error=one.error and _WITHHELD,
        )

    def _chunk(self, chunk: LogChunk) -> LogChunk:
        data = SERVER_ADDED_LINE.sub(
            lambda found: found[1] + self._rename("server", found[2].decode()).encode() + found[3],
            chunk.data,
        )
        text = data.decode("utf-8", "surrogateescape")
        text = _PATH_IN_LOG.sub(lambda path: self._path(path[0]), text)
        return replace(
            chunk,
            data=text.encode("utf-8", "surrogateescape"),
            server_name=self._rename("server", chunk.server_name),
        )

    def _rename(self, kind: str, name: str) -> str:
        if kind == "path":
            return self._path(name)
        if kind == "program":
            if not name or name.startswith("nvidia-cuda-mps"):
                return name
            return f"program-{self._hash(name)}"
        if _KEPT_NAME.fullmatch(name):
            return name
        return f"name_{self._hash(name)}"

    def _hash(self, name: str) -> str:
        return blake2b(
            name.encode("utf-8", "surrogatepass"), digest_size=4, key=self._key
        ).hexdigest()

    def _path(self, path: str) -> str:
        return "/".join(self._rename("part", part) for part in path.split("/"))

    def _text(self, text: str) -> str:
        """Replace the parts of a path, or of the paths in a text."""
        if text.startswith("/"):
            return self._path(text)
        return _PATH_IN_TEXT.sub(lambda path: self._path(path[0]), text)

    def text(self, line: str) -> str:
        """Replace each UUID in a line, also a UUID that the tool cut off."""
        return self._UUID.sub(self._uuid, line)

    def _uuid(self, match: re.Match[str]) -> str:
        kind, digits = match.groups()
        number = self._hash(digits[:8].lower())
        whole = f"{number}-0000-4000-8000-{number:0>12}"
        return f"{kind}-{whole[: len(digits)]}"


def _has_names(exchange: Exchange) -> bool:
    return len(exchange.commands) == 1 and exchange.commands[0] in READ_ONLY_V3
