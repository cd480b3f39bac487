"""Reads the text of a compiled XLA module into computations of instructions.

Only what an audit needs is kept apart: shapes, opcodes, operands, and the attributes as
text, from which single ones are picked on demand. The grammar is the one that
`compiled.as_text()` prints on every back end; tiling and memory spaces inside layouts,
`/*index=5*/` comments and operands with or without their types are all accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ITEM_BITS: dict[str, int] = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4,
    "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}

# What the call of an exported program puts before the names of its operations.
EXPORTED_PREFIX = "jit(call)/call_exported/"


@dataclass(frozen=True, slots=True)
class Array:
    """Element type and dims of one array of a shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = ITEM_BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 0)
        return (self.size * bits + 7) // 8


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes (`array` is None)."""

    array: Array | None
    parts: tuple[Shape, ...] = ()

    def arrays(self) -> Iterator[Array]:
        """All arrays, depth first."""
        if self.array is not None:
            yield self.array
        for part in self.parts:
            yield from part.arrays()

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation; `attributes` is everything after the operands."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    def computations(self, key: str) -> tuple[str, ...]:
        """Names of the computations that attribute `key` refers to."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return tuple(re.findall(r"%?([\w.\-]+)", found.group(1))) if found else ()


@dataclass(frozen=True)
class Computation:
    """Instructions in the order they were printed; a scheduled module's order is its schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use each value, in order."""
        table: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for operand in i.operands:
                table.setdefault(operand, []).append(i)
        return table

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])


@dataclass(frozen=True)
class Module:
    """A compiled module. `frames[id]` is the `file:line` chain of a stack frame, innermost first."""

    computations: dict[str, Computation]
    entry: str
    devices: int
    frames: dict[int, tuple[str, ...]]

    @cached_property
    def fusions(self) -> frozenset[str]:
        """Names of the computations that some fusion calls."""
        return frozenset(self.callers)

    @cached_property
    def callers(self) -> dict[str, Instruction]:
        """The first fusion that calls each fused computation."""
        table: dict[str, Instruction] = {}
        for computation in self.computations.values():
            for i in computation.instructions:
                for name in i.computations("calls") if i.opcode == "fusion" else ():
                    table.setdefault(name, i)
        return table

    def source(self, instruction: Instruction) -> str:
        """`file:line` of the innermost frame outside installed packages, else the innermost; '' unknown."""
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        chain = self.frames.get(int(frame.group(1)), ()) if frame else ()
        if not chain:
            old = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.attributes)
            return f"{old.group(1)}:{old.group(2) or 0}" if old else ""
        return next((s for s in chain if "-packages/" not in s), chain[0])


def op_name(instruction: Instruction) -> str:
    """The traced name, `jit(step)/while/body/dot_general`; '' where there is none."""
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return found.group(1).removeprefix(EXPORTED_PREFIX).replace("\\'", "'") if found else ""


def parse_shape(text: str) -> Shape:
    """`f32[8,4]{1,0}`, `(bf16[2]{0}, (u32[], token[]))`, layouts and bounds ignored."""
    text = text.strip()
    if text.startswith("("):
        return Shape(None, tuple(parse_shape(part) for part in split_top(text[1:-1])))
    found = re.match(r"([a-z]\w*)\[([^\]]*)\]", text)
    if not found:
        return Shape(Array("token", ()))
    dims = tuple(int(d.strip().removeprefix("<=")) for d in found.group(2).split(",") if d.strip())
    return Shape(Array(found.group(1), dims))


def split_top(text: str) -> list[str]:
    """Parts between commas that stand in no bracket and no string."""
    parts, depth, start, quoted = [], 0, 0, False
    for at, char in enumerate(text):
        if quoted:
            quoted = char != '"' or text[at - 1] == "\\"
        elif char == '"':
            quoted = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


def balanced(text: str, start: int) -> int:
    """Index just after the bracket that closes the one at `start`; strings are skipped."""
    depth, quoted, at = 0, False, start
    while at < len(text):
        char = text[at]
        if quoted:
            if char == "\\":
                at += 1
            elif char == '"':
                quoted = False
        elif char == '"':
            quoted = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


def parse_module(text: str) -> Module:
    """The computations of `compiled.as_text()`; raises ValueError where there is no entry."""
    text = re.sub(r"/\*.*?\*/", "", text)
    computations: dict[str, Computation] = {}
    entry, name, body = "", "", []
    for line in text.splitlines():
        if name:
            if line.startswith("}"):
                computations[name] = Computation(name, tuple(body))
                name, body = "", []
            elif (instruction := _parse_instruction(line)) is not None:
                body.append(instruction)
        elif line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(|\{)", line)):
            name = head.group(2)
            entry = name if head.group(1) else entry
    if not entry:
        raise ValueError(f"No ENTRY computation in the module text ({len(text)} characters).")
    return Module(computations, entry, _devices(text), _frames(text))


_HEAD = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")


def _parse_instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if not head:
        return None
    start = head.end()
    stop = balanced(line, start) if line[start] == "(" else line.find(" ", start)
    opened = line.find("(", stop)
    if stop < 0 or opened < 0:
        return None
    closed = balanced(line, opened)
    inside = line[opened + 1:closed - 1]
    opcode = line[stop:opened].strip()
    plain = opcode in ("constant", "parameter")
    operands = () if plain else tuple(p.split()[-1].lstrip("%") for p in split_top(inside))
    return Instruction(
        name=head.group(2), opcode=opcode, shape=parse_shape(line[start:stop]), operands=operands,
        literal=inside if plain else "", attributes=line[closed:], is_root=bool(head.group(1)),
    )


def _devices(text: str) -> int:
    header = text.split("\n", 1)[0]
    partitions = re.search(r"num_partitions=(\d+)", header)
    replicas = re.search(r"replica_count=(\d+)", header)
    return int(partitions.group(1) if partitions else 1) * int(replicas.group(1) if replicas else 1)


def _table(text: str, title: str) -> dict[int, str]:
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found.group(1).splitlines() if found else []
    return {int(i): rest for i, rest in (row.split(" ", 1) for row in rows)}


def _field(row: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", row)
    return int(found.group(1)) if found else 0


def _frames(text: str) -> dict[int, tuple[str, ...]]:
    files = {i: row.strip('"') for i, row in _table(text, "FileNames").items()}
    places = {
        i: f"{files.get(_field(row, 'file_name_id'), '?')}:{_field(row, 'line')}"
        for i, row in _table(text, "FileLocations").items()
    }
    rows = _table(text, "StackFrames")
    # Printed parents count from one more than the frames do: the outermost names itself.
    shift = 1 if _field(rows.get(1, ""), "parent_frame_id") == 1 else 0
    chains: dict[int, tuple[str, ...]] = {}
    for i, row in sorted(rows.items()):
        parent = _field(row, "parent_frame_id") - shift
        chains[i] = (places.get(_field(row, "file_location_id"), "?"), *chains.get(parent, ()))
    return chains
