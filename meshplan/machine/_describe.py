"""A machine in lines of text: every figure and where it is from."""

from __future__ import annotations

import math

from meshplan.core import format_bytes, format_flops, format_seconds
from meshplan.machine._chip import Chip, KernelFigures, RemoteMemory
from meshplan.machine._dims import LinkAlgorithm, LinkDim
from meshplan.machine._machine import Machine

Row = tuple[str, str, str]  # label with its indent, value, source


def describe(machine: Machine) -> tuple[str, ...]:
    """See `Machine.describe`."""
    lines: list[str | Row] = [str(machine)]
    if len(machine.groups) > 1:
        for group in machine.groups:
            lines += [f"  {group.devices} x {group.chip.name}", *_chip(group.chip, "    ")]
        lines.append("  planned for, of every figure the least:")
    lines += _chip(machine.chip, "  ")
    if machine.remote_memory is not None:
        lines.append(_remote(machine.remote_memory))
    for dim in machine.dims:
        lines.append(_dim(dim))
        if dim is machine.dims[-1] or dim.kind != "torus":  # the dims of a torus, the innermost, share theirs
            lines += [_algorithm(a) for a in dim.algorithms]
    rows = [line for line in lines if not isinstance(line, str)]
    label, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    return tuple(
        line if isinstance(line, str) else f"{line[0]:<{label}}  {line[1]:<{value}}  {line[2]}" for line in lines
    )


def _figure(label: str, value: str, source: str, indent: str = "  ") -> Row:
    return indent + label, value, source or "no source given"


def _chip(chip: Chip, indent: str) -> list[Row]:
    lines = [
        _figure(f"{dtype} arithmetic", f"{format_flops(rate)}/s", chip.sources.get(f"flops.{dtype}", ""), indent)
        for dtype, rate in chip.flops.items()
    ]
    lines.append(_figure("memory", format_bytes(chip.memory_bytes), chip.sources.get("memory_bytes", ""), indent))
    for label, key in (("memory rate", "memory_bytes_per_second"), ("host rate", "host_bytes_per_second")):
        lines.append(_figure(label, f"{format_bytes(getattr(chip, key))}/s", chip.sources.get(key, ""), indent))
    return lines + [_kernel(k, indent + "  ") for k in chip.kernels]


def _kernel(k: KernelFigures, indent: str) -> Row:
    parts = [format_seconds(k.fixed_seconds)] if k.fixed_seconds else []
    parts += [f"{format_seconds(k.seconds_per_batch)} a batch"] if k.seconds_per_batch else []
    parts += [f"{format_flops(k.flops_per_second)}/s"] if math.isfinite(k.flops_per_second) else []
    parts += [f"{k.elements_per_second:.3g} elements/s"] if math.isfinite(k.elements_per_second) else []
    parts += [f"{format_bytes(k.bytes_per_second)}/s"] if math.isfinite(k.bytes_per_second) else []
    return _figure(" ".join(filter(None, (k.kind, k.name, k.dtype))), " + ".join(parts), k.source, indent)


def _remote(memory: RemoteMemory) -> Row:
    shared = f", {memory.sharers} share it" if memory.scope == "node" else ""
    value = f"{format_bytes(memory.nbytes)}, {format_bytes(memory.bytes_per_second)}/s"
    return _figure(f"memory of the {memory.scope}{shared}", value, memory.source)


def _dim(dim: LinkDim) -> Row:
    shape = dim.kind if dim.kind != "torus" else "torus, closed" if dim.wraps else "torus, open"
    shape += "" if dim.duplex == "full" else ", half duplex"
    value = f"{format_bytes(dim.bytes_per_second)}/s, {format_seconds(dim.latency_seconds)}"
    return _figure(f"{dim.name} x{dim.size} ({shape})", value, dim.source)


def _algorithm(a: LinkAlgorithm) -> Row:
    own = "" if math.isinf(a.own_bytes_per_second) else f", own piece {format_bytes(a.own_bytes_per_second)}/s"
    root = f", {format_seconds(a.seconds_per_root_byte * 1e3)} at 1 MB" if a.seconds_per_root_byte else ""
    value = f"{a.efficiency:.0%}, {format_seconds(a.fixed_seconds)}{root}{own}"
    return _figure(f"{a.kind} by {a.name}", value, a.source, "    ")
