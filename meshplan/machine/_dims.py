"""The links of a machine: dims of the device order, and the algorithms that a collectives library runs over them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshplan.core import CollectiveKind

LinkKind = Literal["switch", "ring", "torus", "fully-connected"]
Duplex = Literal["full", "half"]
AlgorithmName = Literal[
    "ring", "bidirectional-ring", "line", "torus", "direct", "halving-doubling", "tree", "chain", "in-switch",
    "between-switches", "pairwise", "bisection", "send",
]
LINK_KINDS: tuple[LinkKind, ...] = ("switch", "ring", "torus", "fully-connected")
DUPLEX: tuple[Duplex, ...] = ("full", "half")
ALGORITHMS: tuple[AlgorithmName, ...] = (
    "ring", "bidirectional-ring", "line", "torus", "direct", "halving-doubling", "tree", "chain", "in-switch",
    "between-switches", "pairwise", "bisection", "send",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAlgorithm:
    """How a collectives library runs one kind of collective over the links of a dim, with fitted figures.

    `name` is one of the algorithms in `meshplan.machine._legs`; or, for groups over several levels, "chain": the
    inner links' part of an all-reduce that is a "tree" outside, or "between-switches": the outer links' part of one
    that is "in-switch" inside. `efficiency`: the part of the links' rate that its bytes reach.
    `own_bytes_per_second`: the rate at which a device copies (or adds) the piece that it keeps, which comes on top.
    `fixed_seconds`: what a call takes without any bytes, beyond the latency of its messages.
    `seconds_per_root_byte`: times the root of the bytes, what cutting them into pieces costs: a pipeline that cuts B
    bytes into the best number of pieces, each with a cost c beside its bytes, takes B/W + 2 sqrt(c B/W).
    """

    name: AlgorithmName
    kind: CollectiveKind
    efficiency: float = 1.0
    own_bytes_per_second: float = math.inf
    fixed_seconds: float = 0.0
    seconds_per_root_byte: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDim:
    """One dim of the device order and the links along it.

    `bytes_per_second` is what one device can send one way: into the switch ("switch"), over
    all its direct links together ("fully-connected"), over *one* of its links ("ring", "torus";
    a closed ring has two links per device, an open line one at its ends).
    `latency_seconds`: one message from a device to the next. `wraps`: the torus dim is closed
    (a "ring" always is). `duplex`: "half" where both directions of a link share its rate.
    `algorithms`: what the collectives library runs here, with fitted figures; empty: every algorithm
    that the links allow, at their full rate.
    """

    name: str
    size: int
    kind: LinkKind
    bytes_per_second: float
    latency_seconds: float
    wraps: bool = False
    duplex: Duplex = "full"
    algorithms: tuple[LinkAlgorithm, ...] = ()
    source: str = ""

    @property
    def closed(self) -> bool:
        return self.kind == "ring" or self.wraps


@dataclass(frozen=True, slots=True)
class Level:
    """Links of one speed: one dim, or neighbouring dims of one torus, outermost first."""

    dims: tuple[LinkDim, ...]

    @property
    def size(self) -> int:
        return math.prod(d.size for d in self.dims)

    @property
    def kind(self) -> LinkKind:
        return self.dims[0].kind

    @property
    def name(self) -> str:
        return self.dims[0].name.split(".")[0]

    @property
    def shape(self) -> str:
        return "x".join(str(d.size) for d in self.dims)
