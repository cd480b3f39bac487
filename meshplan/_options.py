"""Every knob of the planner, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshplan.core import ArgumentError, nearest

RANKS = ("sum", "timeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to plan. All have defaults that suit a first plan.

    max_axes: mesh shapes with up to this many axes are searched (1 to 3).
    solver_seconds: time limit of the solver for one mesh shape. Problems too large for an exact answer
        are solved by descent, axis by axis; the plan's gap then says how far the bound is.
    tie_radius: layers whose neighbourhoods agree this many steps far share their decisions; larger
        ties less.
    memory_fraction: part of the chip's memory that a plan may fill where no `memory_limit` is given;
        the rest is for fragmentation and for what the prediction misses.
    equal_names: dims of equal name (`mp.dims`, `mp.params`) get equal axes wherever they are named. Off by
        default: the search is then free to split the batch one way in a block and another way at the logits,
        and the names label dims in reports and in `logical_axis_rules`.
    follow_shardings: shardings that the step itself states (`with_sharding_constraint`, `reshard`, `out_sharding`) and
        those of the arguments (`ShapeDtypeStruct(sharding=...)`, arrays on a mesh) are pins. Off: the planner chooses
        there too, and a note says how many it passed over.
    rank_by: what the last choice among the best plans of every mesh and the templates goes by. "sum": FLOPs at the
        chip's peak and every collective one after the other, as `Audit.seconds` prices a compiled module. "timeline":
        the modelled timeline, with memory traffic and with collectives hidden beside computation (`Plan.timeline`); a
        step that is bound by memory (convolutions, small batches) often runs faster so.
    rules: factor rules for primitives that meshplan does not know, by name ("ffi_call:target" or
        "pallas_call:name" for one kernel): a function of an `OpView`, or text in JAX's notation
        ("i j, j k -> i k"). Of a `pallas_call`, whose grid is that of whole arrays, a pair of the rule and the function
        that a shard calls with its parts of the operands: ("i j -> i j", kernel).
    """

    max_axes: int = 3
    solver_seconds: float = 30.0
    tie_radius: int = 2
    memory_fraction: float = 0.9
    equal_names: bool = False
    follow_shardings: bool = True
    rank_by: Literal["sum", "timeline"] = "sum"
    rules: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rank_by not in RANKS:
            raise ArgumentError(f"Options(rank_by={self.rank_by!r}) is unknown. {nearest(str(self.rank_by), RANKS)}")
