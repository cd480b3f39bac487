"""Bytes that one execution of an instruction reads and writes: what crosses the border of a fusion.

A fusion reads each operand once and writes each result once; what is made and used inside stays inside. Of an operand
only that part is read which the results are made from: a slice (or a gather) of a stacked operand counts its own bytes,
not the stack's. The parts are found by walking from the results back to the operands, as XLA's own cost analysis does;
an operand with several readers counts the sum of their parts, at most the whole. A dynamic-update-slice (or a scatter)
of a fusion's operand that becomes a result is done in place, since buffer assignment gives both one buffer and copies
are instructions of their own: it writes the update and does not touch the rest.
"""

from __future__ import annotations

from meshplan.lower._hlo_parse import Computation, Instruction, Module

_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_WHOLE = frozenset({"dot", "convolution", "custom-call", "sort", "fft", "triangular-solve", "cholesky"})
_RENAMES = frozenset({"bitcast", "reshape", "get-tuple-element"})


class Traffic:
    """Bytes of a module's instructions, each fused computation looked at once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fused: dict[str, tuple[tuple[float, ...], float]] = {}

    def nbytes(self, i: Instruction, c: Computation) -> float:
        """Read and written by one execution of an instruction that is not fused."""
        if i.opcode == "fusion":
            read, written = self._borders(i.computations("calls")[0])
        elif i.opcode in _UPDATES:
            read, written = self._parts(i, 1.0, c, in_place=True), _updated(i, c)
        else:
            read, written = self._parts(i, 1.0, c), float(_result(i))
        operands = (c.by_name.get(name) for name in i.operands)
        return written + sum(part * o.shape.nbytes for o, part in zip(operands, read, strict=True) if o is not None)

    def _borders(self, name: str) -> tuple[tuple[float, ...], float]:
        """(the part of each parameter that is read, bytes written) of a fused computation."""
        if name not in self._fused:
            self._fused[name] = self._look(self._module.computations[name])
        return self._fused[name]

    def _look(self, c: Computation) -> tuple[tuple[float, ...], float]:
        root, written = c.root, 0.0
        wanted: dict[str, float] = {}
        in_place: set[str] = set()
        for name in root.operands if root.opcode == "tuple" else (root.name,):
            made = _origin(c.by_name[name], c)
            if made.opcode in _UPDATES and _origin(c.by_name[made.operands[0]], c).opcode == "parameter":
                written += _updated(made, c)
                in_place.add(made.name)
                wanted[made.name] = 1.0
            elif made.opcode != "parameter":  # an operand that is handed through stays where it is
                written += c.by_name[name].shape.nbytes
                wanted[name] = 1.0
        read: dict[int, float] = {}
        for i in reversed(c.instructions):
            part = wanted.get(i.name, 0.0)
            if i.opcode == "parameter":
                read[int(i.literal)] = part
            elif part and not (i is root and root.opcode == "tuple"):
                for operand, needs in zip(i.operands, self._parts(i, part, c, i.name in in_place), strict=True):
                    wanted[operand] = min(1.0, wanted.get(operand, 0.0) + needs)
        return tuple(read.get(k, 0.0) for k in range(1 + max(read, default=-1))), written

    def _parts(self, i: Instruction, part: float, c: Computation, in_place: bool = False) -> tuple[float, ...]:
        """Which part of each operand an instruction reads to make this part of its result."""
        count = len(i.operands)
        if not count:
            return ()
        if i.opcode == "fusion":
            return self._borders(i.computations("calls")[0])[0]
        if i.opcode in _UPDATES:
            targets = max(1, (count - 1) // 2) if i.opcode == "scatter" else 1
            return (0.0 if in_place else part,) * targets + (1.0,) * (count - targets)
        if i.opcode in _SLICES or i.opcode == "broadcast":
            whole = c.by_name[i.operands[0]].shape.nbytes
            first = min(1.0, part * i.shape.nbytes / whole) if whole else 0.0
            return (first,) + (part if i.opcode == "gather" else 1.0,) * (count - 1)
        return (1.0 if i.opcode in _WHOLE else part,) * count


def _origin(i: Instruction, c: Computation) -> Instruction:
    """What a value is another name for."""
    while i.opcode in _RENAMES and i.operands[0] in c.by_name:
        i = c.by_name[i.operands[0]]
    return i


def _updated(i: Instruction, c: Computation) -> float:
    """Bytes written in place; a scatter that combines also reads what it updates."""
    if i.opcode == "dynamic-update-slice":
        return float(c.by_name[i.operands[1]].shape.nbytes)
    updates = i.operands[(len(i.operands) + 1) // 2 :]
    return 2.0 * sum(c.by_name[name].shape.nbytes for name in updates)


def _result(i: Instruction) -> int:
    """Bytes of the results; the workspace of a library call, its last result, is not traffic."""
    library = i.opcode == "custom-call" and 'custom_call_target="__cu' in i.attributes and len(i.shape.parts) > 1
    return sum(part.nbytes for part in i.shape.parts[:-1]) if library else i.shape.nbytes
