"""A calibration as a machine file: the preset's own text, with the measured figures in place of its figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshplan.machine._calibrate_fit import LinkFit
from meshplan.machine._calibrate_probes import COLD
from meshplan.machine._chip import KernelFigures
from meshplan.machine._machine import Machine
from meshplan.machine._presets import load_preset, preset_text
from meshplan.machine._sizes import machine_of

if TYPE_CHECKING:
    from meshplan.machine._calibrate import Calibration

_HEADER = re.compile(r"\[\[?([\w.]+)\]\]?")
_KEY = re.compile(r"(\w+)\s*=")
_KERNEL_KEYS = (
    "fixed_seconds", "seconds_per_batch", "flops_per_second", "elements_per_second", "bytes_per_second",
)
Section = tuple[str, list[str]]


def calibrated(found: Calibration) -> Machine:
    """See `Calibration.machine`: read from the file's text, so that the two are never apart."""
    preset = load_preset(to_toml(found), "calibration")
    return machine_of(preset, preset.size.example)


def to_toml(found: Calibration) -> str:
    """See `Calibration.toml`."""
    base_name, _, size = found.base.name.partition(":")
    head = [f"# {found.source}; figures with another source were not measured"]
    head += [f"# {note}" for note in found.notes]
    sections = _sections(preset_text(base_name))
    if found.link is not None:
        sections = _with_link(sections, found.base.levels[0].name, found.link)
    lines = list(head)
    for name, body in sections:
        lines += _replaced(body, _measured(name, found, base_name, size))
        if name == "chip.flops":
            lines += _kernels(found.chip_kernels)
    return "\n".join(lines).rstrip() + "\n"


def _sections(text: str) -> list[Section]:
    """(header's name, its lines), the first without a header."""
    found: list[Section] = [("", [])]
    for line in text.splitlines():
        if header := _HEADER.match(line):
            found.append((header[1], []))
        found[-1][1].append(line)
    return found


def _measured(section: str, found: Calibration, name: str, size: str) -> Mapping[str, str]:
    """The lines of a section that are not the preset's, by key."""
    if section == "":
        kinds = f"device_kinds = [{_text(found.device_kind)}]" if found.base.chip.platform != "cpu" else ""
        return {"name": f"name = {_text(name + '-calibrated')}"} | ({"device_kinds": kinds} if kinds else {})
    if section == "size":
        return {"example": f"example = {_text(size)}"}
    rates: dict[str, float] = {}
    if section == "chip":
        rates["host_bytes_per_second"] = found.host_bytes_per_second
        copies = [k.bytes_per_second for k in found.chip_kernels if k.kind == "map" and k.name == COLD]
        rates |= dict.fromkeys(["memory_bytes_per_second"] if copies else [], min(copies, default=math.inf))
    elif section == "chip.flops":
        rates |= {k.dtype: k.flops_per_second for k in found.chip_kernels if k.kind == "matmul"}
    return {key: _figure(key, r, found.source) for key, r in rates.items() if math.isfinite(r)}


def _replaced(lines: Sequence[str], measured: Mapping[str, str]) -> Iterator[str]:
    """The section's lines with others in place of those keys, which the preset all has or gets at the end."""
    left = dict(measured)
    blank = next((i for i in range(len(lines), 0, -1) if lines[i - 1].strip()), 0)
    for line in lines[:blank]:
        key = _KEY.match(line)
        yield left.pop(key[1], line) if key else line
    yield from left.values()
    yield from lines[blank:]


def _with_link(sections: Sequence[Section], name: str, link: LinkFit) -> list[Section]:
    """The sections with the measured figures of the link of this name, whose own algorithms are dropped."""
    out: list[Section] = []
    inside = False
    for header, body in sections:
        if header == "links":
            inside = any(line.replace(" ", "").startswith(f'name="{name}"') for line in body)
            if inside:
                source = link.algorithms[0].source
                rates = {"bytes_per_second": link.bytes_per_second, "latency_seconds": max(link.latency_seconds, 1e-12)}
                body = list(_replaced(body, {key: _figure(key, r, source) for key, r in rates.items()}))
                body += [line for a in link.algorithms for line in _algorithm(a)] + [""]
        if not (inside and header == "links.algorithms"):
            out.append((header, body))
    return out


def _algorithm(a: Any) -> Iterator[str]:
    yield from ("[[links.algorithms]]", f"name = {_text(a.name)}", f"kind = {_text(a.kind)}")
    yield _figure("efficiency", a.efficiency, a.source)
    if math.isfinite(a.own_bytes_per_second):
        yield _figure("own_bytes_per_second", a.own_bytes_per_second, a.source)
    if a.fixed_seconds > 0:
        yield _figure("fixed_seconds", a.fixed_seconds, a.source)
    yield ""


def _kernels(kernels: Sequence[KernelFigures]) -> Iterator[str]:
    for k in kernels:
        figures = {key: getattr(k, key) for key in _KERNEL_KEYS if 0 < getattr(k, key) < math.inf}
        if figures:
            yield from ("[[chip.kernels]]", f"kind = {_text(k.kind)}")
            yield from (f"{key} = {_text(getattr(k, key))}" for key in ("name", "dtype") if getattr(k, key))
            yield from (_figure(key, value, k.source) for key, value in figures.items())
            yield ""


def _figure(key: str, value: float, source: str) -> str:
    return f"{key} = {{ value = {float(f'{value:.6g}')!r}, source = {_text(source)} }}"


def _text(value: str) -> str:
    return json.dumps(value)
