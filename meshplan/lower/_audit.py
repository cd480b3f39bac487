"""What XLA made of a function: collectives by source line, memory, FLOPs, and what they cost.

The compiled module is the ground truth. An `Audit` can carry a prediction beside it; a
mismatch then shows where the prediction's model, or a sharding constraint, is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from meshplan.core import ArgumentError, Collective, MeshError, MeshShape, bytes_by_kind
from meshplan.lower._aot import CompiledModule, MemoryUse, OutOfMemory, compile_module
from meshplan.lower._aot_export import check_jitted, export_program
from meshplan.lower._aot_here import compile_in_process, compile_jitted
from meshplan.lower._hlo import FoundCollective, ModuleSummary, parse_module, spanning_axes, summarise
from meshplan.lower._hlo_steps import XLA_DTYPES
from meshplan.lower._hlo_timeline import ModuleTimeline, module_timeline

if TYPE_CHECKING:
    from meshplan.machine import Machine

@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan expects of the compiled module, for one device and one step."""

    collectives: tuple[Collective, ...]
    flops: float
    peak_bytes: float


class Mismatch(NamedTuple):
    """A figure whose prediction is off. `kind`: a collective kind, "flops" or "peak memory"."""

    kind: str
    predicted: float
    compiled: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A compiled function, per device and step.

    `flops` of dots and convolutions by dtype; `memory` is None where the compiler ran out of memory
    (`out_of_memory` then has its figures). `memory_limit` of the target in bytes where known. `seconds` is
    `compute_seconds + collective_seconds`, None where the target's speed is unknown: FLOPs at the chip's peak rate plus
    every collective at the speed of its links, one after the other; overlap and memory traffic are not counted.
    `timeline` is the step with overlap and memory traffic, None where `seconds` is; its collectives take the figures
    fitted to a collectives library (`collective_time`), those of `seconds` their links' full rate.
    `estimated_cycles` is the TPU compiler's own figure for everything but collectives.
    """

    name: str
    target: str
    mesh_shape: MeshShape
    collectives: tuple[Collective, ...]
    flops_by_dtype: Mapping[str, float]
    memory: MemoryUse | None
    memory_limit: int | None
    estimated_cycles: float | None
    compile_seconds: float
    compute_seconds: float | None
    collective_seconds: float | None
    timeline: ModuleTimeline | None = None
    input_shardings: tuple[str, ...] = ()
    output_shardings: tuple[str, ...] = ()
    out_of_memory: OutOfMemory | None = None
    predicted: Prediction | None = None
    notes: tuple[str, ...] = ()
    module_text: str = field(default="", repr=False)

    @property
    def flops(self) -> float:
        return sum(self.flops_by_dtype.values())

    @property
    def seconds(self) -> float | None:
        if self.compute_seconds is None or self.collective_seconds is None:
            return None
        return self.compute_seconds + self.collective_seconds

    def bytes_by_kind(self) -> dict[str, float]:
        """Bytes per step of each kind of collective that occurs."""
        return bytes_by_kind(self.collectives)

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted it and its peak is within the target's memory, where that is known."""
        if self.memory is None:
            return False
        return self.memory_limit is None or self.memory.peak_bytes <= self.memory_limit

    @property
    def ok(self) -> bool:
        """It fits, and every prediction holds (see `mismatches`)."""
        return self.fits and not self.mismatches()

    def mismatches(self, relative: float = 0.05, above_bytes: float = 1e6) -> tuple[Mismatch, ...]:
        """Predictions that are off by more than `relative` of the larger figure.

        Bytes are compared by kind of collective and as peak memory, where one of the two exceeds `above_bytes`; FLOPs
        always. Empty without a prediction or without a compiled module.
        """
        if self.predicted is None or self.memory is None:
            return ()
        compiled, predicted = self.bytes_by_kind(), bytes_by_kind(self.predicted.collectives)
        rows = [(k, predicted.get(k, 0.0), compiled.get(k, 0.0)) for k in dict.fromkeys((*predicted, *compiled))]
        rows.append(("peak memory", float(self.predicted.peak_bytes), float(self.memory.peak_bytes)))
        rows = [r for r in rows if max(r[1:]) > above_bytes]
        rows.append(("flops", float(self.predicted.flops), self.flops))
        return tuple(
            Mismatch(kind, p, c, c / p if p else math.inf)
            for kind, p, c in rows if abs(p - c) > relative * max(p, c)
        )

    def __str__(self) -> str:
        from meshplan.lower._audit_text import audit_text

        return audit_text(self)


