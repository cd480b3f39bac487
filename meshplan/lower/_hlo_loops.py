"""How often a loop of a compiled module runs.

CPU and GPU modules say so (`known_trip_count`). TPU modules do not: there the number follows
from the loop's test, `i < limit`, the value that `i` starts from and the step that the body
adds to it. Any of the three may be a constant on the spot, an element of the loop's state, or inside a
fusion.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshplan.lower._hlo_parse import Computation, Instruction, Module

_SAME_VALUE = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")


@dataclass(frozen=True, slots=True)
class _Scope:
    """A computation and what its parameters are: a fusion's operands, or a loop's state before its first run."""

    computation: Computation
    operands: tuple[tuple[str, _Scope], ...] = ()
    state: tuple[int | None, ...] = ()


def trip_count(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Runs of a loop's body; None where the module does not tell."""
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
    if known:
        return int(known.group(1))
    outside = _Scope(computation)
    init, init_scope = _follow(module, loop.operands[0], outside)
    if init is None or init.opcode != "tuple":
        return None
    state = tuple(_value(module, name, init_scope) for name in init.operands)
    condition = _Scope(module.computations[loop.computations("condition")[0]], state=state)
    body = _Scope(module.computations[loop.computations("body")[0]], state=state)
    test, scope = _follow(module, condition.computation.root.name, condition)
    direction = re.search(r"direction=(\w+)", test.attributes) if test is not None else None
    if test is None or test.opcode != "compare" or direction is None:
        return None
    return _runs(module, test, scope, direction.group(1), body)


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def _runs(module: Module, test: Instruction, scope: _Scope, direction: str, body: _Scope) -> int | None:
    """Of a test of a counter against a limit, in either order of the two."""
    ways = (direction, _MIRRORED.get(direction))
    for counter, limit, way in zip(test.operands, test.operands[::-1], ways, strict=True):
        index = _element(module, counter, scope)
        step = None if index is None else _step(module, index, body)
        start, end = _value(module, counter, scope), _value(module, limit, scope)
        if not step or start is None or end is None or way is None:
            continue
        distance = end - start + ((1 if step > 0 else -1) if way in ("LE", "GE") else 0)
        return max(0, math.ceil(distance / step))
    return None


def _step(module: Module, index: int, body: _Scope) -> int | None:
    """What the body adds to this element of its state, None where it does anything else with it."""
    root = body.computation.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    added, scope = _follow(module, root.operands[index], body)
    if added is None or added.opcode != "add":
        return None
    for one, other in (added.operands, added.operands[::-1]):
        if _element(module, one, scope) == index:
            return _value(module, other, scope)
    return None


def _follow(module: Module, name: str, scope: _Scope) -> tuple[Instruction | None, _Scope]:
    """The instruction that makes a value, past copies, into fusions and out of their parameters."""
    i = scope.computation.by_name.get(name)
    while i is not None:
        if i.opcode in _SAME_VALUE:
            i = scope.computation.by_name.get(i.operands[0])
        elif i.opcode == "fusion":
            inner = module.computations[i.computations("calls")[0]]
            scope = _Scope(inner, operands=tuple((o, scope) for o in i.operands))
            i = inner.root
        elif i.opcode == "parameter" and scope.operands:
            name, scope = scope.operands[int(i.literal)]
            i = scope.computation.by_name.get(name)
        else:
            break
    return i, scope


def _element(module: Module, name: str, scope: _Scope) -> int | None:
    """Which element of the loop's state a value is, None for any other value."""
    i, scope = _follow(module, name, scope)
    if i is None or i.opcode != "get-tuple-element" or not scope.state:
        return None
    return int(re.search(r"index=(\d+)", i.attributes).group(1))  # type: ignore[union-attr]


def _value(module: Module, name: str, scope: _Scope) -> int | None:
    """A whole number known before the first run, else None."""
    i, inner = _follow(module, name, scope)
    if i is not None and i.opcode == "constant" and re.fullmatch(r"-?\d+", i.literal.strip()):
        return int(i.literal)
    index = _element(module, name, scope)
    return None if i is None or index is None or index >= len(inner.state) else inner.state[index]


def unknown_loops(module: Module) -> tuple[str, ...]:
    """`file:line` of each loop whose number of runs is not in the module; such a loop counts once."""
    found = [
        module.source(i) or i.name
        for c in module.computations.values() for i in c.instructions
        if i.opcode == "while" and trip_count(module, i, c) is None
    ]
    return tuple(dict.fromkeys(found))
