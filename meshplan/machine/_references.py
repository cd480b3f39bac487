"""Collectives that others measured and published, each table with its source; the closed forms are held against them.

Rows count from 0 within a table: of a table that figures are fitted to, the even rows are fitted and the odd rows
are held out; a table without `fitted_as` is held out whole. The form of the model (the root term, which algorithms
a level lists) was chosen with the errors of all rows in view, and odd rows lie between even ones of the same run: what
tables held out whole say is the better guess for another machine.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from meshplan.core import CollectiveKind, MeshShape
from meshplan.machine._algorithms import collective_time
from meshplan.machine._machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One published measurement: `nbytes` (the larger buffer of a device) in groups of `group` neighbours.

    `algorithm`: the one that the measurement was forced to, "" where the library chose. `fitted_as`: the algorithm
    whose figures the table is fitted to, "" for none; `held_out`: this row was left out of the fit.
    """

    file: str
    table: str
    source: str
    machine: str
    kind: CollectiveKind
    group: int
    nbytes: int
    seconds: float
    algorithm: str
    fitted_as: str
    held_out: bool

    def predicted_seconds(self, machine: Machine | None = None) -> float:
        """What `collective_time` says, on the preset of the measurement's name or on the machine given."""
        machine = machine or Machine.preset(self.machine)
        mesh = MeshShape.of({"groups": machine.devices // self.group, "group": self.group})
        axes, algorithm = ("group",), self.algorithm or None
        return collective_time(machine, mesh, self.kind, self.nbytes, axes, algorithm).seconds

    def error(self, machine: Machine | None = None) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds(machine) / self.seconds - 1


@cache
def references() -> tuple[Measured, ...]:
    """Every measurement in `meshplan/machine/references/*.toml`, by file and table."""
    folder = resources.files("meshplan.machine").joinpath("references")
    files = sorted((p for p in folder.iterdir() if p.name.endswith(".toml")), key=lambda p: p.name)
    return tuple(m for p in files for m in _read(p.name, p.read_text(encoding="utf-8")))


def _read(file: str, text: str) -> list[Measured]:
    data = tomllib.loads(text)
    found = []
    for table in data["tables"]:
        fitted = table.get("fitted_as", "")
        rows = [(1, *row) for row in table.get("rows", [])] or table["by_nodes"]
        for i, (nodes, nbytes, microseconds) in enumerate(rows):
            machine = table["machine"].format(nodes=nodes)
            found.append(Measured(
                file=file, table=table["name"], source=data["sources"][table["source"]], machine=machine,
                kind=table["kind"], group=table.get("group") or Machine.preset(machine).devices, nbytes=nbytes,
                seconds=microseconds * 1e-6, algorithm=table.get("algorithm", ""), fitted_as=fitted,
                held_out=not fitted or i % 2 == 1,
            ))
    return found
