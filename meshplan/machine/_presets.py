"""Presets: one TOML a chip, every number with its source, checked as it is read.

A file has a `[chip]` (figures of one device), a `[size]` (what sizes the machine comes in),
`[[links]]` outermost first, and an `[aot]` (its name for an ahead-of-time compiler). A number
is written `{ value = 1.0, source = "where it is from" }`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from meshplan.core import MachineError
from meshplan.machine._machine import LINK_KINDS, PLATFORMS, Chip, LinkKind, Platform

SizeForm = Literal["torus", "nodes", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """A link dim before its size is known."""

    name: str
    kind: LinkKind
    bytes_per_second: float
    latency_seconds: float
    source: str


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
    sources: Mapping[str, str] = field(default_factory=dict)


class _Reader:
    """One table of a preset file: takes keys by kind and says where one is missing or wrong."""

    def __init__(self, table: Any, file: str, path: str = "") -> None:
        self.file, self.path = file, path
        if not isinstance(table, dict):
            raise MachineError(f"preset file {file}: '{path}' is {table!r}; it must be a table.")
        self.table: dict[str, Any] = dict(table)

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, problem: str) -> MachineError:
        return MachineError(f"preset file {self.file}: key '{self.key(name)}' {problem}.")

    def take(self, name: str, what: str) -> Any:
        if name not in self.table:
            raise self.wrong(name, f"is missing; give {what}")
        return self.table.pop(name)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.table.pop(name, default) if default is not None else self.take(name, "a text")
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.wrong(name, f"is {value!r}; it must be a text")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> Any:
        value = self.take(name, f"one of {', '.join(allowed)}")
        if value not in allowed:
            raise self.wrong(name, f"is {value!r}; it must be one of {', '.join(allowed)}")
        return value

    def figure(self, name: str) -> tuple[float, str]:
        """A positive number and its source."""
        entry = self.take(name, '{ value = ..., source = "..." }')
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            raise self.wrong(name, 'must be written { value = ..., source = "..." }')
        value, source = entry["value"], entry["source"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(name, f"is {value!r}; it must be a positive number")
        if not isinstance(source, str) or not source.strip():
            raise self.wrong(name, "has an empty source; say where the number is from")
        return value, source

    def count(self, name: str) -> int:
        value = self.take(name, "a positive whole number")
        if type(value) is not int or value < 1:
            raise self.wrong(name, f"is {value!r}; it must be a positive whole number")
        return value

    def sizes(self, name: str, length: int | None = None) -> tuple[int, ...]:
        value = self.take(name, "a list of sizes")
        good = isinstance(value, list) and all(type(v) is int and v > 0 for v in value)
        if not good or (length is not None and len(value) != length):
            count = "" if length is None else f"{length} "
            raise self.wrong(name, f"is {value!r}; it must be a list of {count}positive sizes")
        return tuple(value)

    def table_at(self, name: str) -> _Reader:
        return _Reader(self.take(name, "a table"), self.file, self.key(name))

    def done(self) -> None:
        for name in self.table:
            raise self.wrong(name, "is not a key of a preset; remove it or correct its spelling")


def load_preset(text: str, file: str) -> Preset:
    """Read and check one preset; MachineError names the file and the key that is wrong."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MachineError(f"preset file {file}: it is not TOML: {error}.") from error
    top = _Reader(data, file)
    name = top.text("name")
    kinds = top.take("device_kinds", "the device_kind texts of jax devices, or []")
    if not isinstance(kinds, list) or not all(isinstance(k, str) for k in kinds):
        raise top.wrong("device_kinds", f"is {kinds!r}; it must be a list of texts")
    chip = _chip(top.table_at("chip"))
    size, size_source = _size(top.table_at("size"))
    entries = top.take("links", "at least one [[links]]")
    if not isinstance(entries, list) or not entries:
        raise top.wrong("links", "must be a list of tables, outermost first")
    links = tuple(_link(_Reader(entry, file, f"links[{i}]")) for i, entry in enumerate(entries))
    wanted = {"torus": 2, "nodes": 2, "flat": 1}[size.form]
    if len(links) != wanted:
        raise top.wrong("links", f"has {len(links)} entries; the size form '{size.form}' needs {wanted}")
    aot, aot_source = _aot(top.table_at("aot"))
    top.done()
    sources = {"size": size_source, "aot": aot_source}
    return Preset(name=name, device_kinds=tuple(kinds), chip=chip, size=size, links=links, aot=aot, sources=sources)


def _chip(table: _Reader) -> Chip:
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
    table.done()
    return Chip(
        name=name, platform=platform, flops=flops, memory_bytes=int(values["memory_bytes"]),
        memory_bytes_per_second=float(values["memory_bytes_per_second"]),
        host_bytes_per_second=float(values["host_bytes_per_second"]), sources=sources,
    )


def _size(table: _Reader) -> tuple[SizeRule, str]:
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


def _link(table: _Reader) -> LinkFigures:
    name = table.text("name")
    kind: LinkKind = table.choice("kind", LINK_KINDS)
    rate, rate_source = table.figure("bytes_per_second")
    latency, latency_source = table.figure("latency_seconds")
    table.done()
    return LinkFigures(
        name=name, kind=kind, bytes_per_second=float(rate), latency_seconds=float(latency),
        source=f"rate: {rate_source}; latency: {latency_source}",
    )


def _aot(table: _Reader) -> tuple[AotRule, str]:
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


@cache
def read_preset(name: str) -> Preset:
    file = f"{name}.toml"
    return load_preset(_folder().joinpath(file).read_text(encoding="utf-8"), file)
