"""Presets: one TOML a chip, every number with its source, checked as it is read.

A file has a `[chip]` (figures of one device), a `[size]` (what sizes the machine comes in),
`[[links]]` outermost first, and an `[aot]` (its name for an ahead-of-time compiler). A number
is written `{ value = 1.0, source = "where it is from" }`. It may have `[[links.algorithms]]` (what a
collectives library runs on those links, with fitted figures), `[[chip.kernels]]` (what kernels were measured to
take, by kind) and a `[remote_memory]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from meshplan.core import KINDS
from meshplan.machine._chip import (
    KERNEL_KINDS,
    MEMORY_SCOPES,
    PLATFORMS,
    Chip,
    KernelFigures,
    MemoryScope,
    Platform,
    RemoteMemory,
)
from meshplan.machine._dims import ALGORITHMS, DUPLEX, LINK_KINDS, Duplex, LinkAlgorithm, LinkKind
from meshplan.machine._toml import Reader

SizeForm = Literal["torus", "nodes", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """A link dim before its size is known."""

    name: str
    kind: LinkKind
    bytes_per_second: float
    latency_seconds: float
    source: str
    duplex: Duplex = "full"
    algorithms: tuple[LinkAlgorithm, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """What sizes a machine comes in.

    torus: at most `largest` along each dim and `chips` in all; `host` chips of a host per dim. A dim is closed
    when it is a multiple of `wrap_multiple`, for all dims together or, with `wrap_each`, for each
    dim on its own. nodes: at most `largest[0]` devices a node. flat: any number.
    """

    form: SizeForm
    example: str
    largest: tuple[int, ...] = ()
    chips: int = 0
    host: tuple[int, ...] = ()
    wrap_multiple: int = 0
    wrap_each: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AotRule:
    """How a size becomes a compiler's topology name; `missing` says why there is none."""

    platform: str = ""
    prefix: str = ""
    target_config: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    name: str
    device_kinds: tuple[str, ...]
    chip: Chip
    size: SizeRule
    links: tuple[LinkFigures, ...]
    aot: AotRule
    remote_memory: RemoteMemory | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


def load_preset(text: str, file: str) -> Preset:
    """Read and check one machine file; MachineError names the file, the line and the key that is wrong."""
    top = Reader.of_text(text, file)
    name = top.text("name")
    kinds = top.texts("device_kinds", "the device_kind texts of jax devices, or []")
    chip = _chip(top.table_at("chip"))
    size, size_source = _size(top.table_at("size"))
    links = tuple(_link(entry) for entry in top.tables_at("links"))
    wanted = {"torus": 2, "nodes": 2, "flat": 1}[size.form]
    if len(links) != wanted:
        raise top.wrong("links", f"has {len(links)} entries; the size form '{size.form}' needs {wanted}")
    aot, aot_source = _aot(top.table_at("aot"))
    memory = _remote_memory(top.table_at("remote_memory")) if top.has("remote_memory") else None
    top.done()
    return Preset(
        name=name, device_kinds=kinds, chip=chip, size=size, links=links, aot=aot, remote_memory=memory,
        sources={"size": size_source, "aot": aot_source},
    )


def _chip(table: Reader) -> Chip:
    name = table.text("name")
    platform: Platform = table.choice("platform", PLATFORMS)
    rates = table.table_at("flops")
    sources: dict[str, str] = {}
    flops: dict[str, float] = {}
    for dtype in list(rates.table):
        value, sources[f"flops.{dtype}"] = rates.figure(dtype)
        flops[dtype] = float(value)
    for dtype in ("float32", "bfloat16"):
        if dtype not in flops:
            raise rates.wrong(dtype, 'is missing; give { value = ..., source = "..." }')
    values: dict[str, float] = {}
    for key in ("memory_bytes", "memory_bytes_per_second", "host_bytes_per_second"):
        values[key], sources[key] = table.figure(key)
    clock = None
    if table.has("clock_hertz"):
        clock, sources["clock_hertz"] = table.figure("clock_hertz")
    kernels = tuple(_kernel(entry) for entry in table.tables_at("kernels"))
    table.done()
    return Chip(
        name=name, platform=platform, flops=flops, memory_bytes=int(values["memory_bytes"]),
        memory_bytes_per_second=float(values["memory_bytes_per_second"]),
        host_bytes_per_second=float(values["host_bytes_per_second"]), sources=sources, kernels=kernels,
        clock_hertz=None if clock is None else float(clock),
    )


