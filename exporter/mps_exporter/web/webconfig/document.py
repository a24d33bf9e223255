"""A YAML file read strictly: no key twice, none unknown, every value of its type."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import yaml

from .config import WebConfigError

_TAG = "tag:yaml.org,2002:"
_DIRECTIVE = re.compile(rb"^(?:\xef\xbb\xbf)?%", re.MULTILINE)
_NO_KEY = frozenset({f"{_TAG}null", f"{_TAG}binary"})
_MAX_INTEGER = 2**63 - 1


class Value:
    """A node of the file with the way to it, so that an error can say where it is."""

    def __init__(self, node: yaml.Node | None, key: str, loader: yaml.SafeLoader) -> None:
        self._node = node
        self._loader = loader
        self.key = key

    @property
    def line(self) -> int | None:
        """Line in the file, from 1."""
        return None if self._node is None else self._node.start_mark.line + 1

    @property
    def is_null(self) -> bool:
        """Nothing is there, or nothing is written after the colon."""
        return self._node is None or self._node.tag == f"{_TAG}null"

    def error(self, reason: str) -> WebConfigError:
        """An error about this value."""
        return WebConfigError(reason, key=self.key, line=self.line)

    def members(self) -> Iterator[tuple[str, Value]]:
        """The entries of a mapping.

        Raises:
            WebConfigError: It is no mapping, or has a key twice.
        """
        if self.is_null:
            return
        if not isinstance(self._node, yaml.MappingNode):
            raise self.error("must be a mapping of keys to values")
        seen: set[str] = set()
        for name, node in self._node.value:
            line = name.start_mark.line + 1
            if name.tag == f"{_TAG}merge":
                reason = "merge keys (<<) are not supported: write the keys out"
                raise WebConfigError(reason, key=self.key, line=line)
            if not isinstance(name, yaml.ScalarNode) or name.tag in _NO_KEY:
                raise WebConfigError("a key must be a plain word", key=self.key, line=line)
            if name.value in seen:
                raise WebConfigError("is there twice", key=self._below(name.value), line=line)
            seen.add(name.value)
            yield name.value, Value(node, self._below(name.value), self._loader)

    def _below(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key else name

    def fields(self, known: Collection[str]) -> dict[str, Value]:
        """The entries of a mapping with known keys; those that are not there are null.

        Raises:
            WebConfigError: A key is unknown.
        """
        found = {name: Value(None, self._below(name), self._loader) for name in known}
        for name, value in self.members():
            if name not in found:
                raise value.error(f"unknown key; known here: {', '.join(known)}")
            found[name] = value
        return found

    def items(self) -> list[Value]:
        """The entries of a list.

        Raises:
            WebConfigError: It is no list.
        """
        if self.is_null:
            return []
        if not isinstance(self._node, yaml.SequenceNode):
            raise self.error("must be a list")
        return [
            Value(node, f"{self.key}[{index}]", self._loader)
            for index, node in enumerate(self._node.value)
        ]

    def text(self, default: str = "") -> str:
        """A string; a number or a truth value is taken as it is written.

        Raises:
            WebConfigError: It is a list or a mapping.
        """
        if self.is_null:
            return default
        if not isinstance(self._node, yaml.ScalarNode):
            raise self.error("must be a string")
        implicit = self._loader.resolve(  # type: ignore[no-untyped-call]
            yaml.ScalarNode, self._node.value, (True, False)
        )
        if self._node.tag not in (implicit, f"{_TAG}str"):
            raise self.error("has a tag that cannot be used here")
        return str(self._node.value)

    def flag(self, *, default: bool) -> bool:
        """A truth value.

        Raises:
            WebConfigError: It is something else.
        """
        if self.is_null:
            return default
        if not isinstance(self._node, yaml.ScalarNode) or self._node.tag != f"{_TAG}bool":
            raise self.error("must be true or false")
        return bool(self._loader.construct_yaml_bool(self._node))

    def integer(self, default: int = 0) -> int:
        """A whole number.

        Raises:
            WebConfigError: It is something else.
        """
        if self.is_null:
            return default
        if not isinstance(self._node, yaml.ScalarNode) or self._node.tag != f"{_TAG}int":
            raise self.error("must be a whole number")
        # YAML 1.1 has numbers to the base of 60, and Go has none.
        number = (
            int(self._loader.construct_yaml_int(self._node))
            if ":" not in self._node.value
            else None
        )
        if number is None or abs(number) > _MAX_INTEGER:
            raise self.error("must be a whole number below 2^63, to the base of ten")
        return number


def read_document(content: bytes) -> Value:
    """The whole file.

    Raises:
        WebConfigError: It is no YAML.
    """
    if _DIRECTIVE.search(content):
        # Go programs take %YAML 1.1 only, PyYAML takes any.
        raise WebConfigError("no valid YAML here: directives (%) are not supported")
    try:
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise WebConfigError(
            f"no valid YAML: {error.problem or error.context}",
            line=mark.line + 1 if mark is not None else None,
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of "\U00110000"
        raise WebConfigError(f"no valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise WebConfigError("no valid YAML: nested too deeply") from None
    return Value(node, "", loader)
