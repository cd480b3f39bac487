"""meshplan: plan how a JAX step is sharded over a machine, with reasons, before running it."""

import importlib as _importlib
import sys as _sys
import types as _types
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from meshplan import embedding as embedding
    from meshplan import pipeline as pipeline
    from meshplan._api import Comparison as Comparison
    from meshplan._api import Forecast as Forecast
    from meshplan._api import Plan as Plan
    from meshplan._api import audit as audit
    from meshplan._api import compare as compare
    from meshplan._api import forecast as forecast
    from meshplan._api import load as load
    from meshplan._api import plan as plan
    from meshplan._api import shard as shard
    from meshplan._options import Options as Options
    from meshplan.core import ArgumentError as ArgumentError
    from meshplan.core import Collective as Collective
    from meshplan.core import CompileError as CompileError
    from meshplan.core import MachineError as MachineError
    from meshplan.core import MemoryLimitError as MemoryLimitError
    from meshplan.core import MeshError as MeshError
    from meshplan.core import MeshplanError as MeshplanError
    from meshplan.core import PinError as PinError
    from meshplan.core import PlanFileError as PlanFileError
    from meshplan.core import SpecError as SpecError
    from meshplan.core import TraceError as TraceError
    from meshplan.hints import Workload as Workload
    from meshplan.hints import annotated as annotated
    from meshplan.hints import arrays as arrays
    from meshplan.hints import dims as dims
    from meshplan.hints import params as params
    from meshplan.lower import Audit as Audit
    from meshplan.lower import Verification as Verification
    from meshplan.machine import Machine as Machine
    from meshplan.rules import OpRule as OpRule
    from meshplan.rules import OpView as OpView

# The room of every public name. Rooms are imported when a name of theirs is first used: all of them
# together take longer to import than a shell script that only wants `Machine` should wait.
_PUBLIC = {
    "_api": "Comparison Forecast Plan audit compare forecast load plan shard",
    "_options": "Options",
    "core": "ArgumentError Collective CompileError MachineError MemoryLimitError MeshError MeshplanError PinError "
    "PlanFileError SpecError TraceError",
    "hints": "Workload annotated arrays dims params",
    "lower": "Audit Verification",
    "machine": "Machine",
    "rules": "OpRule OpView",
}
_ROOM = {name: room for room, names in _PUBLIC.items() for name in names.split()}
_ROOMS = ("embedding", "pipeline")  # used by their own names: mp.embedding.plan(...)
__all__ = sorted((*_ROOM, *_ROOMS))  # pyright: ignore[reportUnsupportedDunderAll]


class _Package(_types.ModuleType):
    """This module, with public names that load their room when used."""

    def __getattr__(self, name: str) -> object:
        if name in _ROOMS:
            return _importlib.import_module(f"meshplan.{name}")
        if name not in _ROOM:
            raise AttributeError(f"module 'meshplan' has no attribute {name!r}")
        found = getattr(_importlib.import_module(f"meshplan.{_ROOM[name]}"), name)
        self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # Importing the room meshplan.plan would put it in the place of the function meshplan.plan.
        if not (name in _ROOM and isinstance(value, _types.ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ROOM, *_ROOMS})


_sys.modules[__name__].__class__ = _Package
