"""Private jax names: in meshplan/core/_jax*.py alone, and each of them there in the installed jax."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = sorted((ROOT / "meshplan" / "core").glob("_jax*.py"))
IMPORT_FAILURES = {"ImportError", "ModuleNotFoundError", "AttributeError"}


def branches_on_version(node: ast.AST) -> bool:
    """Whether only one side of this statement need hold for the installed jax."""
    if isinstance(node, ast.If | ast.IfExp):
        test = ast.unparse(node.test).lower()
        return "version" in test or "hasattr" in test
    if isinstance(node, ast.Try):
        caught = [inner for handler in node.handlers if handler.type for inner in ast.walk(handler.type)]
        return any(isinstance(inner, ast.Name) and inner.id in IMPORT_FAILURES for inner in caught)
    return False


def unconditional(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that hold for every version of jax."""
    if not branches_on_version(node):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from unconditional(child)


def private_names(source: str) -> list[str]:
    """Dotted names under `jax._src` that this source imports or reads, outside branches on the version."""
    nodes = list(unconditional(ast.parse(source)))
    bound: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    read = {full_name(node, bound) for node in nodes if isinstance(node, ast.Attribute)}
    return sorted(name for name in {*bound.values(), *read} if name.startswith("jax._src."))


def full_name(node: ast.AST, bound: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = full_name(node.value, bound)
        return f"{base}.{node.attr}" if base else ""
    return ""


def find(name: str) -> object:
    """The object of this dotted name; ImportError or AttributeError where it does not exist."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


LISTED = [(path.name, name) for path in ALLOWED for name in private_names(path.read_text())]


def test_names_are_found_however_they_are_reached() -> None:
    source = """
import jax
import jax._src.mesh as mesh
from jax._src import core as _core
from jax._src.config import config
from jax.sharding import Mesh
if jax.__version_info__ >= (0, 11):
    from jax._src import only_new
else:
    from jax._src import only_old
try:
    from jax._src import perhaps
except ImportError:
    perhaps = None
def f(x):
    return _core.Jaxpr, mesh.thing, jax._src.util.safe_zip, x.name, Mesh.devices
"""
    assert private_names(source) == [
        *("jax._src.config.config", "jax._src.core", "jax._src.core.Jaxpr", "jax._src.mesh", "jax._src.mesh.thing"),
        *("jax._src.util", "jax._src.util.safe_zip"),
    ]


def test_a_name_that_is_gone_is_noticed() -> None:
    with pytest.raises(AttributeError):
        find("jax._src.core.NoSuchThing")


def test_private_names_have_one_home() -> None:
    files = [path for folder in ("meshplan", "models", "demo") for path in (ROOT / folder).rglob("*.py")]
    assert files
    users = [path for path in files if "jax._src" in path.read_text()]
    assert [path.relative_to(ROOT).as_posix() for path in users if path not in ALLOWED] == []


def test_the_home_exists_and_imports() -> None:
    assert ROOT / "meshplan" / "core" / "_jax.py" in ALLOWED
    modules = [importlib.import_module(f"meshplan.core.{path.stem}") for path in ALLOWED]
    assert [module.__name__ for module in modules] == [f"meshplan.core.{path.stem}" for path in ALLOWED]


@pytest.mark.parametrize(("file", "name"), LISTED)
def test_private_name_exists(file: str, name: str) -> None:
    assert find(name) is not None, f"{file} uses {name}, which this jax does not have"
