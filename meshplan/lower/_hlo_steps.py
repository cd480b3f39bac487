"""What one device does in each computation of a compiled module, in the order of its schedule, with seconds.

Computation: the longer of the FLOPs of products at the chip's peak rate and of the bytes that cross the borders of
the fusion over the memory's rate, plus the start of a kernel: a roofline, modelled. A TPU module's own
`estimated_cycles` take its place where the machine states the chip's clock. Collectives take `collective_time`, the
figures fitted to a collectives library, and occupy the links of the axes that they cross.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshplan.core import Axes, CollectiveKind, MeshShape
from meshplan.cost._rates import KERNEL_SECONDS
from meshplan.lower._hlo import FoundCollective, find_collectives
from meshplan.lower._hlo_cost import cycles_of, products
from meshplan.lower._hlo_groups import spanning_axes
from meshplan.lower._hlo_loops import trip_count
from meshplan.lower._hlo_parse import Computation, Instruction, Module
from meshplan.lower._hlo_traffic import Traffic
from meshplan.machine import Machine, collective_time, link_groups

XLA_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "s8": "int8", "u8": "uint8"}

# What is only a name for data, or is known before the step runs.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "add-dependency", "domain",
})
_FREE_CALLS = re.compile(
    r'custom_call_target="(AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound|AsyncCollective\w+|Sharding|'
    r'SPMD\w+|annotate_device_placement|MoveTo\w+)"'
)
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast", "send", "recv",
)
_ON_HOST = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(.*S\(5\).*\) (?:[a-z\-]+-start|async-start)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Compute:
    """The device computes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Moved:
    """What is moved: a collective, or a copy between memories (`kind` "copy")."""

    kind: CollectiveKind | str
    source: str
    axes: Axes


@dataclass(frozen=True, slots=True)
class Start:
    """Something is moved beside the computation from here on, over these resources, each one at a time."""

    key: str
    seconds: float
    resources: tuple[str, ...]
    what: Moved


@dataclass(frozen=True, slots=True)
class Done:
    """The device waits until it is moved; nothing where no such thing was started."""

    key: str


@dataclass(frozen=True, slots=True)
class Loop:
    """Computations that run one after the other, so many times."""

    names: tuple[str, ...]
    trips: float


@dataclass(frozen=True, slots=True)
class Branch:
    """One of these computations runs."""

    names: tuple[str, ...]


Step = Compute | Start | Done | Loop | Branch


