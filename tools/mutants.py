"""Break the code in one place at a time, and see whether a test fails: `make mutants`.

    tools/mutants.py                          all of it: hours
    tools/mutants.py --sample 100 --seed 1    some, chosen at random, the same ones each time
    tools/mutants.py mps/waits merge          only these modules

A mutant is a module with one operator, condition, number or statement changed. It is served by an
import hook to the tests of that module, in a process of its own; no file is changed. What was
caught is noted in build/mutants.jsonl and not tried again until its module changes, so a run that
was interrupted goes on where it was. Survivors that behave like the original are listed, with the
reason, in tools/mutants_equivalent.toml; they do not count.

Left as they are: texts, annotations, decorators, what is inside f-strings, `strict=`, and the sizes
of bounds on memory (MAX_...), which are chosen freely: one more, or one less, is the same. Tests
that run the program in a process of its own see the original.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "exporter" / "mps_exporter"
RESULTS = ROOT / "build" / "mutants.jsonl"
EQUIVALENT = ROOT / "tools" / "mutants_equivalent.toml"

LEDGER = (
    "tests/unit/mps/test_ledger_servers.py",
    "tests/unit/mps/test_ledger_waits.py",
    "tests/unit/mps/test_ledger_faults.py",
    "tests/unit/mps/test_ledger_clients.py",
    "tests/unit/mps/test_ledger_contradictions.py",
    "tests/unit/mps/test_fault_evidence.py",
    "tests/unit/core/test_unfinished_work.py",
    "tests/unit/mps/test_timeline.py",
    "tests/unit/mps/test_counters.py",
    "tests/unit/core/test_handover.py",
    "tests/unit/core/test_collector.py",
    "tests/unit/core/test_lost_lines.py",
    "tests/unit/mps/test_log_samples.py",
    "tests/unit/mps/test_ledger_laws.py",
)
LOGS = (
    "tests/unit/sources/test_log_reader.py",
    "tests/unit/sources/test_log_history.py",
    "tests/unit/sources/test_log_time.py",
    "tests/unit/sources/test_log_limits.py",
    "tests/unit/sources/test_container_logs.py",
)
V3 = (
    "tests/unit/mps/test_protocol_v3.py",
    "tests/unit/core/test_named_servers.py",
    "tests/unit/core/test_v3_host.py",
    "tests/unit/core/test_v3_values.py",
    "tests/unit/core/test_v3_variants.py",
)
MERGE = (
    "tests/unit/core/test_merge.py",
    "tests/unit/core/test_named_servers.py",
    "tests/unit/core/test_handover.py",
    "tests/unit/core/test_v3_host.py",
    "tests/unit/core/test_render_whole.py",
    "tests/unit/core/test_collector.py",
)
METRICS = (
    "tests/unit/core/test_render.py",
    "tests/unit/core/test_render_whole.py",
    "tests/unit/core/test_exposition.py",
    "tests/unit/core/test_catalogue.py",
    "tests/unit/core/test_gpu_readings.py",
    "tests/unit/core/test_sparse.py",
    "tests/unit/web/test_negotiation.py",
    "tests/unit/core/test_v3_host.py",
)
TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "mps/cgroups.py",
        ("tests/unit/mps/test_cgroups.py", "tests/unit/sources/test_memory_partitions.py"),
    ),
    ("mps/protocol_v3.py", V3),
    ("merge/named_servers.py", (*V3, "tests/unit/core/test_merge.py")),
    ("metrics/partitions.py", (*V3, "tests/unit/core/test_render_whole.py")),
    ("diagnostics/partitions.py", (*V3, "tests/unit/core/test_doctor.py")),
    ("sources/memory_partitions.py", ("tests/unit/sources/test_memory_partitions.py",)),
    (
        "mps/client_limits.py",
        (
            "tests/unit/mps/test_client_limits.py",
            "tests/unit/mps/test_thread_percentage.py",
            "tests/unit/core/test_merge.py",
        ),
    ),
    (
        "mps/control_protocol.py",
        (
            "tests/unit/mps/test_control_protocol.py",
            "tests/unit/mps/test_protocol_v3.py",
            "tests/unit/sources/test_control_tool.py",
        ),
    ),
    (
        "mps/server_queries.py",
        (
            "tests/unit/mps/test_server_queries.py",
            "tests/unit/mps/test_ledger_contradictions.py",
            "tests/unit/core/test_collector.py",
        ),
    ),
    ("mps/log_parser.py", ("tests/unit/mps/test_log_parser.py", *LEDGER)),
    ("mps/log_merger.py", ("tests/unit/mps/test_log_merger.py", *LEDGER)),
    (
        "mps/withhold_log_lines.py",
        ("tests/unit/mps/test_withhold_log_lines.py", "tests/unit/core/test_recording.py"),
    ),
    ("mps/*.py", LEDGER),
    ("merge*.py", MERGE),
    ("merge/*.py", MERGE),
    ("metrics/*.py", METRICS),
    ("sources/logs/*.py", (*LOGS, "tests/unit/sources/test_log_follower.py")),
    (
        "web/webconfig/*.py",
        ("tests/unit/web/test_webconfig.py", "tests/integration/test_web_config_live.py"),
    ),
)
"""Modules that are mutated, and the tests that must notice; the first pattern that fits counts."""

SKIPPED_TESTS = ("tests/unit/core/test_render.py::test_the_reference_pages_are_up_to_date",)
"""They look at the files, which are never mutated."""

PRELOADED = ("pytest", "hypothesis", "aiohttp.web", "prometheus_client.parser", "trustme", "yaml")
"""Loaded once, before the processes of the mutants are forked."""

MEMORY_BYTES = 4 << 30
"""More than any test needs: a mutant that collects for ever is stopped."""

SLOWER, CPU_GRACE_SECONDS, GRACE_SECONDS = 2.0, 20.0, 300.0
"""A mutant that needs so many times the processor time of the original, or waits as long as no test
does, runs for ever."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    """Its path below the package."""
    place: str
    """The function or class that it is in."""
    line: int
    before: str
    after: str
    source: str
    """The whole module with the change."""
    number: int = 1
    """Which of the same changes of a function it is."""

    @property
    def name(self) -> str:
        """What it is called in files: does not depend on the line that it is in."""
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.module} {self.place}: {self.before} => {self.after}{again}"


# ---------------------------------------------------------------------------------- mutants


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All changes of a module, in its order."""
    content = source.encode()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for place, node, changed in _changes(ast.parse(source), ""):
        before, after = ast.unparse(node), "pass" if changed is None else ast.unparse(changed)
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        text = after if isinstance(node, ast.stmt) else f"({after})"
        mutated = (content[:begin] + text.encode() + content[end:]).decode()
        try:
            compile(mutated, module, "exec", dont_inherit=True)
        except SyntaxError:
            continue  # where the grammar wants a plain name or number
        seen[place, before, after] += 1
        number = seen[place, before, after]
        found.append(Mutant(module, place, node.lineno, before, after, mutated, number))
    return found


