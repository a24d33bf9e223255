"""What annotations ask for: labels of the alert, and queries of their own with their labels."""

import re
from functools import cache

from testing.promql import Schema
from testing.rule_files import records

LABEL = re.compile(r"\$labels\.(\w+)")
_QUERY = re.compile(r'query\s+\(printf\s+"((?:[^"\\]|\\.)*)"((?:\s+\$labels\.\w+)*)\s*\)')
RESULT_LABEL = re.compile(r"(?<!\$)\.Labels\.(\w+)")


def queries(template: str) -> list[tuple[str, list[str]]]:
    """(PromQL with a value for each %q, the labels that give the values)."""
    found = []
    for text, arguments in _QUERY.findall(template):
        expr = text.replace('\\"', '"')
        labels = LABEL.findall(arguments)
        assert expr.count("%q") == len(labels), f"{expr}: {labels}"
        found.append((expr.replace("%q", '"value"'), labels))
    assert len(found) == template.count("query "), "a query that this test cannot read"
    return found


@cache
def schema() -> Schema:
    """Return the metrics of the exporter and those that rules record."""
    return Schema({rule.record: rule.expr for rule in records()})
