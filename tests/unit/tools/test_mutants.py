"""What `make mutants` changes in a module, and what it leaves alone."""

from __future__ import annotations

from tools.mutants import PACKAGE, mutants_of, relevant_tests

SOURCE = '''"""Text with a 1 in it."""
MAX_USERS = 64
"""A bound."""


@lru_cache(maxsize=8)
def place(self, found: list[int], *, last: bool) -> str:
    if last and found[0] <= 1:
        self.ends = f"{found[0] + 1}"
        found.clear()
    if len(found) >= MAX_USERS:
        last = None
    return "é" if not found else ""
'''


def test_each_mutant_is_one_change() -> None:
    found = mutants_of("a.py", SOURCE)
    assert {(one.before, one.after) for one in found} == {
        ("last and found[0] <= 1", "last or found[0] <= 1"),
        ("last and found[0] <= 1", "last"),
        ("last and found[0] <= 1", "found[0] <= 1"),
        ("found[0] <= 1", "found[0] < 1"),
        ("0", "1"),
        ("1", "2"),
        ("self.ends = f'{found[0] + 1}'", "pass"),
        ("found.clear()", "pass"),
        ("return 'é' if not found else ''", "return None"),
        ("'é' if not found else ''", "'é'"),
        ("'é' if not found else ''", "''"),
        ("not found", "found"),
    }
    (one,) = [one for one in found if one.before == "not found"]
    assert one.source == SOURCE.replace("not found", "(found)")
    assert (one.line, one.name) == (13, "a.py place: not found => found")


def test_the_same_change_twice_in_a_function_has_two_names() -> None:
    found = mutants_of("a.py", "def place():\n    return (1, 1)\n")
    assert [one.name for one in found if one.before == "1"] == [
        "a.py place: 1 => 2",
        "a.py place: 1 => 2 #2",
    ]


def test_the_tests_of_a_module_are_there() -> None:
    tests = {
        test
        for module in PACKAGE.rglob("*.py")
        for test in relevant_tests(module.relative_to(PACKAGE).as_posix())
    }
    assert tests
    assert [test for test in tests if not (PACKAGE.parents[1] / test).is_file()] == []
