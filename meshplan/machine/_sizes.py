"""From a preset and the text of a size to a machine: "4x4", "2*4x4" (slices), "4x8" (nodes), "8".

Presets joined with "+" are nodes of several kinds; a name that ends in ".toml", with or without a size, is a file.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshplan.core import MachineError, nearest
from meshplan.machine._chip import ChipGroup, slowest
from meshplan.machine._dims import LinkDim
from meshplan.machine._machine import Aot, Machine, NoAot
from meshplan.machine._presets import LinkFigures, Preset, load_preset, preset_names, read_preset

_SIZE = re.compile(r"(?:(\d+)\*)?(\d+(?:x\d+)*)")


def machine_named(name: str) -> Machine:
    """See `Machine.preset`."""
    base, toml, size = name.rpartition(".toml")
    if toml:
        return machine_in_file(Path(base + toml), size.removeprefix(":") or None)
    base, colon, size = name.partition(":")
    presets = [_preset(part, name) for part in base.split("+")]
    if not colon:
        raise MachineError(f"machine '{name}' has no size; {_advice(presets[0])}.")
    return machine_of(presets[0], size) if len(presets) == 1 else _joined(presets, size)


def machine_in_file(path: Path, size: str | None = None) -> Machine:
    """See `Machine.from_toml`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MachineError(f"machine file {path}: it cannot be read ({error.strerror}); give a file there.") from error
    preset = load_preset(text, path.name)
    return machine_of(preset, preset.size.example if size is None else size)


def _preset(base: str, name: str) -> Preset:
    known = preset_names()
    if base in known:
        return read_preset(base)
    examples = [f"{n}:{read_preset(n).size.example}" for n in known]
    near = nearest(base, known, 2)
    hint = f"{near} " if near.startswith("Nearest") else ""
    raise MachineError(f"machine '{name}': there is no preset '{base}'. {hint}Presets: {', '.join(examples)}.")


def _joined(presets: list[Preset], size: str) -> Machine:
    """Nodes of several kinds on one network: `size` is nodes of each kind x GPUs per node.

    Links between nodes and inside them are those of the slowest kind; where kinds have links of different form,
    the slowest decides that too.
    """
    base = "+".join(p.name for p in presets)
    if len({p.name for p in presets}) < len(presets) or any(p.size.form != "nodes" for p in presets):
        raise MachineError(
            f"machine '{base}:{size}': only different kinds of GPU node can be joined with '+', as in 'v100+p100:1x8'."
        )
    parts = [machine_of(p, size) for p in presets]
    between, inside = (min((p.dims[i] for p in parts), key=lambda d: d.bytes_per_second) for i in (0, 1))
    nodes = parts[0].dims[0].size
    return Machine(
        name=f"{base}:{size}", chip=slowest([p.chip for p in parts]),
        dims=(replace(between, size=nodes * len(parts)), inside),
        groups=tuple(ChipGroup(chip=p.chip, devices=p.devices) for p in parts),
        aot=NoAot("a compiler is told of one kind of chip, and this machine has several"),
    )


def machine_of(preset: Preset, size: str) -> Machine:
    """The machine of a preset at a size given in words.

    Raises MachineError, with the nearest size there is, where the machine does not come in `size`.
    """
    match = _SIZE.fullmatch(size)
    if match is None or 0 in (numbers := [int(n) for n in re.findall(r"\d+", size)]):
        raise MachineError(f"machine '{preset.name}:{size}': '{size}' is not a size; {_advice(preset)}.")
    slices = int(match[1]) if match[1] else 1
    counts = tuple(numbers[1:] if match[1] else numbers)
    if match[1] and preset.size.form != "torus":
        raise MachineError(f"machine '{preset.name}:{size}': only TPUs come in slices ('*'); {_advice(preset)}.")
    dims, aot = {"torus": _torus, "nodes": _nodes, "flat": _flat}[preset.size.form](preset, counts, slices)
    shape = "x".join(map(str, counts))
    name = f"{preset.name}:{slices}*{shape}" if slices > 1 else f"{preset.name}:{shape}"
    known = NoAot(preset.aot.missing) if preset.aot.missing else aot
    return Machine(name=name, chip=preset.chip, dims=dims, remote_memory=preset.remote_memory, aot=known)


