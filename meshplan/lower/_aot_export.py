"""Hands a jitted function over to another process: exported StableHLO, shardings, donation.

`jax.export` keeps shardings over abstract meshes (so the mesh may have more devices than
this process), source locations and the order of arguments. It does not keep donation, which is
read from the trace, nor pytrees of arguments, which are flattened here.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from typing import Any

import jax

from meshplan.core import ArgumentError, CompileError, MeshShape
from meshplan.core._jax_aot import argument_names, exported_shardings, flat_exported


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedProgram:
    """A program for any set of `devices` devices of one platform.

    `blob` holds it; `donated` are the indices of flat arguments whose buffers results may take;
    `mesh_shape` is None for a program of one device. `arguments` are the names of the flat arguments.
    """

    blob: bytes
    platform: str
    devices: int
    donated: tuple[int, ...]
    mesh_shape: MeshShape | None
    name: str
    arguments: tuple[str, ...] = ()

    def with_argument_names(self, text: str) -> str:
        """A compiled module's text with the function's own names for its arguments, lost on the way."""
        def own(found: re.Match[str]) -> str:
            index = int(found.group(1))
            name = self.arguments[index] if index < len(self.arguments) else f"args[{index}]"
            return 'op_name="' + name.replace("'", "\\'") + '"'

        return re.sub(r'op_name="args\[(\d+)\]"', own, text)


def export_program(jitted: Any, *args: Any, platform: str, **kwargs: Any) -> ExportedProgram:
    """`jitted` as it would be lowered for `platform` ("cpu", "cuda", "tpu") with these arguments.

    Arguments are arrays, ShapeDtypeStructs (shardings over abstract meshes are fine) or scalars. Raises
    ArgumentError for a function that is not jitted, CompileError for one that cannot be exported
    (ordered effects, host callbacks).
    """
    check_jitted(jitted)
    args, kwargs = abstract(args), abstract(kwargs)
    traced = jitted.trace(*args, **kwargs)
    flags = [bool(i.donated) for i in jax.tree.leaves(traced.args_info)]
    exported = _export(jitted, platform, args, kwargs)
    if len(flags) != len(exported.in_avals):
        raise CompileError(
            f"{exported.fun_name} was traced with {len(flags)} arguments and exported with {len(exported.in_avals)}."
        )
    ins, outs = exported_shardings(exported)
    mesh = next((s.mesh for s in (*ins, *outs) if s is not None), None) or _mesh_in_module(exported)
    return ExportedProgram(
        blob=pickle.dumps((flat_exported(exported), mesh, ins, outs)), platform=platform, devices=exported.nr_devices,
        donated=tuple(i for i, donated in enumerate(flags) if donated),
        mesh_shape=MeshShape(tuple(mesh.shape_tuple)) if mesh is not None else None, name=exported.fun_name,
        arguments=argument_names(traced),
    )


def check_jitted(jitted: Any) -> None:
    """Raises ArgumentError for a function that is not the result of `jax.jit`."""
    if not hasattr(jitted, "trace") or not hasattr(jitted, "lower"):
        name = getattr(jitted, "__name__", type(jitted).__name__)
        raise ArgumentError(f"'{name}' is not a jitted function. Wrap it: jax.jit({name}, in_shardings=...).")


def abstract(tree: Any) -> Any:
    """Arrays as ShapeDtypeStructs, with their shardings where they are committed to one; the rest as it is."""
    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        sharding = x.sharding if getattr(x, "committed", True) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.aval.weak_type)

    return jax.tree.map(leaf, tree)


def _export(jitted: Any, platform: str, args: Any, kwargs: Any) -> Any:
    """Exported with every custom call allowed: the module is compiled now, by the same version."""
    from jax import export

    allowed: set[str] = set()
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in sorted(allowed)]
        try:
            return export.export(jitted, platforms=[platform], disabled_checks=checks)(*args, **kwargs)
        except ValueError as error:
            found = re.findall(r'custom_call @([\w$.]+)|call_target_name = "([^"]+)"', str(error))
            names = {a or b for a, b in found} - allowed
            if "custom calls" not in str(error) or not names:
                raise
            allowed |= names
        except NotImplementedError as error:
            raise CompileError(
                f"the function cannot be handed to another process ({error}). "
                "Remove host callbacks and ordered effects, or audit it on this process's devices (target=None)."
            ) from error


def _mesh_in_module(exported: Any) -> Any:
    """The mesh of a program whose arguments have no shardings but whose body has, else None."""
    if exported.nr_devices == 1:
        return None
    found = re.search(r"sdy\.mesh @mesh = <\[([^\]]*)\]", exported.mlir_module())
    axes = re.findall(r'"([^"]+)"=(\d+)', found.group(1)) if found else [("devices", str(exported.nr_devices))]
    names, sizes = tuple(n for n, _ in axes), tuple(int(s) for _, s in axes)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=auto)