def audit_jitted(
    jitted: Any, *args: Any, target: str | Machine | None = None, mesh: Any = None, timeout_seconds: float = 600.0,
    predicted: Prediction | None = None, **kwargs: Any,
) -> Audit:
    """Compiles a jitted function and reads what came out.

    `args` are arrays or ShapeDtypeStructs with shardings; nothing runs. `target` None compiles for this
    process's devices; "tpu-v5e:2x4", "h100:1x8", "cpu:8" or a Machine compiles ahead of time, where the function's
    shardings may be over an AbstractMesh of as many devices as the target has. `mesh` (a mesh, its shape, or a
    dict of sizes) names the axes where the shardings do not. Raises ArgumentError for a function that is not jitted,
    MeshError for another number of devices, CompileError where no compiler is there or it fails; a program that
    does not fit its memory is a result.
    """
    check_jitted(jitted)
    machine = _machine(target)
    if machine is None:
        compiled, shape, name = compile_jitted(jitted, *args, **kwargs)
    else:
        platform, topology, extra = machine.aot_topology()
        program = export_program(jitted, *args, platform=platform, **kwargs)
        if program.devices != machine.devices:
            raise MeshError(
                f"{program.name} is sharded over {program.devices} devices, {machine.name} has {machine.devices}. "
                "Give its arguments shardings over a mesh of that many devices; an AbstractMesh will do."
            )
        shape, name = program.mesh_shape, program.name
        if platform == "cpu" and len(jax.devices("cpu")) >= program.devices:
            compiled = compile_in_process(program, jax.devices("cpu")[: program.devices])
        else:
            compiled = compile_module(program, (platform, topology, extra), timeout_seconds=timeout_seconds)
    shape = _mesh_shape(mesh) or shape
    return audit_compiled(compiled, name=name, machine=machine, mesh_shape=shape, predicted=predicted)


def audit_compiled(
    compiled: CompiledModule | OutOfMemory, *, name: str, machine: Machine | None, mesh_shape: MeshShape | None,
    predicted: Prediction | None = None,
) -> Audit:
    """The audit of a module that is compiled already; without a machine it is priced as this process's devices."""
    notes: list[str] = []
    known = machine or _present_machine(notes)
    limit = known.memory_bytes if known is not None else None
    target = machine.name if machine is not None else f"this process's {jax.default_backend()} devices"
    if isinstance(compiled, OutOfMemory):
        return Audit(
            name=name, target=target, mesh_shape=mesh_shape or MeshShape(()), collectives=(), flops_by_dtype={},
            memory=None, memory_limit=compiled.limit_bytes or limit, estimated_cycles=None,
            compile_seconds=compiled.seconds, compute_seconds=None, collective_seconds=None,
            out_of_memory=compiled, predicted=predicted,
        )
    shape = mesh_shape or MeshShape(())
    module = parse_module(compiled.text)
    summary = summarise(module, mesh_shape)
    compute, moving = _price(summary, known, shape, notes)
    timed = known if compute is not None and moving is not None else None
    return Audit(
        name=name, target=target, mesh_shape=shape, collectives=tuple(f.collective for f in summary.collectives),
        flops_by_dtype={XLA_DTYPES.get(k, k): v for k, v in summary.flops.items()}, memory=compiled.memory,
        memory_limit=limit, estimated_cycles=summary.estimated_cycles, compile_seconds=compiled.seconds,
        compute_seconds=compute, collective_seconds=moving,
        timeline=module_timeline(compiled.text, timed, shape, module) if timed is not None else None,
        input_shardings=compiled.input_shardings,
        output_shardings=compiled.output_shardings, predicted=predicted, notes=(*summary.notes, *notes),
        module_text=compiled.text,
    )


def _machine(target: Any) -> Machine | None:
    from meshplan.machine import Machine

    if target is None or isinstance(target, Machine):
        return target
    if isinstance(target, str):
        return Machine.preset(target)
    raise ArgumentError(f"target is a {type(target).__name__}; give a name like 'h100:1x8', a Machine, or None.")


def _present_machine(notes: list[str]) -> Machine | None:
    from meshplan.core import MachineError
    from meshplan.machine import Machine

    try:
        return Machine.detect()
    except MachineError as error:
        notes.append(f"not priced: {error}")
        return None


def _mesh_shape(mesh: Any) -> MeshShape | None:
    if mesh is None or isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, Mapping):
        return MeshShape.of(dict(mesh))
    return MeshShape(tuple(mesh.shape_tuple))


def _price(
    summary: ModuleSummary, machine: Machine | None, shape: MeshShape, notes: list[str]
) -> tuple[float | None, float | None]:
    """(seconds of FLOPs at peak, seconds of collectives), None where the machine is unknown or another size."""
    if machine is None:
        return None, None
    compute = sum(n / machine.chip.flops_for(XLA_DTYPES.get(d, d)) for d, n in summary.flops.items())

    if not summary.collectives:
        return compute, 0.0
    if shape.devices != machine.devices:
        notes.append(f"collectives not priced: the mesh {shape} is not the {machine.devices} devices of {machine.name}")
        return compute, None
    return compute, sum(_seconds(f, machine, shape) for f in summary.collectives)


def _seconds(found: FoundCollective, machine: Machine, shape: MeshShape) -> float:
    """A group that is no mesh axes is priced over the fewest mesh axes, or dims of the machine, that hold it."""
    from meshplan.machine import collective_seconds

    c = found.collective
    if c.axes and found.exact:
        return c.count * collective_seconds(machine, shape, c.kind, c.nbytes, c.axes)
    dims = MeshShape(tuple((d.name, d.size) for d in machine.dims))
    return c.count * min(
        collective_seconds(machine, mesh, c.kind, c.nbytes, spanning_axes(found.groups, mesh)) for mesh in (shape, dims)
    )
