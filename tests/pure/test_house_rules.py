"""The house rules that a machine can check, each with a bad example that it must catch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "meshplan"
TEST_ROOMS = {"pure", "cpu8", "tpu", "gpu", "multiprocess", "benchmarks"}
CODE_FOLDERS = ("meshplan", "models", "demo", "tests")
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
    *("add", "discard", "update", "setdefault", "popitem", "difference_update", "intersection_update"),
    *("appendleft", "extendleft", "popleft"),
}
CONTAINERS = {"list", "dict", "set", "defaultdict", "OrderedDict", "Counter", "deque"}
Check = Callable[[ast.Module], list[str]]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def dotted(node: ast.AST) -> str:
    """`os.environ` for the node of that attribute; empty where it is no plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


# ------------------------------------------------------------------------------ checks: tree -> faults


def environment_reads(tree: ast.Module) -> list[str]:
    """Every use of the environment but a copy of the whole, which a child process is started with."""
    copies = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            copies |= {id(value) for key, value in zip(node.keys, node.values, strict=True) if key is None}
        if isinstance(node, ast.Call) and dotted(node.func) == "dict":
            copies |= {id(argument) for argument in node.args}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
            copies.add(id(node.func.value))
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.environb"} and id(node) not in copies:
            faults.append(f"line {node.lineno}: os.environ")
        if isinstance(node, ast.Attribute) and dotted(node) in {"os.getenv", "os.putenv", "os.getenvb"}:
            faults.append(f"line {node.lineno}: {dotted(node)}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            taken = {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}
            faults += [f"line {node.lineno}: from os import {name}" for name in sorted(taken)]
    return faults


def global_statements(tree: ast.Module) -> list[str]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    return [f"line {node.lineno}: global {', '.join(node.names)}" for node in found]


def mutated_globals(tree: ast.Module) -> list[str]:
    """Containers of the module that one of its functions changes: state that outlives the call."""
    shared = {name for statement in tree.body for name in container_names(statement)}
    faults = []
    for function in functions(tree):
        nodes = list(ast.walk(function))
        local = {node.arg for node in nodes if isinstance(node, ast.arg)}
        local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        changed = [(name, line) for name, line in changed_names(function) if name in shared - local]
        faults += [f"line {line}: {function.name} changes {name}" for name, line in changed]
    return sorted(set(faults))


def container_names(statement: ast.stmt) -> list[str]:
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    value = statement.value
    made = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp) or (
        isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in CONTAINERS
    )
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if made and isinstance(target, ast.Name)]


