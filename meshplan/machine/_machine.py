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
from typing import Any

from meshplan.core import MachineError, format_bytes
from meshplan.machine._chip import Chip, ChipGroup, RemoteMemory
from meshplan.machine._dims import Level, LinkDim


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

    `dims` are outermost (slowest) first. Where several kinds of chip are joined, `groups` are the kinds in
    device order and `chip`, which plans are made for, has of every figure the least (`slowest`).
    Raises MachineError for a dim or rate that cannot be, and for groups that do not add up to the devices.
    """

    name: str
    chip: Chip
    dims: tuple[LinkDim, ...]
    groups: tuple[ChipGroup, ...] = ()
    remote_memory: RemoteMemory | None = None
    aot: Aot | NoAot = NoAot("it was described by hand, without a compiler's name for it")

    def __post_init__(self) -> None:
        for dim in self.dims:
            if dim.size < 1 or dim.bytes_per_second <= 0 or dim.latency_seconds < 0:
                raise MachineError(
                    f"machine '{self.name}': link dim '{dim.name}' has size {dim.size}, "
                    f"{dim.bytes_per_second:g} bytes/s and {dim.latency_seconds:g} s of latency; "
                    "give a size of at least 1, a positive rate and a latency of at least 0."
                )
        found = [g.devices for g in self.groups]
        if found and (min(found) < 1 or sum(found) != self.devices):
            raise MachineError(
                f"machine '{self.name}' has {self.devices} devices and groups of {', '.join(map(str, found))}; "
                "give groups of at least one device that add up."
            )

    @classmethod
    def preset(cls, name: str) -> Machine:
        """A known machine by name and size, as in "tpu-v5e:4x4", "h100:4x8" (nodes x GPUs), "cpu:8".

        TPU sizes are chips per torus dim; "tpu-v5e:2*4x4" is two slices joined by the data-centre
        network; "v100+p100:1x8" is a node of each on one network; "mine.toml:2x8" is a file (`from_toml`).
        Raises MachineError for unknown names and for sizes that the machine does not come in.
        """
        from meshplan.machine._sizes import machine_named

        return machine_named(name)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The known machines, each with an example size: ("a100:1x8", ..., "tpu-v6e:8x8")."""
        from meshplan.machine._presets import preset_names, read_preset

        return tuple(f"{n}:{read_preset(n).size.example}" for n in preset_names())

    @classmethod
    def from_toml(cls, path: str | Path, size: str | None = None) -> Machine:
        """A machine described in a file of the form of `meshplan/machine/presets/*.toml`.

        `size` as in `preset`; by default the file's example. Raises MachineError, with the line, for a key that is
        missing or wrong.
        """
        from meshplan.machine._sizes import machine_in_file

        return machine_in_file(Path(path), size)

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
        from meshplan.machine._describe import describe

        return describe(self)

    def __str__(self) -> str:
        count = f"{self.devices} x {self.chip.name}"
        links = " over ".join(f"{level.name} {level.shape}" for level in reversed(self.levels))
        return f"{self.name}: {count}, {format_bytes(self.memory_bytes)} each" + (f", {links}" if links else "")
