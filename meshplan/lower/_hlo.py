"""The collectives of a compiled module, counted as often as a step runs them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from meshplan.core import Collective, CollectiveKind, MeshShape
from meshplan.lower._hlo_cost import Tally, estimated_cycles, flops, flops_by_dtype, tally
from meshplan.lower._hlo_groups import Groups, group_size, infer_axes, parse_groups, parse_slice_groups, spanning_axes
from meshplan.lower._hlo_loops import unknown_loops
from meshplan.lower._hlo_parse import Computation, Instruction, Module, Shape, op_name, parse_module

__all__ = [
    "FoundCollective", "ModuleSummary", "collectives", "estimated_cycles", "find_collectives", "flops",
    "flops_by_dtype", "group_size", "infer_axes", "parse_module", "spanning_axes", "summarise",
]

_KINDS: dict[str, CollectiveKind] = {
    "all-reduce": "all-reduce", "all-gather": "all-gather", "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all", "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute", "collective-broadcast": "collective-permute",
}
# A module for several TPU slices is that of one slice; between slices data goes by way of the hosts.
_SLICE_KINDS: dict[str, CollectiveKind] = {
    "ALL_REDUCE": "all-reduce", "ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute",
}
_NOTES = {
    "ragged-all-to-all": "ragged-all-to-all: bytes are its whole buffer, an upper bound",
    "collective-broadcast": "collective-broadcast, counted as a collective-permute",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCollective:
    """A collective with what the module alone can tell of it.

    `groups` are the devices that take part, by position in the mesh; `exact` where they are those of the
    collective's axes, and not only held by them. `chain` is not '' where a
    TPU module repeats the collective in several fusions; `starts` marks the fusion that begins it.
    """

    collective: Collective
    groups: Groups
    instruction: str
    note: str = ""
    chain: str = ""
    starts: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSummary:
    """What one device does in a step. `flops` of dots and convolutions by XLA's name of the type; `notes` in words."""

    collectives: tuple[FoundCollective, ...]
    flops: dict[str, float]
    estimated_cycles: float | None
    notes: tuple[str, ...]


def summarise(text: str | Module, mesh_shape: MeshShape | None = None) -> ModuleSummary:
    """All sums of a module (or its text) at once."""
    module = parse_module(text) if isinstance(text, str) else text
    found = find_collectives(module, mesh_shape)
    loops = unknown_loops(module)
    notes = [f"the loop at {place} has no known trip count and is counted once" for place in loops]
    notes += dict.fromkeys(f.note for f in found if f.note)
    return ModuleSummary(
        collectives=found, flops=flops_by_dtype(module), estimated_cycles=estimated_cycles(module), notes=tuple(notes)
    )


def collectives(text: str | Module, mesh_shape: MeshShape | None = None) -> tuple[Collective, ...]:
    """The collectives of an optimised module (`compiled.as_text()`), in the order of the schedule.

    Bytes by the convention of `Collective.nbytes`. A combined collective (tuple of operands) is one, with the sum of
    its bytes. With `mesh_shape` the axes are filled in where the groups are those of some axes. Groups of one
    device are left out.
    """
    return tuple(f.collective for f in find_collectives(text, mesh_shape))


def find_collectives(text: str | Module, mesh_shape: MeshShape | None = None) -> tuple[FoundCollective, ...]:
    """As `collectives`, with the groups of devices."""
    module = parse_module(text) if isinstance(text, str) else text

    def leaf(i: Instruction, c: Computation) -> list[FoundCollective]:
        found = _read(module, i, c)
        return [found] if found is not None else []

    begun = _begun_chains(module)
    counted = tally(module, leaf, lambda f: f.collective.nbytes, lambda items: _once_per_chain(items, begun))
    return tuple(_counted(f, n, mesh_shape) for f, n in counted if n > 0)


def _counted(found: FoundCollective, count: float, mesh_shape: MeshShape | None) -> FoundCollective:
    axes = (infer_axes(found.groups, mesh_shape) if mesh_shape is not None else None) or ()
    exact = bool(axes)
    if mesh_shape is not None and not axes and found.collective.kind == "collective-permute":
        axes = spanning_axes(found.groups, mesh_shape)
    collective = dataclasses.replace(found.collective, count=count, axes=axes)
    return dataclasses.replace(found, collective=collective, exact=exact)


def _read(module: Module, i: Instruction, c: Computation) -> FoundCollective | None:
    opcode = i.opcode.removesuffix("-start")
    if opcode == "send":
        return _read_between_slices(module, i, c)
    if opcode not in _KINDS:
        return None
    groups = parse_groups(i.attributes, module.devices)
    size = group_size(groups)
    if size <= 1:
        return None
    kind = _KINDS[opcode]
    if kind == "all-reduce" and _is_scattered(i, c):
        kind = "reduce-scatter"
    shapes = _buffers(i, c, opcode, fused=kind != _KINDS[opcode])
    arrays = [a for s in shapes for a in s.arrays()]
    named = _named(module, i, c)
    return FoundCollective(
        collective=Collective(
            kind=kind, nbytes=sum(a.nbytes for a in arrays), group_size=size,
            dtype=max(arrays, key=lambda a: a.nbytes).dtype if arrays else "",
            source=module.source(named) or _line_of_use(module, i, c), op_name=op_name(named),
        ),
        groups=groups, instruction=i.name, note=_NOTES.get(opcode, ""),
        chain=_chain(module, i, c), starts=_begins(c),
    )