class StepReader:
    """Steps of a module's computations on a machine with a mesh.

    `text`: of the module, for what its shapes say of memory spaces. Raises MeshError where the module has collectives
    and the mesh is not of the machine's size.
    """

    def __init__(self, module: Module, text: str, machine: Machine, mesh_shape: MeshShape) -> None:
        self.module, self.machine, self.mesh = module, machine, mesh_shape
        self._chip = machine.chip
        self._traffic = Traffic(module)
        self._flops: dict[str, dict[str, float]] = {}
        self._host = frozenset(_ON_HOST.findall(text)) if "S(5)" in text else frozenset()
        every = (i for c in module.computations.values() for i in c.instructions)
        clock = machine.chip.clock_hertz
        self._clock = clock if clock and any(cycles_of(i) is not None for i in every) else None
        found = find_collectives(module, mesh_shape)
        self._found = {f.instruction: self._price(f) for f in found}

    @property
    def by_cycles(self) -> bool:
        """Whether computation takes the compiler's estimated cycles."""
        return self._clock is not None

    def steps(self, name: str) -> list[Step]:
        """Of one computation that is not fused."""
        c = self.module.computations[name]
        return [step for i in c.instructions if i.opcode not in _FREE for step in self._read(i, c)]

    def _read(self, i: Instruction, c: Computation) -> list[Step]:
        if i.opcode == "while":
            return [self._loop(i, c)]
        if i.opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            return [Branch(tuple(b for key in keys for b in i.computations(key)))]
        if i.opcode == "call":
            return [Loop(i.computations("to_apply"), 1.0)]
        opcode = i.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        if i.opcode.endswith("-done"):
            return [Done(_channel(i)) if opcode == "recv" else Done(_started(i, c))]
        if i.opcode.endswith("-update"):
            return []
        if opcode in _COLLECTIVES:
            return self._collective(i)
        if i.opcode.endswith("-start"):
            return self._asynchronous(i, c)
        if i.opcode == "fusion":
            return self._fusion(i, c)
        return self._compute(i, c)

    def _loop(self, i: Instruction, c: Computation) -> Loop:
        """A compiler that wrote the number of runs down counts them itself and does not evaluate the condition."""
        runs = trip_count(self.module, i, c)
        counted = '"known_trip_count"' in i.attributes
        names = (*i.computations("body"), *(() if counted else i.computations("condition")))
        return Loop(names, 1.0 if runs is None else float(runs))

    def _collective(self, i: Instruction) -> list[Step]:
        priced = self._found.get(i.name)
        if priced is None:  # a group of one device, or the receiving half
            return []
        key = _channel(i) if i.opcode == "send" else i.name
        waits = not i.opcode.endswith("-start") and i.opcode != "send"
        blocks = waits or '"is_sync":true' in i.attributes
        return [Start(key, *priced), *([Done(key)] if blocks else [])]

    def _asynchronous(self, i: Instruction, c: Computation) -> list[Step]:
        """A computation that something is wrapped in, or a copy between memories."""
        wrapped = [self.module.computations[name] for name in i.computations("calls")]
        for inner in wrapped:
            for j in inner.instructions:
                if j.name in self._found:
                    return [Start(i.name, *self._found[j.name])]
        if i.opcode == "async-start":
            return [Loop(i.computations("calls"), 1.0)]
        operands = [c.by_name[name].shape.nbytes for name in i.operands if name in c.by_name]
        if i.opcode == "dynamic-update-slice-start":
            nbytes = operands[1]
        else:  # the operand's part that arrives: the smaller of what is read and of what is written
            sizes = [part.nbytes for part in i.shape.parts[:2]]
            nbytes = min(sizes, default=max(operands, default=0))
        what = Moved("copy", self.module.source(i), ())
        if i.name in self._host:
            return [Start(i.name, nbytes / self._chip.host_bytes_per_second, ("host",), what)]
        twice = 1 if self._chip.platform == "tpu" else 2  # a TPU copies between its memory and the one on the chip
        return [Start(i.name, twice * nbytes / self._chip.memory_bytes_per_second, ("memory",), what)]

    def _fusion(self, i: Instruction, c: Computation) -> list[Step]:
        """A TPU fusion may begin, carry on or end a collective beside what it computes, or be one."""
        inner = self.module.computations[i.computations("calls")[0]]
        moving = next((j for j in inner.instructions if j.opcode in _COLLECTIVES), None)
        if moving is None:
            return self._compute(i, c)
        computing = self._cycles(i)
        found: list[Step] = []
        key, priced = _channel(moving), self._found.get(moving.name)
        begins = _holds(inner, "AsyncCollectiveStart")
        if priced is not None:
            found.append(Start(key, *priced))
        if computing:
            found.append(Compute(computing))
        elif "async_collective_fusion" in inner.name:
            found += self._compute(i, c)
        if _holds(inner, "AsyncCollectiveDone") or (priced is not None and not begins):
            found.append(Done(key))
        return found

    def _compute(self, i: Instruction, c: Computation) -> list[Step]:
        if i.opcode == "custom-call" and _FREE_CALLS.search(i.attributes):
            return []
        cycles = self._cycles(i)
        if cycles is not None:
            return [Compute(cycles)]
        arithmetic = sum(n / self._chip.flops_for(XLA_DTYPES.get(d, d)) for d, n in self._products(i, c).items())
        moving = self._traffic.nbytes(i, c) / self._chip.memory_bytes_per_second
        start = 0.0 if self._clock else KERNEL_SECONDS[self._chip.platform]
        return [Compute(max(arithmetic, moving) + start)]

    def _cycles(self, i: Instruction) -> float | None:
        """Seconds by the compiler's estimate of cycles."""
        cycles = cycles_of(i) if self._clock else None
        return cycles / self._clock if cycles is not None and self._clock else None

    def _products(self, i: Instruction, c: Computation) -> dict[str, float]:
        """FLOPs of the products that an instruction is or holds, by XLA's name of the type."""
        if i.opcode != "fusion":
            return dict(products(i, c))
        name = i.computations("calls")[0]
        if name not in self._flops:
            inner, sums = self.module.computations[name], {}
            for j in inner.instructions:
                for dtype, n in self._products(j, inner).items():
                    sums[dtype] = sums.get(dtype, 0.0) + n
            self._flops[name] = sums
        return self._flops[name]

    def _price(self, found: FoundCollective) -> tuple[float, tuple[str, ...], Moved]:
        """(seconds, links, what); a group that is no mesh axes takes the fewest axes, or machine dims, that hold it."""
        c, machine = found.collective, self.machine
        dims = MeshShape(tuple((d.name, d.size) for d in machine.dims))
        meshes = [(self.mesh, c.axes)] if c.axes and found.exact else [
            (mesh, spanning_axes(found.groups, mesh)) for mesh in (self.mesh, dims)
        ]
        priced = [(collective_time(machine, mesh, c.kind, c.nbytes, axes).seconds, mesh, axes) for mesh, axes in meshes]
        seconds, mesh, axes = min(priced, key=lambda choice: choice[0])
        groups = link_groups(machine, mesh)
        links = sorted({(share.level, share.dim) for axis in axes for share in groups[axis]})
        return seconds, tuple(f"link {level}.{dim}" for level, dim in links), Moved(c.kind, c.source, c.axes)


def _channel(i: Instruction) -> str:
    found = re.search(r"channel_id=(\d+)", i.attributes)
    return f"channel {found.group(1)}" if found else i.name


def _started(i: Instruction, c: Computation) -> str:
    """The instruction that a -done ends; a send by its channel."""
    at = c.by_name.get(i.operands[0])
    while at is not None and (at.opcode.endswith("-update") or at.opcode in ("get-tuple-element", "bitcast", "tuple")):
        at = c.by_name.get(at.operands[0])
    if at is None:
        return i.operands[0]
    return _channel(at) if at.opcode in ("send", "recv") else at.name


def _holds(c: Computation, target: str) -> bool:
    return any(f'"{target}"' in i.attributes for i in c.instructions)
