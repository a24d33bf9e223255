"""A YAML file read strictly: no key twice, none unknown, every value of its type."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import yaml

from .errors import WebConfigError

_TAG = "tag:yaml.org,2002:"


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
        for name, _ in self._node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise WebConfigError(
                    "a key must be a plain word", key=self.key, line=name.start_mark.line + 1
                )
            if name.value in seen:
                raise WebConfigError(
                    "is there twice", key=self._below(name.value), line=name.start_mark.line + 1
                )
            seen.add(name.value)
        self._loader.flatten_mapping(self._node)
        merged = {name.value: node for name, node in self._node.value}
        for name, node in merged.items():
            yield name, Value(node, self._below(name), self._loader)

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
        return int(self._loader.construct_yaml_int(self._node))


def read(content: bytes) -> Value:
    """The whole file.

    Raises:
        WebConfigError: It is no YAML.
    """
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
