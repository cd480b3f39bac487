"""`value_and_grad`: a drop-in for jax's that runs a loss as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshplan.core import ArgumentError
from meshplan.pipeline._check import check
from meshplan.pipeline._runtime import STAGE, Program, gradient
from meshplan.pipeline._runtime_pack import make_packing
from meshplan.pipeline._runtime_packets import make_packets
from meshplan.pipeline._runtime_ticks import lay_out
from meshplan.pipeline._schedule import ASYNCHRONOUS, schedule
from meshplan.pipeline._slots import Schedule
from meshplan.pipeline._stages_cut import find_layers, stage_bounds
from meshplan.pipeline._stages_parts import make_parts
from meshplan.pipeline._stages_units import trace_units


def value_and_grad(
    loss: Callable[..., Any], *, mesh: Mesh, micro_batches: int, schedule: str | Schedule = "1f1b", chunks: int = 1,
    bounds: Sequence[int] | None = None, has_aux: bool = False, data: Sequence[str] = ("data",), specs: Any = None,
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`f(params, batch) -> (loss, gradients)` as `jax.value_and_grad(loss)`, run as a pipeline over axis "stage".

    `loss(params, batch)` is an ordinary function that gives the mean over the batch (`has_aux`: and a pytree with it,
    of which real leaves come back as their mean over micro-batches, others as their sum). It is cut into
    mesh.shape["stage"] x `chunks` parts at the layer boundaries `bounds`, or most evenly; part q runs on stage
    q modulo the stages. The first dim of every leaf of the batch is split over the axes `data` that the mesh has, and
    what a device gets into `micro_batches`; leaves without a dim are given to all. `schedule`: a name, or a table that
    `check` accepts. `specs`: a pytree prefix of PartitionSpecs of the parameters over the other axes (tensor
    parallelism; the compiler does the rest). Every part is rematerialised: its backward starts from what crossed into
    it. Raises ArgumentError and TraceError, before anything is compiled, for a mesh without the axis, an asynchronous
    schedule, a batch that does not divide, fewer layers than parts, or a loss that is none.
    """
    table = _table(schedule, mesh, micro_batches, chunks)
    axes = tuple(axis for axis in data if axis in mesh.shape)

    def planned(params: Any, batch: Any) -> Program:
        return make_program(loss, params, batch, mesh, table, axes, bounds, has_aux, specs)

    @jax.jit
    def run(params: Any, batch: Any) -> tuple[Any, Any]:
        program = planned(params, batch)
        packed = program.packing.pack(params)
        results, gradients = gradient(program, packed, jax.tree.leaves(batch))
        grads = program.packing.unpack(gradients)
        if not has_aux:
            return results[0], grads
        return (results[0], jax.tree.unflatten(program.parts.traced.aux_tree, results[1:])), grads

    return run


def _table(name: str | Schedule, mesh: Mesh, micro_batches: int, chunks: int) -> Schedule:
    if STAGE not in mesh.shape:
        raise ArgumentError(
            f"the mesh has the axes {dict(mesh.shape)} and none called '{STAGE}'; give it one of as many devices as "
            "the pipeline has stages."
        )
    stages = mesh.shape[STAGE]
    table = name if isinstance(name, Schedule) else schedule(name, stages, micro_batches, chunks=chunks)
    if (table.stages, table.micro_batches, table.chunks) != (stages, micro_batches, chunks):
        raise ArgumentError(
            f"schedule '{table.name}' is of {table.stages} stages, {table.micro_batches} micro-batches and "
            f"{table.chunks} chunks, and {stages}, {micro_batches} and {chunks} were asked for; give the same."
        )
    if table.name in ASYNCHRONOUS or table.mini_batches > 1:
        raise ArgumentError(
            f"schedule '{table.name}' updates weights while micro-batches are under way and has no one gradient; "
            "take a synchronous schedule here."
        )
    check(table)
    return table


def make_program(
    loss: Callable[..., Any], params: Any, batch: Any, mesh: Mesh, table: Schedule, data: tuple[str, ...],
    bounds: Sequence[int] | None, has_aux: bool, specs: Any,
) -> Program:
    """The loss cut and laid out, by the shapes of the parameters and of the whole batch."""
    replicas = int(np.prod([mesh.shape[axis] for axis in data], dtype=int))
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    split = tuple(np.ndim(leaf) > 0 for _, leaf in leaves)
    small = [
        _one_micro_batch(jax.tree_util.keystr(path), leaf, table.micro_batches, replicas) for path, leaf in leaves
    ]
    traced = trace_units(loss, params, jax.tree.unflatten(tree, small), has_aux)
    parts = table.stages * table.chunks
    layers = find_layers(traced, parts)
    cut = make_parts(layers, stage_bounds(layers, parts, bounds))
    return Program(
        mesh=mesh, data=data, parts=cut, packing=make_packing(cut, table.stages, _specs(specs, params)),
        ticks=lay_out(table), activations=make_packets(cut, inexact=False), gradients=make_packets(cut, inexact=True),
        batch_dims=split,
    )


def _one_micro_batch(path: str, leaf: Any, micro_batches: int, replicas: int) -> jax.ShapeDtypeStruct:
    shape = np.shape(leaf)
    if not shape:
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    pieces = micro_batches * replicas
    if shape[0] % pieces or not shape[0]:
        up = -(-shape[0] // pieces) * pieces
        raise ArgumentError(
            f"batch{path} has {shape[0]} rows, which do not divide into {micro_batches} micro-batches on each of "
            f"{replicas} replicas; give a multiple of {pieces}, such as {max(up, pieces)} (fill it up and mask what "
            "was filled in the loss), or other micro_batches."
        )
    return jax.ShapeDtypeStruct((shape[0] // pieces, *shape[1:]), leaf.dtype)


def _specs(specs: Any, params: Any) -> list[PartitionSpec]:
    """A spec for each parameter."""
    if specs is None:
        return [PartitionSpec()] * len(jax.tree.leaves(params))
    is_spec = lambda x: isinstance(x, PartitionSpec) or x is None  # noqa: E731
    full = jax.tree.broadcast(specs, params, is_leaf=is_spec)
    found = jax.tree.leaves(full, is_leaf=is_spec)
    return [spec if spec is not None else PartitionSpec() for spec in found]
