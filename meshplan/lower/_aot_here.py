"""Compiles for the devices of this process."""

from __future__ import annotations

import dataclasses
import pickle
import time
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshplan.core import MeshError, MeshShape
from meshplan.lower._aot import CompiledModule, MemoryUse, OutOfMemory, out_of_memory
from meshplan.lower._aot_child import Shipped, compile_exported, describe
from meshplan.lower._aot_export import ExportedProgram, abstract, export_program


def compile_in_process(program: ExportedProgram, devices: list[Any]) -> CompiledModule | OutOfMemory:
    """An exported program compiled for devices of this process (one each, in the order of the mesh)."""
    shipped = Shipped(*pickle.loads(program.blob))
    compiled = _timed(lambda: compile_exported(shipped, program.donated, devices))
    if isinstance(compiled, OutOfMemory):
        return compiled
    return dataclasses.replace(compiled, text=program.with_argument_names(compiled.text))


def _timed(compile_: Any) -> CompiledModule | OutOfMemory:
    started = time.perf_counter()
    try:
        compiled = compile_()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return out_of_memory(str(error), time.perf_counter() - started)
    found = describe(compiled)
    return CompiledModule(
        text=compiled.as_text(), memory=MemoryUse(**found["memory"]), seconds=time.perf_counter() - started,
        input_shardings=tuple(found["input_shardings"]), output_shardings=tuple(found["output_shardings"]),
    )


def compile_jitted(
    jitted: Any, *args: Any, **kwargs: Any
) -> tuple[CompiledModule | OutOfMemory, MeshShape | None, str]:
    """(compiled, its mesh's shape, its name), for the devices that the function's own shardings name.

    Shardings over an abstract mesh take as many of this process's devices; MeshError where there are too few.
    """
    leaves = jax.tree.leaves(abstract((args, kwargs)))
    meshes = [s.mesh for x in leaves if isinstance(s := getattr(x, "sharding", None), NamedSharding)]
    if any(isinstance(m, jax.sharding.AbstractMesh) for m in meshes):
        backend = jax.default_backend()
        program = export_program(jitted, *args, platform="cuda" if backend == "gpu" else backend, **kwargs)
        present = jax.devices()
        if program.devices > len(present):
            raise MeshError(
                f"{program.name} is sharded over {program.devices} devices, this process has {len(present)} of "
                f"{backend}. Name a target, as in target='tpu-v5e:2x4'; it is compiled for without its hardware."
            )
        return compile_in_process(program, present[: program.devices]), program.mesh_shape, program.name
    lowered = jitted.lower(*abstract(args), **abstract(kwargs))
    kept: list[Any] = []
    compiled = _timed(lambda: kept.append(lowered.compile()) or kept[0])
    if kept and not meshes:
        shardings = jax.tree.leaves((kept[0].input_shardings, kept[0].output_shardings))
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    shape = MeshShape(tuple(meshes[0].shape_tuple)) if meshes else None
    return compiled, shape, getattr(jitted, "__name__", "function")
