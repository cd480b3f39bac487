"""Plans as files: versioned JSON, the same bytes for the same plan, replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from meshplan.core import Collective, MeshShape, PlanFileError, Spec
from meshplan.plan._data import ArrayPlan, Candidate, HeldBytes, OpPlan, PlanData
from meshplan.plan._data import Path as SpecPath
from meshplan.plan._format import (
    FORMAT,
    KIND,
    LINES,
    ROWS,
    ArrayRow,
    CandidateRow,
    CollectiveRow,
    Header,
    HeldRow,
    OpRow,
    PlanFile,
    to_figure,
)

FIGURES = (
    "flops", "compute_seconds", "communication_seconds", "argument_bytes", "peak_bytes", "memory_limit", "gap",
)
TEXTS = ("step", "workload", "template", "fingerprint", "machine")


# ---------------------------------------------------------------------------------------------------- to bytes


class Tables:
    """Specs, paths of specs and texts, each once, sorted so that equal plans have equal tables."""

    def __init__(self, data: PlanData) -> None:
        arrays = (*data.arguments, *data.results)
        paths = {a.moves for a in arrays} | {p for op in data.ops for p in op.results}
        paths |= {p for op in data.ops for _, p in op.uses}
        specs = {s for path in paths for s in path} | {a.spec for a in arrays} | {s for a in arrays for s in a.used}
        texts = {t for c in data.collectives for t in (c.source, c.op_name)}
        self.specs = sorted(specs, key=lambda s: (s.dims, s.unreduced))
        self.spec_at = {s: i for i, s in enumerate(self.specs)}
        self.paths = sorted(tuple(self.spec_at[s] for s in path) for path in paths)
        places = {path: i for i, path in enumerate(self.paths)}
        self.path_at = {path: places[tuple(self.spec_at[s] for s in path)] for path in paths}
        self.texts = sorted(texts)
        self.text_at = {t: i for i, t in enumerate(self.texts)}

    def array(self, a: ArrayPlan) -> ArrayRow:
        return ArrayRow(
            a.path, tuple(map(int, a.shape)), a.dtype, self.spec_at[a.spec], tuple(self.spec_at[s] for s in a.used),
            a.dims, int(a.pair), bool(a.pinned), self.path_at[a.moves],
        )

    def op(self, op: OpPlan) -> OpRow:
        return OpRow(
            int(op.index), tuple(self.path_at[p] for p in op.results),
            tuple((int(k), self.path_at[p]) for k, p in op.uses),
        )

    def collective(self, c: Collective) -> CollectiveRow:
        return CollectiveRow(
            c.kind, int(c.nbytes), int(c.group_size), float(c.count), c.axes, c.dtype, self.text_at[c.source],
            self.text_at[c.op_name],
        )


def to_bytes(data: PlanData) -> bytes:
    """The plan as a file's content; equal plans give equal bytes."""
    import msgspec

    tables = Tables(data)
    plain: dict[str, Any] = {name: getattr(data, name) for name in TEXTS}
    plain |= {name: to_figure(getattr(data, name)) for name in FIGURES}
    file = PlanFile(
        kind=KIND, format=FORMAT, mesh=data.mesh.axes, donated=tuple(map(int, data.donated)), pins=data.pins,
        rules=data.rules, notes=data.notes,
        candidates=tuple(
            CandidateRow(c.mesh.axes, to_figure(c.step_seconds), to_figure(c.peak_bytes), bool(c.feasible))
            for c in data.candidates
        ),
        at_peak=tuple(HeldRow(h.what, to_figure(h.nbytes)) for h in data.at_peak),
        specs=tuple((s.dims, s.unreduced) for s in tables.specs), paths=tuple(tables.paths),
        texts=tuple(tables.texts), arguments=tuple(map(tables.array, data.arguments)),
        results=tuple(map(tables.array, data.results)), collectives=tuple(map(tables.collective, data.collectives)),
        ops=tuple(map(tables.op, data.ops)),
        **plain,
    )
    encode = msgspec.json.encode
    parts = []
    for field in fields(PlanFile):
        value = getattr(file, field.name)
        if field.name in LINES and value:
            body = b"[\n" + b",\n".join(encode(row) for row in value) + b"\n]"
        else:
            body = encode(value)
        parts.append(encode(field.name) + b": " + body)
    return b"{\n" + b",\n".join(parts) + b"\n}\n"


