"""What one device is: arithmetic, memory, the way to its host, and memory beyond it that it can reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshplan.core import MachineError

Platform = Literal["cpu", "gpu", "tpu"]
KernelKind = Literal[
    "dispatch", "kernel", "first-touch", "apart", "matmul", "convolution", "map", "reduce", "transpose", "gather",
    "scatter",
]
MemoryScope = Literal["chip", "node", "pool"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "gpu", "tpu")
KERNEL_KINDS: tuple[KernelKind, ...] = (
    "dispatch", "kernel", "first-touch", "apart", "matmul", "convolution", "map", "reduce", "transpose", "gather",
    "scatter",
)
MEMORY_SCOPES: tuple[MemoryScope, ...] = ("chip", "node", "pool")

# Where a dtype has no rate of its own: the rates to look for, first hit wins. Arithmetic that
# a chip lacks runs in the next wider type it has.
_EIGHT_BIT_FLOAT = ("float8_e4m3fn", "bfloat16", "float16", "float32", "float64")
_EIGHT_BIT_INT = ("int8", "bfloat16", "float16", "float32", "float64")
_SIXTEEN_BIT = ("bfloat16", "float16", "float32", "float64")
_FALLBACK = {
    "float4": _EIGHT_BIT_FLOAT, "float6": _EIGHT_BIT_FLOAT, "float8": _EIGHT_BIT_FLOAT,
    "bool": _EIGHT_BIT_INT, "int2": _EIGHT_BIT_INT, "int4": _EIGHT_BIT_INT, "int8": _EIGHT_BIT_INT,
    "uint2": _EIGHT_BIT_INT, "uint4": _EIGHT_BIT_INT, "uint8": _EIGHT_BIT_INT,
    "bfloat16": _SIXTEEN_BIT, "float16": _SIXTEEN_BIT[1::-1] + _SIXTEEN_BIT[2:],
    "int16": ("float32", "float64"), "uint16": ("float32", "float64"),
    "float32": ("float32", "float64"), "int32": ("float32", "float64"), "uint32": ("float32", "float64"),
    "complex64": ("float32", "float64"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """What kernels of one kind were measured to take on a device, all devices at work at the same time.

    Seconds: fixed_seconds + batches * seconds_per_batch + flops / flops_per_second + elements / elements_per_second +
    bytes / bytes_per_second. `name` tells kinds of one kind apart: the primitive of a "map" ("" for what only moves,
    "cold" from and to memory beyond the caches), "minor" or "major" of a "reduce" (which dim it goes over). "dispatch"
    is what a call of a compiled program takes beside its kernels (a batch: an argument and a result), "kernel" what
    starting one adds to what it does, "first-touch" memory that the program asks for anew ("large": in one block that
    the system takes back every time), "apart" how long devices wait for each other at a collective (a batch: a second
    of computation before it).
    """

    kind: KernelKind
    name: str = ""
    dtype: str = ""
    fixed_seconds: float = 0.0
    seconds_per_batch: float = 0.0
    flops_per_second: float = math.inf
    elements_per_second: float = math.inf
    bytes_per_second: float = math.inf
    source: str = ""

    def seconds(
        self, *, flops: float = 0.0, elements: float = 0.0, nbytes: float = 0.0, batches: float = 0.0, runs: float = 1.0
    ) -> float:
        """Of `runs` kernels that do so much together."""
        moved = elements / self.elements_per_second + nbytes / self.bytes_per_second
        return runs * self.fixed_seconds + batches * self.seconds_per_batch + flops / self.flops_per_second + moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One device: arithmetic, memory, and the way to its host.

    `flops`: dtype name -> peak FLOP/s, dense, a multiply and an add counting 2; "float32" is the
    rate of JAX's default matmul precision. `memory_bytes` is what a program may use.
    `host_bytes_per_second` is one way, per device. `sources`: field (flops by dtype) -> where
    the figure is from. `kernels`: what `meshplan calibrate` measured by kind of kernel, none where nothing was.
    `clock_hertz` turns a compiler's cycles into seconds, None where it counts none.
    """

    name: str
    platform: Platform
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_second: float
    host_bytes_per_second: float
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    kernels: tuple[KernelFigures, ...] = ()
    clock_hertz: float | None = None

    def kernel(self, kind: KernelKind, name: str = "", dtype: str = "") -> KernelFigures | None:
        """The measured figures of a kind: of this name and dtype, else of the name, else of the kind's first."""
        same = [k for k in self.kernels if k.kind == kind]
        for fits in (
            [k for k in same if (k.name, k.dtype) == (name, dtype)], [k for k in same if k.name == name], same,
        ):
            if fits:
                return fits[0]
        return None

    def flops_for(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype by name.

        Without a rate of its own a dtype runs at the rate of the next wider type that has one
        (8 bit -> bfloat16 -> float32 -> float64); where none is wider (float64 on TPU, or a
        dtype unknown here) at the slowest rate of the chip, which is then an upper bound.
        """
        if dtype in self.flops:
            return self.flops[dtype]
        family = dtype.split("_")[0] if dtype.startswith(("float4", "float6", "float8")) else dtype
        for wider in _FALLBACK.get(family, ()):
            if wider in self.flops:
                return self.flops[wider]
        return min(self.flops.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipGroup:
    """A stretch of the device order that is of one kind of chip; several make a heterogeneous machine."""

    chip: Chip
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMemory:
    """Memory that devices reach beyond their own: a host's, or a pool on a fabric.

    `nbytes` is what all that share it have together: one device ("chip"), the `sharers` devices of a node
    ("node"), or all devices of the machine ("pool"). `bytes_per_second` is one way, for one device, all sharers
    at once.
    """

    scope: MemoryScope
    nbytes: int
    bytes_per_second: float
    latency_seconds: float = 0.0
    sharers: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.bytes_per_second <= 0 or self.latency_seconds < 0 or self.sharers < 1:
            raise MachineError(
                f"remote memory of scope '{self.scope}' has {self.nbytes} bytes, {self.bytes_per_second:g} bytes/s, "
                f"{self.latency_seconds:g} s of latency and {self.sharers} sharers; give at least one byte and one "
                "sharer, a positive rate and a latency of at least 0."
            )

    def nbytes_per_device(self, devices: int) -> int:
        """What is left for one device where each of the machine's `devices` takes an equal part."""
        return self.nbytes // {"chip": 1, "node": self.sharers, "pool": devices}[self.scope]


def slowest(chips: Sequence[Chip]) -> Chip:
    """The chip that stands for a mixture: of every figure the least, since equal shards wait for the slowest.

    Rates of a dtype are those of `Chip.flops_for`, so that a dtype that one chip lacks counts at the rate it is
    computed with there. Raises MachineError for no chips and for chips of several platforms.
    """
    if not chips or len({c.platform for c in chips}) > 1:
        found = ", ".join(f"{c.name} ({c.platform})" for c in chips) or "none"
        raise MachineError(f"a machine of several kinds of chip needs chips of one platform, found {found}.")
    if len(set(chips)) == 1:
        return chips[0]
    names = list(dict.fromkeys(c.name for c in chips))

    def least(field_name: str) -> Chip:
        return min(chips, key=lambda c: getattr(c, field_name))

    flops: dict[str, float] = {}
    sources: dict[str, str] = {}
    for dtype in dict.fromkeys(d for c in chips for d in c.flops):
        slow = min(chips, key=lambda c: c.flops_for(dtype))
        flops[dtype] = slow.flops_for(dtype)
        own = slow.sources.get(f"flops.{dtype}", "computed in the next wider type")
        sources[f"flops.{dtype}"] = f"{slow.name}, the slowest: {own}"
    figures: dict[str, float] = {}
    for key in ("memory_bytes", "memory_bytes_per_second", "host_bytes_per_second"):
        slow = least(key)
        figures[key] = getattr(slow, key)
        sources[key] = f"{slow.name}, the least: {slow.sources.get(key, 'no source given')}"
    return Chip(
        name=" + ".join(names), platform=chips[0].platform, flops=flops, sources=sources,
        memory_bytes=int(figures["memory_bytes"]), memory_bytes_per_second=figures["memory_bytes_per_second"],
        host_bytes_per_second=figures["host_bytes_per_second"],
    )
