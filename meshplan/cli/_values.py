"""Values as people type them: meshes, pins, sizes in bytes, references to workloads."""

from __future__ import annotations

import ast
import importlib
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from meshplan.core import MeshplanError, nearest
from meshplan.hints import Workload

UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class UsageError(MeshplanError, ValueError):
    """Something typed on the command line that cannot be."""


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,model=4` -> {"data": 2, "model": 4}, outermost first."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (p.strip() for p in part.partition("="))
        if not name.isidentifier() or not size.isdigit() or int(size) < 1:
            raise UsageError(f"mesh '{text}': '{part.strip()}' is no axis with its size. Write data=2,model=4.")
        if name in mesh:
            raise UsageError(f"mesh '{text}': axis '{name}' stands twice. Write every axis once.")
        mesh[name] = int(size)
    return mesh


def parse_count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"'{text}' is no number of devices. Write a whole number from 1.")
    return int(text)


def parse_per_device(text: str) -> tuple[str, int]:
    """`batch=4` -> ("batch", 4)."""
    name, _, count = (p.strip() for p in text.partition("="))
    if not name.isidentifier() or not count.isdigit() or int(count) < 1:
        raise UsageError(f"'{text}' is no argument with its number for each device. Write batch=4.")
    return name, int(count)


def check_writable(path: str) -> None:
    """Raises UsageError where no file can be written at `path`: before minutes are spent on what would stand in it."""
    goal = Path(path).resolve()
    if goal.is_dir():
        raise UsageError(f"{path} is a folder. Give the name of a file.")
    if not goal.parent.is_dir():
        raise UsageError(f"{path} cannot be written: the folder {goal.parent} does not exist. Create it first.")
    if not os.access(goal.parent, os.W_OK) or (goal.exists() and not os.access(goal, os.W_OK)):
        raise UsageError(f"{path} cannot be written: no permission. Choose another place.")


def parse_pin(text: str) -> tuple[str, PartitionSpec]:
    """`params/.*/up=None,data+model` -> (pattern, spec): one entry per dim, `+` joins axes of one dim."""
    pattern, equals, spec = text.rpartition("=")
    if not equals or not pattern.strip():
        raise UsageError(
            f"pin '{text}' has no spec. Write PATTERN=SPEC, such as 'batch.tokens=data' or 'params/.*/up=None,model'."
        )
    entries: list[str | tuple[str, ...] | None] = []
    for part in spec.split(",") if spec.strip() else []:
        axes = tuple(a.strip() for a in part.split("+"))
        if axes in (("None",), ("-",), ("",)):
            entries.append(None)
            continue
        for axis in axes:
            if not axis.isidentifier():
                raise UsageError(
                    f"pin '{text}': '{axis}' is no name of an axis. Write one entry per dim: None, data, data+model."
                )
        entries.append(axes[0] if len(axes) == 1 else axes)
    return pattern, PartitionSpec(*entries)


def parse_bytes(text: str) -> float:
    """`60GB` -> 6e10, `16GiB` -> 2**34, `1.5e9`."""
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    try:
        value = float(found[1]) * UNITS[(found[2] or "").lower()] if found else math.nan
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UsageError(f"'{text}' is no size in bytes. Write 60GB, 16GiB or 6e10.")
    return value


def parse_seconds(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"'{text}' is no positive number of seconds. Write 60.")
    return value


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """`models.gpt:workload` and the arguments it is called with."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, settings: Sequence[str] = ()) -> WorkloadRef:
        """From `models.gpt:workload size=small batch=8`, as a plan file has it, and further `key=value` settings."""
        try:
            target, *words = shlex.split(text) or [""]
        except ValueError as error:
            raise UsageError(f"workload '{text}' cannot be read: {error}. Write module:function.") from None
        return cls(target, dict(_setting(w) for w in (*words, *settings)))

    def __str__(self) -> str:
        settings = [f"{k}={v if isinstance(v, str) else repr(v)}" for k, v in self.arguments.items()]
        return shlex.join([self.target, *settings])

    def load(self) -> Workload:
        """Import it and call it. Raises `UsageError` where it is not there or makes no Workload."""
        module_name, colon, name = self.target.partition(":")
        if not colon or not name or not module_name:
            raise UsageError(f"workload '{self.target}' is no module:function. Write models.gpt:workload.")
        found = self._attribute(_module(module_name, self.target), name)
        if isinstance(found, Workload) and not self.arguments:
            return found
        if not callable(found):
            kind = type(found).__name__
            raise UsageError(f"workload '{self.target}' is a {kind}, not a function that makes a Workload.")
        try:
            made = found(**self.arguments)
        except (TypeError, ValueError, KeyError) as error:
            given = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
            raise UsageError(f"{self.target}({given}) failed: {error}") from error
        if not isinstance(made, Workload):
            raise UsageError(f"{self.target} made a {type(made).__name__}, not a meshplan.Workload.")
        return made

    def _attribute(self, module: Any, name: str) -> Any:
        try:
            return getattr(module, name)
        except AttributeError:
            public = [n for n in vars(module) if not n.startswith("_")]
            raise UsageError(f"module '{module.__name__}' has no '{name}'. {nearest(name, public)}") from None


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise UsageError(f"setting '{text}' is no key=value. Write batch=16.")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _module(name: str, target: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:  # a script does not see the folder it is called from; `python -m` does
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise UsageError(
                f"workload '{target}': there is no module '{missing}' here or on the path. Run where it can be "
                "imported."
            ) from error
        raise UsageError(
            f"workload '{target}': importing '{name}' needs module '{missing}', which is not installed."
        ) from error
    except SyntaxError as error:
        raise UsageError(f"workload '{target}': {error.filename}:{error.lineno}: {error.msg}.") from error