def changed_names(function: ast.AST) -> Iterator[tuple[str, int]]:
    """Plain names whose object is changed in place, with the line."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield dotted(node.value), node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield dotted(node.func.value), node.lineno


def undocumented(tree: ast.Module) -> list[str]:
    return [] if ast.get_docstring(tree) or not tree.body else ["no module docstring"]


def idle_tests(tree: ast.Module) -> list[str]:
    """Test functions with neither an assertion nor a helper that makes one."""
    asserting = asserting_functions(tree)
    tests = [function for function in functions(tree) if function.name.startswith("test")]
    return [f"line {test.lineno}: {test.name}" for test in tests if test.name not in asserting]


def asserting_functions(tree: ast.Module) -> set[str]:
    """Names of the functions in this file that assert, themselves or through each other or through tests/ helpers."""
    asserting = {name for node in tree.body if isinstance(node, ast.ImportFrom) for name in asserting_imports(node)}
    while True:
        grown = asserting | {function.name for function in functions(tree) if asserts(function, asserting)}
        if grown == asserting:
            return asserting
        asserting = grown


def asserting_imports(node: ast.ImportFrom) -> set[str]:
    """Helpers taken from another file under tests/ that assert."""
    path = ROOT / ((node.module or "").replace(".", "/") + ".py")
    if not (node.module or "").startswith("tests.") or not path.is_file():
        return set()
    found = asserting_functions(ast.parse(path.read_text()))
    return {alias.asname or alias.name for alias in node.names if alias.name in found}


def asserts(function: ast.AST, helpers: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Name | ast.Attribute) and dotted(node).split(".")[-1].startswith("assert_"):
            return True  # called, or handed to a map
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in helpers or name in {"pytest.raises", "pytest.warns", "pytest.fail"}:
                return True
            if name.split(".")[-1].startswith("check"):
                return True
    return False


# ------------------------------------------------------------------------------------- the checks work

BAD: list[tuple[Check, str]] = [
    (environment_reads, "import os\nx = os.environ['A']"),
    (environment_reads, "import os\nx = os.environ.get('A')"),
    (environment_reads, "import os\nx = os.getenv('A')"),
    (environment_reads, "from os import environ"),
    (environment_reads, "import os\nos.environ['A'] = '1'"),
    (global_statements, "def f():\n    global x\n    x = 1"),
    (mutated_globals, "x = {}\ndef f(a):\n    x[a] = 1"),
    (mutated_globals, "x: list[int] = []\ndef f(a):\n    x.append(a)"),
    (mutated_globals, "import collections\nx = collections.defaultdict(list)\ndef f(a):\n    x.pop(a)"),
    (undocumented, "x = 1"),
    (idle_tests, "def test_a():\n    f()"),
    (idle_tests, "def test_a():\n    assert True"),
]
GOOD: list[tuple[Check, str]] = [
    (environment_reads, "import os\nx = {**os.environ, 'A': '1'}\ny = os.environ.copy()\nz = dict(os.environ)"),
    (global_statements, "def f():\n    x = 1\n    def g():\n        nonlocal x"),
    (mutated_globals, "x = {}\nx['a'] = 1\ndef f():\n    return x['a']"),
    (mutated_globals, "x = {}\ndef f(x):\n    x['a'] = 1"),
    (undocumented, '"""What it is for."""\nx = 1'),
    (idle_tests, "def test_a():\n    tree.map(np.testing.assert_array_equal, f(), g())"),
    (idle_tests, "def helper():\n    assert f()\ndef test_a():\n    helper()"),
    (idle_tests, "import pytest\ndef test_a():\n    with pytest.raises(ValueError):\n        f()"),
]


@pytest.mark.parametrize(("check", "source"), BAD)
def test_check_finds_a_bad_example(check: Check, source: str) -> None:
    assert len(check(ast.parse(source))) == 1


@pytest.mark.parametrize(("check", "source"), GOOD)
def test_check_passes_a_good_example(check: Check, source: str) -> None:
    assert check(ast.parse(source)) == []


# ---------------------------------------------------------------------------------- the house, checked


def faults_in(check: Check, files: list[Path]) -> list[str]:
    assert files, "no files found to check"
    return [f"{relative(path)}: {fault}" for path in files for fault in check(ast.parse(path.read_text()))]


def test_no_file_is_too_long() -> None:
    limits = {"tests": 600}
    sizes = {relative(path): len(path.read_text().splitlines()) for path in python_files(*CODE_FOLDERS)}
    assert {name: size for name, size in sizes.items() if size > limits.get(name.split("/")[0], 500)} == {}


def test_package_reads_no_environment_variables() -> None:
    assert faults_in(environment_reads, python_files("meshplan")) == []


def test_nothing_uses_a_global_statement() -> None:
    assert faults_in(global_statements, python_files(*CODE_FOLDERS)) == []


def test_package_changes_no_global_container() -> None:
    assert faults_in(mutated_globals, python_files("meshplan")) == []


def test_every_module_says_what_it_is_for() -> None:
    assert faults_in(undocumented, python_files("meshplan", "models", "demo")) == []


def test_every_test_asserts_something() -> None:
    assert faults_in(idle_tests, sorted((ROOT / "tests").rglob("test_*.py"))) == []


def test_every_test_lies_in_a_known_room() -> None:
    found = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert found <= TEST_ROOMS