def _advice(preset: Preset) -> str:
    form = {"torus": "chips per torus dim", "nodes": "nodes x GPUs per node", "flat": "a number of devices"}
    return f"write {form[preset.size.form]}, as in '{preset.name}:{preset.size.example}'"


def _dim(link: LinkFigures, size: int, name: str = "", wraps: bool = False) -> LinkDim:
    return LinkDim(
        name=name or link.name, size=size, kind=link.kind, bytes_per_second=link.bytes_per_second,
        latency_seconds=link.latency_seconds, wraps=wraps, duplex=link.duplex, algorithms=link.algorithms,
        source=link.source,
    )


def _torus(preset: Preset, counts: tuple[int, ...], slices: int) -> tuple[tuple[LinkDim, ...], Aot]:
    rule, shape = preset.size, "x".join(map(str, counts))
    if len(counts) != len(rule.largest):
        raise MachineError(
            f"machine '{preset.name}:{shape}': its torus has {len(rule.largest)} dims, found {len(counts)}; "
            f"{_advice(preset)}."
        )
    hosts = math.prod(counts) == 1 or all(c % h == 0 for c, h in zip(counts, rule.host, strict=True))
    limits = list(zip(counts, rule.host, rule.largest, strict=True))
    if not hosts or math.prod(counts) > rule.chips or any(c > most for c, _, most in limits):
        near = [max(host, min(most, round(c / host) * host)) for c, host, most in limits]
        hint = f" Nearest: '{preset.name}:{'x'.join(map(str, near))}'." if math.prod(near) <= rule.chips else ""
        raise MachineError(
            f"machine '{preset.name}:{shape}' does not exist: a slice is one chip or whole hosts of "
            f"{'x'.join(map(str, rule.host))} chips, at most {max(rule.largest)} along a dim and "
            f"{rule.chips} in all.{hint}"
        )
    multiple = [c % rule.wrap_multiple == 0 for c in counts]
    wraps = multiple if rule.wrap_each else [all(multiple)] * len(counts)
    between, inside = preset.links
    torus = [
        _dim(inside, c, f"{inside.name}.{'xyz'[i]}", wraps=w)
        for i, (c, w) in enumerate(zip(counts, wraps, strict=True))
    ]
    outer = [_dim(between, slices)] if slices > 1 else []
    extra: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if math.prod(counts) == 1:
        extra["chips_per_host_bounds"] = [1, 1, 1]
    return tuple(outer + torus), Aot(platform=preset.aot.platform, topology=preset.aot.prefix + shape, extra=extra)


def _nodes(preset: Preset, counts: tuple[int, ...], slices: int) -> tuple[tuple[LinkDim, ...], Aot]:
    shape, most = "x".join(map(str, counts)), preset.size.largest[0]
    if len(counts) != 2:
        raise MachineError(f"machine '{preset.name}:{shape}': found {len(counts)} numbers; {_advice(preset)}.")
    nodes, per_node = counts
    if per_node > most:
        hint = f"'{preset.name}:{math.ceil(nodes * per_node / most)}x{most}'"
        raise MachineError(
            f"machine '{preset.name}:{shape}': a node has at most {most} GPUs, found {per_node}; write {hint}."
        )
    between, inside = preset.links
    aot = Aot(
        platform=preset.aot.platform, topology=f"1x{nodes}x{per_node}",
        extra={"target_config": preset.aot.target_config},
    )
    return (_dim(between, nodes), _dim(inside, per_node)), aot


def _flat(preset: Preset, counts: tuple[int, ...], slices: int) -> tuple[tuple[LinkDim, ...], Aot]:
    if len(counts) != 1:
        shape = "x".join(map(str, counts))
        raise MachineError(f"machine '{preset.name}:{shape}': found {len(counts)} numbers; {_advice(preset)}.")
    return (_dim(preset.links[0], counts[0]),), Aot(platform=preset.aot.platform, topology=str(counts[0]))