Change = tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt | None]
"""Where, what, and what instead; None: nothing."""


def _changes(node: ast.AST, place: str) -> Iterator[Change]:
    if _is_left_alone(node):
        return
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        place = f"{place}.{node.name}" if place else node.name
    if isinstance(node, ast.expr | ast.stmt):
        for changed in _instead_of(node):
            yield place or "module", node, changed
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        # Comparisons and the like are turned by themselves.
        test = node.test
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield place or "module", test, ast.UnaryOp(ast.Not(), test)
    for child in _children(node):
        yield from _changes(child, place)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns", "decorator_list"}:
            children = value if isinstance(value, list) else [value]
            yield from (child for child in children if isinstance(child, ast.AST))


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr():
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.startswith("MAX_")
        case ast.keyword(arg=name):
            return name == "strict"
    return False


_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _is_bound(node: ast.Compare) -> bool:
    """Whether something is compared with the size of a bound on memory."""
    sides = (node.left, *node.comparators)
    return any(isinstance(side, ast.Name) and side.id.startswith("MAX_") for side in sides)


def _instead_of(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt | None]:
    if isinstance(node, ast.stmt):
        yield from _other_statements(node)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield ast.Constant(node.value + 1)
    else:
        yield from _other_expressions(node)


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                if isinstance(operator, _ORDER) and _is_bound(node):
                    continue
                changed = copy.deepcopy(node)
                changed.ops[index] = COMPARISONS[type(operator)]()
                yield changed
        case ast.BoolOp(op=joint, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(joint, ast.And) else ast.And(), values)
            for index in range(len(values)):
                rest = [value for other, value in enumerate(values) if other != index]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(joint, rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operation)](), right)
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse


def _other_statements(node: ast.stmt) -> Iterator[ast.stmt | None]:
    match node:
        case ast.Return(value=ast.Constant(value=None | bool())):
            return  # another mutant turns the bool
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield None
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


# ---------------------------------------------------------------------------------- running them


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from a text that is in no file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.get_filename(fullname), "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._name = ".".join(("mps_exporter", *Path(mutant.module).with_suffix("").parts))
        self._mutant = mutant

    def find_spec(
        self, fullname: str, _path: object, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        path = str(PACKAGE / self._mutant.module)
        loader = _Loader(fullname, path, self._mutant.source)
        return importlib.util.spec_from_file_location(fullname, path, loader=loader)


@dataclass
class Attempt:
    """The tests of one mutant, under way."""

    mutant: Mutant | None
    deadline: float
    output: tempfile._TemporaryFileWrapper[bytes]


def _start(mutant: Mutant | None, tests: Sequence[str], cpu_seconds: float) -> tuple[int, Attempt]:
    """Run tests in a process of their own; None: of the code as it is."""
    output = tempfile.NamedTemporaryFile(prefix="mutant-")  # noqa: SIM115 - closed when it has ended
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid, Attempt(mutant, time.monotonic() + GRACE_SECONDS, output)
    code = 70
    try:
        os.setsid()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        limit = round(cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        import pytest

        skipped = [f"--deselect={test}" for test in SKIPPED_TESTS]
        plugins = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
        plugins += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was preloaded
        code = int(pytest.main(["-x", "-q", "--tb=no", *plugins, *skipped, *tests]))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must not go on twice
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _finish(running: dict[int, Attempt]) -> tuple[Attempt, str, float]:
    """Wait for the next one to end: gives how it ended, and its processor time."""
    while True:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid:
            attempt = running.pop(pid)
            passed = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
            how = "survived" if passed else "endless" if os.WIFSIGNALED(status) else "caught"
            return attempt, how, used.ru_utime + used.ru_stime
        for pid, attempt in running.items():
            if time.monotonic() > attempt.deadline:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)


def _original(test: str) -> float:
    """How much processor time a file of tests needs when nothing is broken."""
    pid, attempt = _start(None, (test,), 3600.0)
    attempt.deadline = float("inf")
    _, how, seconds = _finish({pid: attempt})
    with attempt.output as output:
        if how != "survived":
            output.seek(0)
            print(output.read().decode(errors="replace"))
            sys.exit(f"these tests fail without any mutant: {test}")
    return seconds


# ---------------------------------------------------------------------------------- what is known


def relevant_tests(module: str) -> tuple[str, ...]:
    """The tests that must notice."""
    return next((tests for pattern, tests in TESTS if fnmatch(module, pattern)), ())


def _modules(wanted: Sequence[str]) -> dict[str, str]:
    """Path below the package -> source."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = {path.relative_to(PACKAGE).as_posix(): path for path in paths}
    return {
        name: path.read_text()
        for name, path in names.items()
        if relevant_tests(name)
        and path.name != "__init__.py"
        and (not wanted or any(word in name for word in wanted))
    }


def _equivalents() -> dict[str, str]:
    """Mutant -> why it behaves like the original."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {entry["mutant"]: entry["reason"] for entry in entries}


def _results(digests: dict[str, str]) -> dict[str, str]:
    """Mutant -> how it ended in earlier runs, as far as its module is still the same."""
    if not RESULTS.exists():
        return {}
    lines = map(json.loads, RESULTS.read_text().splitlines())
    return {
        line["mutant"]: line["result"]
        for line in lines
        if digests.get(line["mutant"].partition(" ")[0]) == line["source"]
    }


def _print_survivor(mutant: Mutant) -> None:
    before = (PACKAGE / mutant.module).read_text().splitlines()
    lines = difflib.unified_diff(before, mutant.source.splitlines(), n=1, lineterm="")
    print(f"\nexporter/mps_exporter/{mutant.module}:{mutant.line}: survived")
    print(f"  {mutant.name}")
    for line in list(lines)[3:]:
        print(f"    {line}")


def _try(left: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str]]:
    """Run the tests of each mutant; gives how each ended, in the order in which they do."""
    for name in PRELOADED:
        importlib.import_module(name)
    files = {test for mutant in left for test in relevant_tests(mutant.module)}
    seconds = {test: _original(test) for test in sorted(files)}
    waiting = left[::-1]
    running: dict[int, Attempt] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            tests = relevant_tests(mutant.module)
            limit = sum(map(seconds.__getitem__, tests)) * SLOWER + CPU_GRACE_SECONDS
            pid, attempt = _start(mutant, tests, limit)
            running[pid] = attempt
        attempt, how, _ = _finish(running)
        attempt.output.close()
        if attempt.mutant is not None:
            yield attempt.mutant, how


