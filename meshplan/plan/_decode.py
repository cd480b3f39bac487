"""From a plan file's content to the plan, with a sentence for every kind of damage."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from meshplan.core import Collective, MeshShape, PlanFileError, Spec
from meshplan.plan._data import ArrayPlan, Candidate, HeldBytes, OpPlan, PlanData, StepTimeline, Wait
from meshplan.plan._data import Path as SpecPath
from meshplan.plan._format import (
    FIGURES,
    FORMAT,
    KIND,
    ROWS,
    TEXTS,
    ArrayRow,
    CollectiveRow,
    Header,
    OpRow,
    PlanFile,
)


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
        self.path_at = dict(enumerate(self.paths))

    def damaged(self, where: str, found: str) -> PlanFileError:
        return PlanFileError(f"{self.name} is damaged: field '{where}' {found}. Save the plan again.")

    def outside(self, where: str, place: int, size: int) -> PlanFileError:
        return self.damaged(where, f"points to entry {place} of a table of {size}")

    def at(self, table: Sequence[Any], place: int, where: str) -> Any:
        if not 0 <= place < len(table):
            raise self.outside(where, place, len(table))
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
        used = tuple(self.at(self.specs, s, f"{where}.used") for s in row.used)
        moves: SpecPath = self.at(self.paths, row.moves, f"{where}.moves")
        for field, specs in (("used", used), ("moves", moves)):
            if any(len(s.dims) != len(row.shape) for s in specs):
                raise self.damaged(f"{where}.{field}", f"has a spec of another rank than its shape {list(row.shape)}")
        return ArrayPlan(
            path=row.path, shape=row.shape, dtype=row.dtype, spec=spec, used=used, dims=row.dims, pair=row.pair,
            pinned=row.pinned, moves=moves,
        )

    def op(self, row: OpRow, where: str) -> OpPlan:
        paths = self.path_at  # by far the most rows: no call per entry
        try:
            return OpPlan(
                index=row.index, results=tuple([paths[p] for p in row.results]),
                uses=tuple([(k, paths[p]) for k, p in row.uses]),
            )
        except KeyError as missing:
            field = "results" if missing.args[0] in row.results else "uses"
            raise self.outside(f"{where}.{field}", missing.args[0], len(paths)) from None

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

    def timeline(self) -> StepTimeline | None:
        if self.file.timeline is None:
            return None
        seconds, busy, exposed, hidden = self.file.timeline
        waits = tuple(Wait(**row._asdict()) for row in self.file.waits)
        return StepTimeline(
            seconds=seconds, busy_seconds=busy, exposed_seconds=exposed, hidden_seconds=hidden, waits=waits
        )

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
            kept=tuple((v, self.at(self.paths, p, "kept")) for v, p in file.kept),
            ranked_by=file.ranked_by, timeline=self.timeline(),
            pins=file.pins, stated=file.stated, rules=file.rules, notes=file.notes, donated=file.donated,
            **plain,
        )