def save(data: PlanData, path: str | Path) -> None:
    """Write the plan to `path`, replacing what is there in one step; nothing half-written is ever left.

    Raises `PlanFileError` where the folder is missing or cannot be written.
    """
    write_atomically(to_bytes(data), path)


def write_atomically(content: bytes, path: str | Path) -> None:
    """`content` as the file `path`: a new file beside it takes its place when it is complete."""
    goal = Path(path).resolve()
    if goal.is_dir():
        raise PlanFileError(f"{path} is a folder: give the name of a file.")
    if not goal.parent.is_dir():
        raise PlanFileError(f"{path} cannot be written: the folder {goal.parent} does not exist. Create it first.")
    part = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        part.replace(goal)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise PlanFileError(f"{path} cannot be written: {error.strerror or error}.") from error
        raise


# -------------------------------------------------------------------------------------------------- from bytes


def load(path: str | Path) -> PlanData:
    """The plan in a file that `save` wrote.

    Raises `PlanFileError` for a file that is missing, damaged, of a newer version, or no plan.
    """
    where = Path(path)
    try:
        content = where.read_bytes()
    except FileNotFoundError:
        raise PlanFileError(
            f"plan file {path} does not exist. Write one with plan.save or `meshplan plan -o`."
        ) from None
    except IsADirectoryError:
        raise PlanFileError(f"{path} is a folder, not a plan file. Give the name of a file.") from None
    except OSError as error:
        raise PlanFileError(f"plan file {path} cannot be read: {error.strerror or error}.") from error
    return from_bytes(content, str(path))


