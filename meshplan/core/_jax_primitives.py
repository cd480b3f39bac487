"""Every primitive that the installed jax registers, found by walking its modules and lowering tables."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings

import jax
from jax._src import core as _core
from jax._src.interpreters import mlir as _mlir

# not part of what a program can be made of: tests, command line tools, other frameworks
_SKIPPED = ("jax.tools", "jax.collect_profile", "jax.experimental.jax2tf", "jax._src.test_", "jax._src.internal_test")
# primitives that these alone define occur in the bodies of kernels only
KERNEL_MODULES = ("jax._src.pallas.", "jax.experimental.mosaic.", "jax._src.thunky.")


def import_all() -> tuple[str, ...]:
    """Import every module of jax; the names of those that do not import here (a library that is not installed)."""
    failed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=failed.append):
            if not module.name.startswith(_SKIPPED):
                try:
                    importlib.import_module(module.name)
                except (ImportError, AttributeError):
                    failed.append(module.name)
    return tuple(sorted({name for name in failed if not name.startswith(_SKIPPED)}))


def registered_primitives() -> dict[str, str]:
    """Name of every primitive -> the module of jax that defines it, by name.

    Primitives are the objects that a module of jax holds or a lowering table lists; where one name stands for several
    (a kernel's `load`, say) the module that comes first by name is given.
    """
    import_all()
    found: dict[str, set[str]] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name == "jax" or module_name.startswith("jax."):
            for value in list(vars(module).values()):
                if isinstance(value, _core.Primitive):
                    found.setdefault(value.name, set()).add(module_name)
    for table in (_mlir._lowerings, *_mlir._platform_specific_lowerings.values()):
        for primitive in table:
            found.setdefault(primitive.name, set())
    return {name: _home(places) for name, places in sorted(found.items())}


def _home(places: set[str]) -> str:
    """The most telling of the modules that hold a primitive: the deepest private one, kernels' modules last."""
    private = [place for place in places if place.startswith("jax._src.")]
    general = [place for place in private if not place.startswith(KERNEL_MODULES)]
    return max(general or private or places, key=lambda place: (place.count("."), place), default="")


def alive_primitives() -> set[str]:
    """Names of all primitives that exist in this process, wherever they are held: what the walk is tested against."""
    import gc

    return {found.name for found in gc.get_objects() if isinstance(found, _core.Primitive)}


def primitive_named(name: str) -> _core.Primitive | None:
    """The primitive object of that name which a module of jax holds; None where there is none."""
    import_all()
    held = (
        value for module_name, module in sorted(sys.modules.items()) if module_name.startswith("jax")
        for value in list(vars(module).values()) if isinstance(value, _core.Primitive) and value.name == name
    )
    return next(held, None)
