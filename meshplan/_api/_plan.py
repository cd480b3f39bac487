"""The `Plan` that users hold: data, and what can be done with it beside its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshplan._options import Options
from meshplan.core import ArgumentError, Collective, MeshError
from meshplan.lower import (
    Audit,
    Prediction,
    Verification,
    audit_jitted,
    compare_leaves,
    jit_planned,
    rounded_otherwise,
    shardings,
    unplaced,
    with_noise,
)
from meshplan.machine import Machine, device_order
from meshplan.plan import (
    Explanation,
    Given,
    PlanData,
    PlanDiff,
    StepTimeline,
    diff,
    explain,
    logical_axis_rules,
    save,
    to_source,
    write_atomically,
)
from meshplan.program import Call, Program

if TYPE_CHECKING:
    from meshplan._api._tables import PlannedTables
    from meshplan.embedding import EmbeddingPlan, Embeddings, RowOptimizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A mesh shape, a spec for every argument, result and intermediate value, and what they cost.

    Predicted figures are per device and step. A plan that was loaded without its step can be
    shown, compared and explained; to compile it, load it with the step and its arguments.

    With `mp.plan(..., tables=...)` the figures are of the whole step; `data`, specs, `jit`, `audit` and `verify` are of
    its dense part, `step(*arguments, features) -> (*results, gradients)`; `embedding` says where the tables lie.
    """

    data: PlanData
    search_seconds: float = 0.0
    program: Program | None = field(default=None, repr=False)
    call: Call | None = field(default=None, repr=False)
    machine: Machine
    pins: Given = field(default_factory=dict)
    options: Options = field(default_factory=Options, repr=False)
    given_mesh: Mapping[str, int] | None = field(default=None, repr=False)
    tables: PlannedTables | None = field(default=None, repr=False)

    # figures

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis names and sizes, outermost first."""
        return self.data.mesh.to_dict()

    @property
    def step_seconds(self) -> float:
        """Modelled seconds of one step: simulated with `Options(rank_by="timeline")`, else computation at the peak
        rates and communication, one after the other. Tables included."""
        return self.data.step_seconds if self.tables is None else self.tables.plan.step_seconds

    @property
    def timeline(self) -> StepTimeline | None:
        """The step on a modelled timeline, memory traffic and overlap included; None in files of older versions."""
        return self.data.timeline

    @property
    def peak_bytes(self) -> float:
        """Predicted bytes of the fullest device. Tables included."""
        return self.data.peak_bytes if self.tables is None else self.tables.plan.peak_bytes

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return self.data.collectives

    @property
    def gap(self) -> float:
        """How far the chosen cost may be above the best for this mesh: 0 where proven optimal."""
        return self.data.gap

    @property
    def notes(self) -> tuple[str, ...]:
        return self.data.notes

    @property
    def embedding(self) -> EmbeddingPlan | None:
        """Where the embedding tables lie; None without `tables`."""
        return None if self.tables is None else self.tables.plan

    def embeddings(self, optimizer: RowOptimizer, **more: Any) -> Embeddings:
        """The tables at run time, as planned; `more`: other arguments of `meshplan.embedding.Embeddings`.

        Raises ArgumentError where the plan has no tables.
        """
        if self.tables is None:
            raise ArgumentError(
                "this plan has no embedding tables; name them: mp.plan(..., tables={'path': Table(...)})."
            )
        return self.tables.plan.embeddings(optimizer, **more)

    # specs and shardings

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """Stored spec of every argument leaf by its path."""
        return {a.path: a.spec.partition_spec() for a in self.data.arguments}

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs in the structure of the positional arguments (a tuple)."""
        args, kwargs = self._tree([a.spec.partition_spec() for a in self.data.arguments])
        return (args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs in the structure of the step's result."""
        program = self._need_program()
        return jax.tree.unflatten(program.out_tree, [r.spec.partition_spec() for r in self.data.results])

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """A jax Mesh with Auto axes over `devices` (default: this process's), which may be a topology's.

        Raises MeshError where their number is not the plan's.
        """
        shape = self.data.mesh
        found = list(jax.devices() if devices is None else devices)
        if len(found) != shape.devices:
            raise MeshError(
                f"the plan is for {shape.devices} devices ({shape}), found {len(found)}. Pass devices=..., plan for "
                f"{len(found)} devices, or compile ahead of time with plan.audit('{self.data.machine}')."
            )
        grid = np.empty(len(found), object)
        grid[:] = device_order(found)
        return Mesh(grid.reshape(shape.sizes), shape.names, axis_types=(AxisType.Auto,) * len(shape.axes))

    def in_shardings(self, mesh: Mesh | None = None) -> Any:
        """NamedShardings in the structure of the positional arguments (a tuple)."""
        args, kwargs = shardings([a.spec for a in self.data.arguments], self._need_program().in_tree, self._mesh(mesh))
        return (args, kwargs) if kwargs else args

    def out_shardings(self, mesh: Mesh | None = None) -> Any:
        """NamedShardings in the structure of the step's result."""
        return shardings([r.spec for r in self.data.results], self._need_program().out_tree, self._mesh(mesh))

    def abstract_args(self, mesh: Mesh | None = None) -> Any:
        """The positional arguments as ShapeDtypeStructs with shardings: to lower, or to restore a checkpoint into."""
        mesh = self._mesh(mesh)
        args, kwargs = self._tree(self._abstract(mesh))
        return (args, kwargs) if kwargs else args

    def jit(self, mesh: Mesh | None = None) -> Any:
        """The planned step as an ordinary jitted function of the step's own arguments, donation included.

        On CPU hosts wait for each step (`jax.block_until_ready`): XLA's CPU collectives stop each other, and end the
        process, where many steps are under way at once.
        """
        return jit_planned(self.data, self._need_program(), self._need_call(), self._mesh(mesh))

    def shard(self, *args: Any, mesh: Mesh | None = None) -> Any:
        """Copies of arrays placed as the plan stores them, in the structure of the arguments; one gives itself.

        The planned step may donate them; the arrays given stay the caller's.
        """
        wanted = self.in_shardings(mesh)
        # may_alias=False alone shares an array's own device with the caller: donation would delete it
        own = jax.tree.map(lambda x: jax.numpy.copy(x) if isinstance(x, jax.Array) else x, args)
        placed = tuple(jax.device_put(a, s, may_alias=False) for a, s in zip(own, wanted, strict=False))
        return placed[0] if len(args) == 1 else placed

    # what the compiler and the devices say

    def audit(self, target: str | Machine | None = None, *, timeout_seconds: float = 600.0) -> Audit:
        """Compile and hold the prediction against the compiled module: collectives, FLOPs, memory.

        `target`: a preset's name ("tpu-v5e:2x4", "h100:1x8", "cpu:8") or a Machine, compiled for ahead of time
        where this process lacks it; None is the machine of the plan, or this process's devices where they are it.
        Raises CompileError where the compiler is missing or dies, MeshError for another number of devices.
        """
        where = find_target(target, self.machine)
        if where.devices != self.data.mesh.devices:
            raise MeshError(
                f"the plan is for {self.data.mesh.devices} devices ({self.data.mesh}), {where.name} has "
                f"{where.devices}. Audit on a machine of that size, or plan for {where.name}."
            )
        mesh = AbstractMesh(
            self.data.mesh.sizes, self.data.mesh.names, axis_types=(AxisType.Auto,) * len(self.data.mesh.axes)
        )
        fn = jit_planned(self.data, self._need_program(), self._need_call(), mesh)
        args, kwargs = self._tree(self._abstract(mesh))
        predicted = Prediction(
            collectives=self.data.collectives, flops=self.data.flops, peak_bytes=self.data.peak_bytes
        )
        static = self._need_call()
        full = list(args)
        for i in sorted(static.static_argnums):
            full.insert(i, static.args[i])
        named = {**kwargs, **{k: static.kwargs[k] for k in static.static_argnames if k in static.kwargs}}
        return audit_jitted(fn, *full, target=where, timeout_seconds=timeout_seconds, predicted=predicted, **named)

    def verify(
        self, *args: Any, mesh: Mesh | None = None, tolerance: float | None = None, **kwargs: Any
    ) -> Verification:
        """Run the step as planned and on one device, and compare every leaf of the result.

        `args` are real arrays. `tolerance`: allowed norm of the difference over the norm, per leaf; default 1e-4,
        2e-2 for 16-bit floats. Nothing is donated, so the arguments stay usable. A step with a `shard_map` is
        held against itself as it is written, with whole arguments on all devices. A leaf over its tolerance may be all
        rounding (what Adam makes of a gradient that is zero but for it): one device is then run again with arguments
        rounded otherwise, and what that does to the leaf is reported and allowed ten times over.
        """
        call, program = self._need_call(), self._need_program()
        where = self._mesh(mesh)
        one = where.devices.flat[0]

        def on(place: Any) -> tuple[list[Any], dict[str, Any]]:
            def move(x: Any) -> Any:
                return jax.tree.map(lambda leaf: jax.device_put(leaf, place) if place else jax.numpy.asarray(leaf), x)

            return (
                [a if i in call.static_argnums else move(a) for i, a in enumerate(args)],
                {k: v if k in call.static_argnames else move(v) for k, v in kwargs.items()},
            )

        opaque = any(op.rule.opaque for op in program.ops)  # a shard_map runs on all devices of its mesh
        alone, spread = on(None if opaque else one), on(None)
        plain = jax.jit(
            unplaced(program, call) if program.states_shardings else call.step,
            static_argnums=call.static_argnums or None, static_argnames=call.static_argnames or None
        )
        reference = jax.tree.leaves(plain(*alone[0], **alone[1]))
        undonated = jit_planned(self.data, program, replace(call, donate_argnums=()), where)
        planned = jax.tree.leaves(undonated(*spread[0], **spread[1]))
        paths = [leaf.path for leaf in program.results]
        checks = compare_leaves(planned, reference, paths, tolerance)

        def again(seed: int) -> list[Any]:
            moved = rounded_otherwise(alone, seed)
            return jax.tree.leaves(plain(*moved[0], **moved[1]))

        return Verification(leaves=with_noise(checks, reference, again), devices=self.data.mesh.devices)

    # reasons and records

    def explain(self, path: str) -> Explanation:
        """Why an argument (by path or pattern), the "collectives" or the "memory" are as they are; prints as text.

        An embedding table goes by its name or by the path of its argument.
        """
        line = self.tables.line(path) if self.tables is not None else None
        return explain(self.data, path) if line is None else line

    def diff(self, other: Plan) -> PlanDiff:
        """What another plan does otherwise; `.empty` where nothing."""
        return diff(self.data, other.data)

    def pin(self, pins: Mapping[str, Any]) -> Plan:
        """Solved again with further pins; a pattern given before is replaced. The mesh stays where it was given."""
        from meshplan._api._planning import plan_again

        return plan_again(self, pins)

    def to_source(self) -> str:
        """Python source that writes the plan by hand."""
        return to_source(self.data)

    def logical_axis_rules(self) -> tuple[tuple[str, Any], ...]:
        """Name of a dim -> axes, in flax's form."""
        return logical_axis_rules(self.data)

    def save(self, path: str | Path) -> None:
        """Write the plan as versioned JSON; the file is replaced at once or not at all.

        Raises ArgumentError for a plan with tables, whose two halves are no one file.
        """
        if self.tables is not None:
            raise ArgumentError(
                "a plan with embedding tables is two: write plan.embedding.to_json(), which "
                "mp.embedding.load_embedding_plan reads, and plan the dense part again from it."
            )
        save(self.data, path)

    def html(self, path: str | Path) -> None:
        """Write the plan as one self-contained page."""
        from meshplan.report import html, plan_doc

        write_atomically(html(plan_doc(self.data)).encode(), path)

    def __str__(self) -> str:
        from meshplan.report import plan_doc, text

        dense = text(plan_doc(self.data))
        return dense if self.tables is None else f"{dense}\n\n{self.tables.plan}"

    # the program behind

    def _abstract(self, mesh: Any) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(a.shape, leaf.dtype, sharding=NamedSharding(mesh, a.spec.partition_spec()))
            for a, leaf in zip(self.data.arguments, self._dtypes(), strict=True)
        ]

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._need_program().in_tree, list(leaves))

    def _dtypes(self) -> list[Any]:
        args, kwargs = self._need_call().dynamic
        return jax.tree.leaves(jax.eval_shape(lambda *xs: xs, (args, kwargs)))

    def _mesh(self, mesh: Mesh | None) -> Any:
        if mesh is None:
            return self.mesh()
        shape = dict(mesh.shape)
        if shape != self.mesh_shape:
            raise MeshError(f"the plan is for mesh {self.data.mesh}, found {shape}. Use plan.mesh() or plan again.")
        if any(t != AxisType.Auto for t in mesh.axis_types):
            raise MeshError(
                f"mesh {shape} has axes of types {tuple(str(t) for t in mesh.axis_types)}; plans need Auto axes: "
                f"use plan.mesh(), or axis_types=(AxisType.Auto,) * {len(shape)}."
            )
        return mesh

    def _need_program(self) -> Program:
        if self.program is None:
            raise ArgumentError(
                "this plan was loaded without its step: it can be shown, not compiled. Load it with "
                "mp.load(path, step, *args)."
            )
        return self.program

    def _need_call(self) -> Call:
        self._need_program()
        assert self.call is not None
        return self.call

    def with_workload(self, workload: str) -> Plan:
        """The same plan, remembering where its step comes from (for the command line)."""
        return replace(self, data=replace(self.data, workload=workload))


def find_target(target: str | Machine | None, planned: Machine) -> Machine:
    if target is None:
        return planned
    return Machine.preset(target) if isinstance(target, str) else target