def _read_between_slices(module: Module, i: Instruction, c: Computation) -> FoundCollective | None:
    """The sending half of a transfer between TPU slices (the receiving half is not counted)."""
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
    if not transfer:
        return None
    known = transfer.group(1) in _SLICE_KINDS
    groups = parse_slice_groups(i.attributes, module.devices)
    kind = _SLICE_KINDS.get(transfer.group(1), "collective-permute")
    sent = next(c.by_name[i.operands[0]].shape.arrays())
    size = group_size(groups)
    named = _named(module, i, c)
    return FoundCollective(
        collective=Collective(
            kind=kind, nbytes=sent.nbytes * (size if kind == "all-gather" else 1), group_size=size, dtype=sent.dtype,
            source=module.source(named) or _line_of_use(module, i, c), op_name=op_name(named),
        ),
        groups=groups, instruction=i.name,
        note="" if known else f"a transfer between slices of unknown type {transfer.group(1)}",
    )


def _buffers(i: Instruction, c: Computation, opcode: str, fused: bool) -> tuple[Shape, ...]:
    """The shapes whose bytes count: an all-gather's result, the operands of all others."""
    if opcode == "all-gather":
        return (i.shape.parts[1] if i.opcode.endswith("-start") else i.shape,)
    sent = [c.by_name[name] for name in i.operands if name in c.by_name]
    operands = tuple((_unfilled(operand, c) if fused else operand).shape for operand in sent)
    if opcode == "ragged-all-to-all":
        return (max(operands[:2], key=lambda s: s.nbytes),)
    return operands


def _unfilled(operand: Instruction, c: Computation) -> Instruction:
    """What a fused TPU reduce-scatter was given: it sends it with its tiles filled up, for pieces of whole tiles."""
    i = operand
    while i.opcode in ("pad", "bitcast") and i.operands and i.operands[0] in c.by_name:
        i = c.by_name[i.operands[0]]
    return i if i.opcode == "parameter" else operand


def _is_scattered(i: Instruction, c: Computation) -> bool:
    """Whether a fused all-reduce keeps only this device's slice: the TPU compiler's reduce-scatter."""
    root = c.root
    kept = [c.by_name[o] for o in root.operands] if root.opcode == "tuple" else [root]

    def from_sum(slice_: Instruction) -> bool:
        source = c.by_name.get(slice_.operands[0]) if slice_.operands else None
        while source is not None and source.opcode in ("get-tuple-element", "bitcast"):
            source = c.by_name.get(source.operands[0])
        return slice_.opcode == "dynamic-slice" and source is i

    return bool(kept) and all(from_sum(k) for k in kept)


def _named(module: Module, i: Instruction, c: Computation) -> Instruction:
    """The instruction that carries the metadata: itself, the fusion around it, or what makes its operand."""
    if "op_name=" not in i.attributes and c.name in module.fusions:
        i = module.callers.get(c.name, i)
    for _ in range(4):
        if "op_name=" in i.attributes or not i.operands or i.operands[0] not in c.by_name:
            break
        i = c.by_name[i.operands[0]]
    return i


def _line_of_use(module: Module, i: Instruction, c: Computation) -> str:
    """The line of what first uses a collective's result: that of a moved argument has none of its own."""
    front = [i]
    for _ in range(4):
        front = [user for one in front for user in c.users.get(one.name, ())]
        line = next((line for user in front if (line := module.source(user))), "")
        if line:
            return line
    return ""


def _chain(module: Module, i: Instruction, c: Computation) -> str:
    """Key of a collective that asynchronous TPU fusions repeat, '' for one that stands alone."""
    repeated = any('"AsyncCollective' in j.attributes for j in c.instructions)
    repeated = repeated or "async_collective_fusion" in i.attributes or "async_collective_fusion" in c.name
    channel = re.search(r"channel_id=(\d+)", i.attributes)
    if c.name not in module.fusions or not repeated or not channel:
        return ""
    return f"{i.opcode} {channel.group(1)} {i.shape.nbytes}"


def _begun_chains(module: Module) -> frozenset[str]:
    """Chains that some computation begins; their repetitions may stand in another one (a loop that they span)."""
    return frozenset(
        _chain(module, i, c)
        for c in module.computations.values() if _begins(c)
        for i in c.instructions if "channel_id=" in i.attributes
    )


def _begins(c: Computation) -> bool:
    return any('"AsyncCollectiveStart"' in j.attributes for j in c.instructions)


def _once_per_chain(items: Tally[FoundCollective], begun: frozenset[str]) -> Tally[FoundCollective]:
    """Of the repetitions of a chain keep those that begin it, or one where none does."""
    kept: Tally[FoundCollective] = []
    seen: set[str] = set()
    for found, count in items:
        if found.chain and (found.chain in seen if found.chain not in begun else not found.starts):
            continue
        seen.add(found.chain)
        kept.append((dataclasses.replace(found, chain="", starts=False), count))
    return kept
