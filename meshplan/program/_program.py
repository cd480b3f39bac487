"""A traced step as flat lists: values, operations, regions.

Calls (jit, custom derivatives, remat) are opened in place. `scan`, `while` and `cond` are
regions: their bodies' operations stand in the same list with the region's id, and what
crosses a region's edge is an operation of its own (`Cross`), so that a value has one spec
inside and one outside and moving between the two has a price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshplan.hints import Followed, Pin
from meshplan.rules import Aval, OpRule, OpView

Key = tuple[int, ...]

# operations that move values over the edge of a region
CARRY = "region.carry"  # operands: initial value, the body's carry out; result: carry in = final value
SLICE = "region.slice"  # a scanned operand -> one step's piece
STACK = "region.stack"  # one step's result -> the stacked result
MERGE = "region.merge"  # results of a cond's branches -> the cond's result
PIN = "region.pin"  # a value -> the same value where the user may have pinned it; it decides by itself, like the others
CROSSINGS = frozenset({CARRY, SLICE, STACK, MERGE, PIN})


@dataclass(frozen=True, slots=True)
class Region:
    """A loop body or branch. `trips` is how often it runs each time its parent runs (0 for a loop of no steps)."""

    kind: str
    trips: float
    parent: int
    key: Key
    known_trips: bool = True


def runs_of(regions: Sequence[Region], region: int) -> float:
    """How often a region's body runs in a step: its trips times those of all regions around it; 1 for -1."""
    total = 1.0
    while region >= 0:
        total *= regions[region].trips
        region = regions[region].parent
    return total


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the program. `op` is the producing operation's index, or -1 (argument, constant)."""

    aval: Aval
    op: int = -1
    path: str = ""
    constant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One equation. `operands` are value ids, None for a literal. `count`: runs per step.

    `key` finds the equation again in the jaxpr (see lower/). `scope` numbers the
    rematerialised block it belongs to, 0 for none: equal computations in different scopes
    are not merged by the compiler.
    """

    index: int
    key: Key
    primitive: str
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    view: OpView
    rule: OpRule
    region: int
    scope: int
    count: float
    source: str
    stack: str
    ruled: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """A rematerialised block of the step itself: `values` enter it, None for a literal."""

    key: Key
    values: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments or results. `pair`: the other end of a donated pair, or -1."""

    value: int | None
    path: str
    aval: Aval
    pair: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The whole step. `names[v]` are names of value v's dims that the user gave; `consumers[v]` the
    (operation, operand index) pairs that read value v; `notes` what a person should know of the program.
    `states_shardings`: the step's own equations say where values lie, so that it runs on their mesh only.
    `pins[v]`: what the step itself fixes of value v, by a constraint or by the sharding of an argument. `follows[i]`,
    `results_follow[j]`: the parameter among the arguments to which leaf i or result leaf j, of an optimizer's state,
    belongs."""

    values: list[Value]
    ops: list[Op]
    regions: list[Region]
    args: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    names: dict[int, tuple[str | None, ...]]
    jaxpr: Any
    in_tree: Any
    out_tree: Any
    notes: tuple[str, ...] = ()
    states_shardings: bool = False
    pins: dict[int, Pin] = field(default_factory=dict)
    follows: dict[int, Followed] = field(default_factory=dict)
    results_follow: dict[int, Followed] = field(default_factory=dict)
    consumers: list[list[tuple[int, int]]] = field(default_factory=list)
    blocks: tuple[Block, ...] = ()

    def nbytes(self, value: int) -> int:
        """Bytes of the whole value."""
        return self.values[value].aval.nbytes
