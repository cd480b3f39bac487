"""The machine that jax devices make up, from their own attributes.

TPU: `device_kind` names the chip, `slice_index` the slice, `coords` the place in the torus.
GPU: nodes by `slice_index` where it tells devices apart (the runtime sets it per host), else by
`process_index`; where every process has one device and there is one slice, all devices share a
node. CPU: a count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from meshplan.core import MachineError
from meshplan.machine._machine import Machine
from meshplan.machine._presets import Preset, preset_names, read_preset
from meshplan.machine._sizes import machine_of


def detect(devices: Sequence[Any] | None = None) -> Machine:
    """See `Machine.detect`."""
    if devices is None:
        import jax

        devices = jax.devices()
    devices = list(devices)
    if not devices:
        raise MachineError("no devices to detect a machine from; give at least one jax device.")
    kinds = sorted({_kind(d) for d in devices})
    if len(kinds) > 1:
        raise MachineError(f"devices of several kinds: {', '.join(kinds)}; give devices of one kind.")
    preset = _preset_for(kinds[0])
    if preset.size.form == "flat":
        return machine_of(preset, str(len(devices)))
    if preset.size.form == "nodes":
        counts = Counter(_node_keys(devices))
        per_node = _equal(counts, "node")
        return machine_of(preset, f"{len(counts)}x{per_node}")
    return machine_of(preset, _torus_size(preset, devices))


def device_order(devices: Sequence[Any]) -> list[Any]:
    """The devices in the order of `Machine.dims`: slow links outermost, the last torus dim innermost.

    A mesh over `np.array(device_order(devices)).reshape(sizes)` has its last axis on the fastest links.
    """
    devices = list(devices)
    if devices and getattr(devices[0], "coords", None) is not None and devices[0].platform == "tpu":
        return sorted(devices, key=lambda d: (_slice(d), tuple(d.coords), getattr(d, "core_on_chip", 0), d.id))
    keyed = zip(_node_keys(devices), devices, strict=True)
    return [d for _, d in sorted(keyed, key=lambda kd: (kd[0], kd[1].process_index, kd[1].id))]


def _kind(device: Any) -> str:
    return "cpu" if device.platform == "cpu" else str(device.device_kind).strip()


def _preset_for(kind: str) -> Preset:
    known: list[str] = []
    for name in preset_names():
        preset = read_preset(name)
        if kind in preset.device_kinds:
            return preset
        known += preset.device_kinds
    raise MachineError(
        f"device kind '{kind}' is unknown; known kinds: {', '.join(known)}. "
        "Name a similar machine with Machine.preset, or describe yours with Machine.from_toml."
    )


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _node_keys(devices: list[Any]) -> list[int]:
    slices = [_slice(d) for d in devices]
    if len(set(slices)) > 1:
        return slices
    processes = [d.process_index for d in devices]
    one_each = len(set(processes)) == len(devices)
    return slices if one_each else processes


def _equal(counts: Counter[int], what: str) -> int:
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{what} {k}: {n}" for k, n in sorted(counts.items()))
        raise MachineError(f"the {what}s have unequal numbers of devices ({found}); give {what}s of one size.")
    return next(iter(counts.values()))


def _torus_size(preset: Preset, devices: list[Any]) -> str:
    slices = Counter(_slice(d) for d in devices)
    per_slice = _equal(slices, "slice")
    dims = len(preset.size.largest)
    boxes = set()
    for index in slices:
        places = Counter(tuple(d.coords)[:dims] for d in devices if _slice(d) == index)
        if max(places.values()) > 1:
            raise MachineError(
                f"{preset.chip.name}: {max(places.values())} devices on one chip (one per core); "
                "the presets describe one device per chip."
            )
        box = tuple(max(c) - min(c) + 1 for c in zip(*places, strict=True))
        boxes.add(box)
        if math.prod(box) != per_slice:
            shape = "x".join(map(str, box))
            raise MachineError(
                f"{preset.chip.name}: {per_slice} devices do not fill the box of {shape} that they span; "
                "give whole slices."
            )
    if len(boxes) > 1:
        found = ", ".join("x".join(map(str, b)) for b in sorted(boxes))
        raise MachineError(f"{preset.chip.name}: slices of different shapes ({found}); give slices of one shape.")
    shape = "x".join(map(str, boxes.pop()))
    return f"{len(slices)}*{shape}" if len(slices) > 1 else shape
