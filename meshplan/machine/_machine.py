"""A machine is one kind of chip and a stack of link dims, the fastest (innermost) last.

Devices are numbered row-major over the dims, so that a mesh whose last axis is innermost
lays its last axis on the fastest links. Neighbouring torus dims of one speed are one
*level*: a TPU slice is one level; GPU nodes are two (InfiniBand between, NVLink inside).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshplan.core import MachineError, format_bytes, format_flops, format_seconds

Platform = Literal["cpu", "gpu", "tpu"]
LinkKind = Literal["switch", "ring", "torus", "fully-connected"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "gpu", "tpu")
LINK_KINDS: tuple[LinkKind, ...] = ("switch", "ring", "torus", "fully-connected")

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
class Chip:
    """One device: arithmetic, memory, and the way to its host.

    `flops`: dtype name -> peak FLOP/s, dense, a multiply and an add counting 2; "float32" is the
    rate of JAX's default matmul precision. `memory_bytes` is what a program may use.
    `host_bytes_per_second` is one way, per device. `sources`: field (flops by dtype) -> where
    the figure is from.
    """

    name: str
    platform: Platform
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_second: float
    host_bytes_per_second: float
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

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
class LinkDim:
    """One dim of the device order and the links along it.

    `bytes_per_second` is what one device can send one way: into the switch ("switch"), over
    all its direct links together ("fully-connected"), over *one* of its links ("ring", "torus";
    a closed ring has two links per device, an open line one at its ends).
    `latency_seconds`: one message from a device to the next. `wraps`: the torus dim is closed
    (a "ring" always is).
    """

    name: str
    size: int
    kind: LinkKind
    bytes_per_second: float
    latency_seconds: float
    wraps: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Aot:
    """How to describe the machine to an ahead-of-time compiler (`jax.experimental.topologies`)."""

    platform: str
    topology: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class NoAot:
    """Why no ahead-of-time compiler can be told of the machine."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Chips and links; see `preset` and `detect`, or build one from `Chip` and `LinkDim`s.

    `dims` are outermost (slowest) first. Raises MachineError for a dim or rate that cannot be.
    """

    name: str
    chip: Chip
    dims: tuple[LinkDim, ...]
    aot: Aot | NoAot = NoAot("it was described by hand, without a compiler's name for it")

    def __post_init__(self) -> None:
        for dim in self.dims:
            if dim.size < 1 or dim.bytes_per_second <= 0 or dim.latency_seconds < 0:
                raise MachineError(
                    f"machine '{self.name}': link dim '{dim.name}' has size {dim.size}, "
                    f"{dim.bytes_per_second:g} bytes/s and {dim.latency_seconds:g} s of latency; "
                    "give a size of at least 1, a positive rate and a latency of at least 0."
                )

    @classmethod
    def preset(cls, name: str) -> Machine:
        """A known machine by name and size, as in "tpu-v5e:4x4", "h100:4x8" (nodes x GPUs), "cpu:8".

        TPU sizes are chips per torus dim; "tpu-v5e:2*4x4" is two slices joined by the data-centre
        network. Raises MachineError for unknown names and for sizes that the machine does not come in.
        """
        from meshplan.machine._sizes import machine_named

        return machine_named(name)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The known machines, each with an example size: ("a100:1x8", ..., "tpu-v6e:8x8")."""
        from meshplan.machine._presets import preset_names, read_preset

        return tuple(f"{n}:{read_preset(n).size.example}" for n in preset_names())

    @classmethod
    def from_toml(cls, path: str | Path, size: str) -> Machine:
        """A machine described in a file of the form of `meshplan/machine/presets/*.toml`."""
        from meshplan.machine._presets import load_preset
        from meshplan.machine._sizes import machine_of

        path = Path(path)
        return machine_of(load_preset(path.read_text(encoding="utf-8"), path.name), size)

    @classmethod
    def detect(cls, devices: Sequence[Any] | None = None) -> Machine:
        """The machine that these jax devices (default: all of this process's job) make up.

        Raises MachineError for a kind of device that no preset describes, for hosts or slices
        of unequal size, and for TPU devices that do not fill a box of the torus.
        """
        from meshplan.machine._detect import detect

        return detect(devices)

    @property
    def devices(self) -> int:
        return math.prod(d.size for d in self.dims)

    @property
    def memory_bytes(self) -> int:
        """Bytes one device can use."""
        return self.chip.memory_bytes

    @property
    def levels(self) -> tuple[Level, ...]:
        """Dims grouped by speed, outermost first; dims of size 1 have no links and no level."""
        groups: list[list[LinkDim]] = []
        for dim in self.dims:
            if dim.size == 1:
                continue
            last = groups[-1][-1] if groups else None
            joins = last is not None and dim.kind == last.kind == "torus"
            if joins and last is not None and dim.bytes_per_second == last.bytes_per_second:
                groups[-1].append(dim)
            else:
                groups.append([dim])
        return tuple(Level(tuple(g)) for g in groups)

    def aot_topology(self) -> tuple[str, str, dict[str, Any]]:
        """(platform, topology name, further arguments) for an ahead-of-time compiler.

        tpu: ("tpu", "v5e:2x4", {}); gpu: ("cuda", "1x4x8", {"target_config": text}), where the name
        is slices x hosts x devices per host; cpu: ("cpu", "8", {}), a count of host devices.
        Raises MachineError where no compiler can be told of this machine.
        """
        if isinstance(self.aot, NoAot):
            raise MachineError(
                f"machine '{self.name}' cannot be compiled for ahead of time: {self.aot.reason}. "
                "Compile on the devices themselves, or choose another target."
            )
        return self.aot.platform, self.aot.topology, dict(self.aot.extra)

    def describe(self) -> tuple[str, ...]:
        """Lines of text: every figure and where it is from."""
        chip = self.chip
        lines = [str(self)]

        def figure(label: str, value: str, source: str) -> None:
            lines.append(f"  {label:<28}{value:<20}{source or 'no source given'}")

        for dtype, rate in chip.flops.items():
            figure(f"{dtype} arithmetic", f"{format_flops(rate)}/s", chip.sources.get(f"flops.{dtype}", ""))
        figure("memory", format_bytes(chip.memory_bytes), chip.sources.get("memory_bytes", ""))
        for label, key in (("memory rate", "memory_bytes_per_second"), ("host rate", "host_bytes_per_second")):
            figure(label, f"{format_bytes(getattr(chip, key))}/s", chip.sources.get(key, ""))
        for dim in self.dims:
            shape = dim.kind if dim.kind != "torus" else "torus, closed" if dim.wraps else "torus, open"
            rate = f"{format_bytes(dim.bytes_per_second)}/s"
            figure(f"{dim.name} x{dim.size} ({shape})", f"{rate}, {format_seconds(dim.latency_seconds)}", dim.source)
        return tuple(lines)

    def __str__(self) -> str:
        count = f"{self.devices} x {self.chip.name}"
        links = " over ".join(f"{level.name} {level.shape}" for level in reversed(self.levels))
        return f"{self.name}: {count}, {format_bytes(self.memory_bytes)} each" + (f", {links}" if links else "")
