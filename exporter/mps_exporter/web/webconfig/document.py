"""The content of a web configuration file -> :class:`WebConfig`, with PyYAML and cattrs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any, NamedTuple

import cattrs
import yaml
from cattrs.gen import make_dict_structure_fn

from .config import HTTPConfig, RateLimit, TLSConfig, WebConfig, WebConfigError, check

MAX_BYTES = 1 << 17
"""Maximum size of the file: PyYAML reads about 100 kB a second."""
MAX_DEPTH = 8
"""Maximum nesting; the keys need 3 levels."""
MAX_INTEGER = 2**63 - 1

_TAG = "tag:yaml.org,2002:"
_NO_KEY = frozenset({f"{_TAG}null", f"{_TAG}binary"})
_DIRECTIVE = re.compile(rb"^(?:\xef\xbb\xbf)?%", re.MULTILINE)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}


_UNFINISHED = object()


class Scalar(NamedTuple):
    """A scalar of the file: its type in YAML, as written, and as PyYAML reads it."""

    kind: str
    text: str
    value: object = None


class _Loader(yaml.SafeLoader):
    """Reads mappings, lists, None and :class:`Scalar`."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._depth = 0
        self._known: dict[yaml.Node, object] = {}
        """The nodes that were read: aliases share one."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError("nested too deeply")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def plain(self, node: yaml.Node) -> object:
        """Return a node as Python objects."""
        if node not in self._known:
            self._known[node] = _UNFINISHED
            self._known[node] = self._convert(node)
        if self._known[node] is _UNFINISHED:
            raise yaml.YAMLError("an alias stands within its anchor")
        return self._known[node]

    def _convert(self, node: yaml.Node) -> object:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(one) for one in node.value]
        if node.tag == f"{_TAG}null":
            return None
        implicit = self.resolve(  # type: ignore[no-untyped-call]
            yaml.ScalarNode, node.value, (True, False)
        )
        if node.tag not in (implicit, f"{_TAG}str"):
            raise yaml.YAMLError("a value has a tag that cannot be used here")
        kind = node.tag.removeprefix(_TAG)
        known = kind in ("bool", "int")
        return Scalar(kind, node.value, self.construct_object(node) if known else None)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in node.value:
            if name.tag == f"{_TAG}merge":
                raise yaml.YAMLError("merge keys (<<) are not supported: write the keys out")
            if not isinstance(name, yaml.ScalarNode) or name.tag in _NO_KEY:
                raise yaml.YAMLError("a key must be a plain word")
            if name.value in found:
                raise yaml.YAMLError(f"the key {name.value} is there twice")
            found[name.value] = self.plain(value)
        return found


def _to_string(value: object, _: type) -> str:
    """Return a string; numbers and truth values are taken as written, null as empty."""
    if value is None:
        return ""
    if not isinstance(value, Scalar):
        raise WebConfigError("must be a string")
    return value.text


def _to_strings(value: object, _: type) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise WebConfigError("must be a list")
    return tuple(_to_string(one, str) for one in value)


def _mapping(value: object, _: type) -> dict[str, str]:
    if not isinstance(value, dict):
        raise WebConfigError("must be a mapping of keys to values")
    return {name: _to_string(one, str) for name, one in value.items()}


def _to_flag(value: object, _: type) -> bool:
    if not isinstance(value, Scalar) or value.kind != "bool":
        raise WebConfigError("must be true or false")
    return bool(value.value)


def _to_integer(value: object, _: type) -> int:
    # YAML 1.1 has numbers to the base of 60, Go has none.
    if isinstance(value, Scalar) and value.kind == "int" and ":" not in value.text:
        number = int(str(value.value))
        if abs(number) <= MAX_INTEGER:
            return number
    raise WebConfigError("must be a whole number below 2^63, to the base of ten")


def _to_seconds(value: object, _: type) -> float:
    """Return Go's durations, "1s", "1m30s", "1.5h", in seconds."""
    text = _to_string(value, str)
    parts = _DURATION_PART.findall(text)
    if text == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise WebConfigError('must be a duration with its unit, such as "1s" or "500ms", or 0')
    nanoseconds = sum(Decimal(number) * _NANOSECONDS[unit] for number, unit in parts)
    if nanoseconds > MAX_INTEGER:
        raise WebConfigError("is longer than 292 years")
    return float(nanoseconds) / 1e9


def _web_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(str, _to_string)
    converter.register_structure_hook(bool, _to_flag)
    converter.register_structure_hook(int, _to_integer)
    converter.register_structure_hook(float, _to_seconds)
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _to_strings)
    converter.register_structure_hook_func(lambda kind: kind == Mapping[str, str], _mapping)

    def section(kind: type[Any]) -> Callable[[Any, Any], Any]:
        structure: Callable[[Any, Any], Any] = make_dict_structure_fn(
            kind, converter, _cattrs_forbid_extra_keys=True
        )
        known = {one.name for one in fields(kind)}

        def hook(value: object, of: type) -> Any:
            if not isinstance(value, dict):
                raise WebConfigError("must be a mapping of keys to values")
            given = {k: v for k, v in value.items() if v is not None or k not in known}
            return structure(given, of)

        return hook

    for kind in (TLSConfig, HTTPConfig, RateLimit, WebConfig):
        converter.register_structure_hook(kind, section(kind))
    return converter


def _reason_of(error: BaseException, _: type | None) -> str:
    if isinstance(error, cattrs.errors.ForbiddenExtraKeysError):
        return f"unknown key {', '.join(sorted(error.extra_fields))}"
    return str(error)


def parse_web_config(content: bytes) -> WebConfig:
    """Return the configuration.

    Raises:
        WebConfigError: The file cannot be used.
    """
    if len(content) > MAX_BYTES:
        raise WebConfigError(f"is larger than {MAX_BYTES} bytes")
    if _DIRECTIVE.search(content):
        # Go programs take %YAML 1.1 only, PyYAML takes any.
        raise WebConfigError("no valid YAML here: directives (%) are not supported")
    try:
        loader = _Loader(content)
        node = loader.get_single_node()
        value = loader.plain(node) if node is not None else None
        config = _web_converter().structure({} if value is None else value, WebConfig)
    except yaml.MarkedYAMLError as error:
        raise WebConfigError(f"no valid YAML: {error.problem or error.context}") from error
    except cattrs.BaseValidationError as error:
        message = cattrs.transform_error(error, format_exception=_reason_of)[0]
        reason, _, key = message.rpartition(" @ $")
        raise WebConfigError(reason, key=key.removeprefix(".")) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter of "\UFFFFFFFF"
        raise WebConfigError(f"no valid YAML: {' '.join(str(error).split())}") from error
    check(config)
    return config