def _kernel(table: Reader) -> KernelFigures:
    """Figures that are left out cost nothing."""
    kind, name, dtype = table.choice("kind", KERNEL_KINDS), table.text("name", ""), table.text("dtype", "")
    keys = ("fixed_seconds", "seconds_per_batch", "flops_per_second", "elements_per_second", "bytes_per_second")
    found = {key: table.figure(key) for key in keys if table.has(key)}
    if not found:
        raise table.wrong("kind", f"is '{kind}' without a figure; give one of {', '.join(keys)}")
    table.done()
    source = "; ".join(dict.fromkeys(source for _, source in found.values()))
    values = {key: float(value) for key, (value, _) in found.items()}
    return KernelFigures(kind=kind, name=name, dtype=dtype, source=source, **values)


def _size(table: Reader) -> tuple[SizeRule, str]:
    form: SizeForm = table.choice("form", get_args(SizeForm))
    example, source = table.text("example"), table.text("source")
    rule = SizeRule(form=form, example=example)
    if form == "torus":
        largest = table.sizes("largest")
        rule = SizeRule(
            form=form, example=example, largest=largest, chips=table.count("chips"),
            host=table.sizes("host", len(largest)),
            wrap_multiple=table.count("wrap_multiple"),
            wrap_each=table.choice("wrap_rule", ("each dim", "all dims")) == "each dim",
        )
    elif form == "nodes":
        rule = SizeRule(form=form, example=example, largest=(table.count("largest"),))
    table.done()
    return rule, source


def _link(table: Reader) -> LinkFigures:
    name = table.text("name")
    kind: LinkKind = table.choice("kind", LINK_KINDS)
    rate, rate_source = table.figure("bytes_per_second")
    latency, latency_source = table.figure("latency_seconds")
    duplex: Duplex = table.choice("duplex", DUPLEX) if table.has("duplex") else "full"
    algorithms = tuple(a for entry in table.tables_at("algorithms") for a in _algorithms(entry))
    table.done()
    return LinkFigures(
        name=name, kind=kind, bytes_per_second=float(rate), latency_seconds=float(latency), duplex=duplex,
        algorithms=algorithms, source=f"rate: {rate_source}; latency: {latency_source}",
    )


def _algorithms(table: Reader) -> list[LinkAlgorithm]:
    """An entry stands for each of its names with each of its kinds."""
    names, kinds = table.choices("name", ALGORITHMS), table.choices("kind", KINDS)
    efficiency, source = table.figure("efficiency")
    if efficiency > 1:
        raise table.wrong("efficiency", f"is {efficiency}; it must be a part of the links' rate, at most 1")
    own = table.figure("own_bytes_per_second")[0] if table.has("own_bytes_per_second") else float("inf")
    fixed = table.figure("fixed_seconds")[0] if table.has("fixed_seconds") else 0.0
    root = table.figure("seconds_per_root_byte")[0] if table.has("seconds_per_root_byte") else 0.0
    table.done()
    return [
        LinkAlgorithm(
            name=name, kind=kind, efficiency=float(efficiency), own_bytes_per_second=float(own),
            fixed_seconds=float(fixed), seconds_per_root_byte=float(root), source=source,
        )
        for name in names
        for kind in kinds
    ]


def _remote_memory(table: Reader) -> RemoteMemory:
    scope: MemoryScope = table.choice("scope", MEMORY_SCOPES)
    nbytes, nbytes_source = table.figure("bytes")
    rate, rate_source = table.figure("bytes_per_second")
    latency = table.figure("latency_seconds")[0] if table.has("latency_seconds") else 0.0
    sharers, sharers_source = table.figure("sharers") if scope == "node" else (1, "")
    sharers_source = f"; sharers: {sharers_source}" if sharers_source else ""
    if sharers != int(sharers):
        raise table.wrong("sharers", f"is {sharers!r}; it must be a whole number")
    table.done()
    return RemoteMemory(
        scope=scope, nbytes=int(nbytes), bytes_per_second=float(rate), latency_seconds=float(latency),
        sharers=int(sharers), source=f"bytes: {nbytes_source}; rate: {rate_source}{sharers_source}",
    )


def _aot(table: Reader) -> tuple[AotRule, str]:
    source = table.text("source")
    rule = AotRule(
        platform=table.text("platform", ""), prefix=table.text("prefix", ""),
        target_config=table.text("target_config", ""), missing=table.text("missing", ""),
    )
    if bool(rule.platform) == bool(rule.missing):
        raise table.wrong("platform", "must be given, or else 'missing' with the reason why not")
    table.done()
    return rule, source


def _folder() -> Any:
    return resources.files("meshplan.machine").joinpath("presets")


@cache
def preset_names() -> tuple[str, ...]:
    return tuple(sorted(p.name.removesuffix(".toml") for p in _folder().iterdir() if p.name.endswith(".toml")))


def preset_text(name: str) -> str:
    return _folder().joinpath(f"{name}.toml").read_text(encoding="utf-8")


@cache
def read_preset(name: str) -> Preset:
    return load_preset(preset_text(name), f"{name}.toml")