def _print_score(found: dict[str, str]) -> None:
    tried = Counter(name.partition(" ")[0] for name in found)
    survived = Counter(name.partition(" ")[0] for name, how in found.items() if how == "survived")
    print()
    for module, count in sorted(tried.items()):
        print(f"{module:40} {count - survived[module]:5} of {count:5} caught")
    caught = len(found) - survived.total()
    score = 100.0 * caught / len(found) if found else 100.0
    print(f"{'together':40} {caught:5} of {len(found):5} caught: {score:.1f} %")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break the code, and see whether a test fails.")
    parser.add_argument("module", nargs="*", help="only modules with this in their path")
    parser.add_argument("--sample", type=int, help="only so many, chosen at random")
    parser.add_argument("--seed", type=int, default=1, help="of the choice")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    return parser.parse_args()


def main() -> None:
    """Do what the command line says."""
    options = _arguments()
    os.chdir(ROOT)
    RESULTS.parent.mkdir(exist_ok=True)
    if options.fresh:
        RESULTS.unlink(missing_ok=True)
    sources = _modules(options.module)
    digests = {
        name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sources.items()
    }
    everything = [one for name, text in sources.items() for one in mutants_of(name, text)]
    chosen = everything
    if options.sample is not None and options.sample < len(everything):
        chosen = random.Random(options.seed).sample(everything, options.sample)
    equivalents = _equivalents()
    names = {one.name for one in everything}
    for name in equivalents:
        if name.partition(" ")[0] in sources and name not in names:
            print(f"{EQUIVALENT.name}: there is no such mutant any more: {name}")
    known = _results(digests)
    counted = [one for one in chosen if one.name not in equivalents]
    # A survivor is tried again: there may be a test for it by now.
    left = [one for one in counted if known.get(one.name, "survived") == "survived"]
    print(
        f"{len(chosen)} of {len(everything)} mutants: {len(chosen) - len(counted)} equivalent,"
        f" {len(counted) - len(left)} caught before, {len(left)} to try",
        flush=True,
    )
    found = {one.name: "caught" for one in counted}
    with RESULTS.open("a") as results:
        for mutant, how in _try(left, options.jobs):
            found[mutant.name] = how
            line = {"mutant": mutant.name, "source": digests[mutant.module], "result": how}
            results.write(json.dumps(line) + "\n")
            results.flush()
            if how == "survived":
                _print_survivor(mutant)
                sys.stdout.flush()
    _print_score(found)


if __name__ == "__main__":
    main()
