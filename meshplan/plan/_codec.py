"""Plans as files: versioned JSON, the same bytes for the same plan, replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Any

from meshplan.core import Collective, PlanFileError
from meshplan.plan._data import ArrayPlan, OpPlan, PlanData
from meshplan.plan._decode import from_bytes
from meshplan.plan._format import (
    FIGURES,
    FORMAT,
    KIND,
    LINES,
    TEXTS,
    ArrayRow,
    CandidateRow,
    CollectiveRow,
    HeldRow,
    OpRow,
    PlanFile,
    WaitRow,
    to_figure,
)


class Tables:
    """Specs, paths of specs and texts, each once, sorted so that equal plans have equal tables."""

    def __init__(self, data: PlanData) -> None:
        arrays = (*data.arguments, *data.results)
        paths = {a.moves for a in arrays} | {p for op in data.ops for p in op.results}
        paths |= {p for op in data.ops for _, p in op.uses} | {p for _, p in data.kept}
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
    line = data.timeline
    plain: dict[str, Any] = {name: getattr(data, name) for name in TEXTS}
    plain |= {name: to_figure(getattr(data, name)) for name in FIGURES}
    file = PlanFile(
        kind=KIND, format=FORMAT, mesh=data.mesh.axes, donated=tuple(map(int, data.donated)), pins=data.pins,
        stated=data.stated, rules=data.rules, notes=data.notes,
        candidates=tuple(
            CandidateRow(c.mesh.axes, to_figure(c.step_seconds), to_figure(c.peak_bytes), bool(c.feasible))
            for c in data.candidates
        ),
        at_peak=tuple(HeldRow(h.what, to_figure(h.nbytes)) for h in data.at_peak),
        specs=tuple((s.dims, s.unreduced) for s in tables.specs), paths=tuple(tables.paths),
        texts=tuple(tables.texts), arguments=tuple(map(tables.array, data.arguments)),
        results=tuple(map(tables.array, data.results)), collectives=tuple(map(tables.collective, data.collectives)),
        ops=tuple(map(tables.op, data.ops)), kept=tuple((int(v), tables.path_at[p]) for v, p in data.kept),
        timeline=line and (line.seconds, line.busy_seconds, line.exposed_seconds, line.hidden_seconds),
        ranked_by=data.ranked_by,  # type: ignore[arg-type]
        waits=tuple(WaitRow(w.kind, w.axes, w.source, w.runs, w.seconds) for w in line.waits) if line else (),
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
