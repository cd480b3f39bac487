"""What `import meshplan` brings along, and what the project file promises."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# jax's own parts: it loads some of them only when a name in them is first used.
JAX_AND_NUMPY = {"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum"}
LIST_MODULES = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def top_level_modules(statement: str) -> set[str]:
    """Names of the top-level modules loaded after `statement`, in a process of its own."""
    command = [sys.executable, "-c", f"{statement}\n{LIST_MODULES}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def third_party(modules: set[str]) -> set[str]:
    hidden = ("_cython_", "_sysconfigdata_", "__")
    return {name for name in modules - set(sys.stdlib_module_names) if not name.startswith(hidden)} - {"cython_runtime"}


def test_import_pulls_in_jax_and_numpy_alone() -> None:
    before = top_level_modules("import jax, numpy")
    after = top_level_modules("import meshplan")
    assert third_party(after) - third_party(before) - JAX_AND_NUMPY == {"meshplan"}


def test_import_starts_no_backend() -> None:
    code = "import meshplan\nfrom jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    assert "meshplan" in top_level_modules(code)


def test_import_loads_no_room() -> None:
    code = "import sys, meshplan\nassert [m for m in sys.modules if m.startswith('meshplan.')] == []"
    assert "meshplan" in top_level_modules(code)


def test_plan_stays_the_function_when_its_room_is_imported() -> None:
    code = "import meshplan.plan\nfrom meshplan import plan\nassert callable(plan) and meshplan.plan is plan"
    assert "meshplan" in top_level_modules(code)


def test_every_public_name_is_documented() -> None:
    import meshplan

    names = [name for name in dir(meshplan) if not name.startswith("_")]
    assert set(meshplan.__all__) <= set(names)
    assert [name for name in names if not (getattr(meshplan, name).__doc__ or "").strip()] == []


def test_type_checkers_see_the_names_that_are_loaded_at_first_use() -> None:
    import meshplan

    tree = ast.parse((ROOT / "meshplan" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    written = {alias.name: node.module for node in imports for alias in node.names if node.module != "typing"}
    rooms = dict.fromkeys(meshplan._ROOMS, "meshplan")
    assert written == {name: f"meshplan.{room}" for name, room in meshplan._ROOM.items()} | rooms


def test_an_unknown_name_is_an_attribute_error() -> None:
    import meshplan

    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        getattr(meshplan, "plam")  # noqa: B009


def test_version_is_the_projects() -> None:
    try:
        installed = importlib.metadata.version("meshplan")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("meshplan runs from its folder here and is not installed")
    assert installed == PROJECT["project"]["version"]


def test_gpu_compiler_is_of_jaxlibs_version() -> None:
    try:
        compiler = importlib.metadata.version("jax-cuda12-pjrt")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs jax-cuda12-pjrt: pip install 'meshplan[cuda-aot]'")
    assert compiler == importlib.metadata.version("jaxlib")


def test_gpu_compiler_is_pinned_together_with_jax() -> None:
    pins: dict[str, set[str]] = {}
    for line in PROJECT["project"]["optional-dependencies"]["cuda-aot"]:
        requirement, marker = (part.strip() for part in line.split(";"))
        name, version = requirement.split("==")
        pins.setdefault(marker.split(" and ")[0], set()).add(version)
        assert name in {"jax", "jaxlib", "jax-cuda12-pjrt"}
    assert len(pins) == 2
    assert all(len(versions) == 1 for versions in pins.values()), pins