def from_bytes(content: bytes, name: str = "the plan file") -> PlanData:
    """The plan in a file's content; `name` is what errors call it. Raises `PlanFileError`."""
    import msgspec

    again = "Save the plan again."
    if not content.strip():
        raise PlanFileError(f"{name} is empty. {again}")
    try:
        header = msgspec.json.decode(content, type=Header)
    except msgspec.ValidationError:
        raise PlanFileError(
            f"{name} is not a plan file: it does not begin as one. Give a file from plan.save."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanFileError(f"{name} is damaged: {_plainly(error)}. {again}") from error
    if header.kind != KIND:
        raise PlanFileError(f"{name} is not a plan file: it has no \"kind\": \"{KIND}\". Give a file from plan.save.")
    if header.format > FORMAT:
        raise PlanFileError(
            f"{name} was written by a newer meshplan (format {header.format}, this one reads up to {FORMAT}): upgrade "
            "meshplan, or plan again."
        )
    if header.format < 1:
        raise PlanFileError(f"{name} is damaged: field 'format' is {header.format}, formats count from 1. {again}")
    try:
        file = msgspec.json.decode(content, type=PlanFile)
    except msgspec.ValidationError as error:
        raise PlanFileError(f"{name} is damaged: {_field(str(error))}. {again}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanFileError(f"{name} is damaged: {_plainly(error)}. {again}") from error
    return _Reader(file, name).data()


def _plainly(error: Exception) -> str:
    text = str(error)
    if "truncated" in text:
        return "it ends in the middle"
    return text[0].lower() + text[1:].rstrip(".")


def _field(message: str) -> str:
    """`Expected `int`, got `str` - at `$.ops[3][0]`` -> "field 'ops[3].index' ...: expected int, found str"."""
    said, _, at = message.partition(" - at ")
    at = at.strip("`").removeprefix("$.")
    row = re.match(r"(\w+)\[(\d+|\.\.\.)\]\[(\d+)\](.*)", at)
    if row and row[1] in ROWS and int(row[3]) < len(ROWS[row[1]]):
        at = f"{row[1]}[{row[2]}].{ROWS[row[1]][int(row[3])]}{row[4]}"
    missing = re.match(r"Object missing required field `(\w+)`", said)
    if missing:
        return f"field '{missing[1]}' is missing"
    said = said.replace("`", "").replace(", got ", ", found ")
    return f"field '{at}' has the wrong type: {said[0].lower()}{said[1:]}" if at else said


class _Reader:
    """Tables resolved and checked, so that no later stage meets a place that is not there."""

    def __init__(self, file: PlanFile, name: str) -> None:
        self.file, self.name = file, name
        self.mesh = MeshShape(file.mesh)
        if any(size < 1 for size in self.mesh.sizes) or len(set(self.mesh.names)) < len(self.mesh.names):
            raise self.damaged("mesh", f"is {list(map(list, file.mesh))}: sizes start at 1 and names differ")
        self.specs = [self.checked(i, Spec(dims, unreduced)) for i, (dims, unreduced) in enumerate(file.specs)]
        self.paths: list[SpecPath] = [
            tuple(self.at(self.specs, s, f"paths[{i}]") for s in row) for i, row in enumerate(file.paths)
        ]

    def damaged(self, where: str, found: str) -> PlanFileError:
        return PlanFileError(f"{self.name} is damaged: field '{where}' {found}. Save the plan again.")

    def at(self, table: Sequence[Any], place: int, where: str) -> Any:
        if not 0 <= place < len(table):
            raise self.damaged(where, f"points to entry {place} of a table of {len(table)}")
        return table[place]

    def checked(self, i: int, spec: Spec) -> Spec:
        names = (*spec.axes, *spec.unreduced)
        for axis in names:
            if axis not in self.mesh.names:
                raise self.damaged(f"specs[{i}]", f"names axis '{axis}', the mesh is {self.mesh}")
            if names.count(axis) > 1:
                raise self.damaged(f"specs[{i}]", f"names axis '{axis}' twice")
        return spec

    def array(self, row: ArrayRow, where: str, others: int) -> ArrayPlan:
        spec: Spec = self.at(self.specs, row.spec, f"{where}.spec")
        for n, axes in zip(row.shape, spec.dims, strict=False):
            if n % self.mesh.size(axes):
                found = f"splits {list(row.shape)} of {row.path} as {spec} over {self.mesh}"
                raise self.damaged(f"{where}.spec", found)
        if len(spec.dims) != len(row.shape) or (row.dims and len(row.dims) != len(row.shape)):
            raise self.damaged(where, f"has a shape of {len(row.shape)} dims and a spec or names of another number")
        if not -1 <= row.pair < others:
            raise self.damaged(f"{where}.pair", f"is {row.pair}, there are {others}")
        return ArrayPlan(
            path=row.path, shape=row.shape, dtype=row.dtype, spec=spec,
            used=tuple(self.at(self.specs, s, f"{where}.used") for s in row.used), dims=row.dims, pair=row.pair,
            pinned=row.pinned, moves=self.at(self.paths, row.moves, f"{where}.moves"),
        )

    def op(self, row: OpRow, where: str) -> OpPlan:
        return OpPlan(
            index=row.index, results=tuple(self.at(self.paths, p, f"{where}.results") for p in row.results),
            uses=tuple((k, self.at(self.paths, p, f"{where}.uses")) for k, p in row.uses),
        )

    def collective(self, row: CollectiveRow, where: str) -> Collective:
        for axis in row.axes:
            if axis not in self.mesh.names:
                raise self.damaged(f"{where}.axes", f"names axis '{axis}', the mesh is {self.mesh}")
        return Collective(
            kind=row.kind, nbytes=row.nbytes, group_size=row.group_size, count=row.count, axes=row.axes,
            dtype=row.dtype, source=self.at(self.file.texts, row.source, f"{where}.source"),
            op_name=self.at(self.file.texts, row.op_name, f"{where}.op_name"),
        )

    def each(self, name: str, read: Callable[..., Any], *more: int) -> tuple[Any, ...]:
        return tuple(read(row, f"{name}[{i}]", *more) for i, row in enumerate(getattr(self.file, name)))

    def data(self) -> PlanData:
        file = self.file
        plain: dict[str, Any] = {name: getattr(file, name) for name in TEXTS}
        plain |= {name: float(getattr(file, name)) for name in FIGURES}
        return PlanData(
            mesh=self.mesh, arguments=self.each("arguments", self.array, len(file.results)),
            results=self.each("results", self.array, len(file.arguments)), ops=self.each("ops", self.op),
            collectives=self.each("collectives", self.collective),
            at_peak=tuple(HeldBytes(what=h.what, nbytes=float(h.nbytes)) for h in file.at_peak),
            candidates=tuple(
                Candidate(
                    mesh=MeshShape(c.mesh), step_seconds=float(c.step_seconds), peak_bytes=float(c.peak_bytes),
                    feasible=c.feasible,
                )
                for c in file.candidates
            ),
            pins=file.pins, rules=file.rules, notes=file.notes, donated=file.donated,
            **plain,
        )
