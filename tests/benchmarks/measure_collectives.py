"""The collective model held against published measurements (meshplan/machine/references).

    python tests/benchmarks/measure_collectives.py            # predicted against measured, by table, and the medians
    python tests/benchmarks/measure_collectives.py --rows     # every row
    python tests/benchmarks/measure_collectives.py --fit      # the figures of the presets' algorithms, fitted again

The fit: even rows of every table that names an algorithm in `fitted_as`; least absolute relative error. Inside a node
fixed seconds, efficiency, the root term and the own-piece rate; between nodes the efficiency alone, since only large
sizes are published.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from meshplan.core import MeshShape
from meshplan.machine import LinkAlgorithm, Machine, collective_lines
from meshplan.machine._references import Measured, references


@dataclass(frozen=True)
class Figures:
    fixed_seconds: float
    efficiency: float
    own_bytes_per_second: float
    seconds_per_root_byte: float


def only(machine: Machine, *algorithms: LinkAlgorithm) -> Machine:
    """The machine where every dim offers these algorithms alone."""
    return replace(machine, dims=tuple(replace(d, algorithms=algorithms) for d in machine.dims))


def line(m: Measured, *algorithms: LinkAlgorithm) -> tuple[float, float]:
    machine = only(Machine.preset(m.machine), *algorithms)
    mesh = MeshShape.of({"groups": machine.devices // m.group, "group": m.group})
    found = [x for x in collective_lines(machine, mesh, m.kind, ("group",)) if x.algorithm == m.fitted_as]
    return found[0].latency_seconds, found[0].seconds_per_byte


def fit_inside(rows: list[Measured]) -> Figures:
    """Bounded linear regression on the reciprocals, reweighted until it is the least absolute relative error."""
    from scipy.optimize import lsq_linear

    unit = LinkAlgorithm(name=rows[0].fitted_as, kind=rows[0].kind)  # type: ignore[arg-type]
    lines = [line(m, unit) for m in rows]
    seconds = np.array([m.seconds for m in rows])
    columns = [[1.0, m.nbytes * p, m.nbytes**0.5, m.nbytes / m.group] for m, (_, p) in zip(rows, lines, strict=True)]
    # The own piece is within the bytes of an in-switch all-reduce, and a permute has none; with one group size the
    # piece cannot be told from the rest.
    known = 3 if rows[0].fitted_as in ("in-switch", "send") or len({m.group for m in rows}) == 1 else 4
    scale = np.array([1e-5, 1.0, 1e-8, 1e-12])[:known]
    a = np.array(columns)[:, :known] * scale
    b = seconds - np.array([latency for latency, _ in lines])
    weights, x = np.ones(len(rows)), np.zeros(known)
    for _ in range(50):
        w = weights / seconds
        x = lsq_linear(a * w[:, None], b * w, bounds=([0, 1, 0, 0][:known], np.inf)).x
        weights = 1 / np.sqrt(np.maximum(np.abs(a @ x - b) / seconds, 1e-3))
    fixed, inverse, root, own = *(x * scale), *([0.0] * (4 - known))
    return Figures(float(fixed), float(1 / inverse), float(1 / own) if own > 1e-14 else float("inf"), float(root))


def fit_between(rows: list[Measured]) -> Figures:
    """The median over the rows of the efficiency that each needs; the node inside is not what bounds them."""
    needed = []
    for m in rows:
        unit = [LinkAlgorithm(name=n, kind=m.kind) for n in ("ring", "tree", "chain", "in-switch", "between-switches")]
        machine = only(Machine.preset(m.machine), *unit)  # type: ignore[arg-type]
        latency, _ = line(m, *unit)
        sent = next(
            dict(x.sent)[machine.dims[0].name]
            for x in collective_lines(machine, MeshShape.of({"g": m.group}), m.kind, ("g",))
            if x.algorithm == m.fitted_as
        )
        needed.append(m.nbytes * sent / machine.dims[0].bytes_per_second / (m.seconds - latency))
    return Figures(0.0, min(1.0, statistics.median(needed)), float("inf"), 0.0)


def fits(found: Iterable[Measured]) -> dict[tuple[str, str, str, str], Figures]:
    """(file, where, kind, algorithm) -> figures."""
    groups: dict[tuple[str, str, str, str], list[Measured]] = defaultdict(list)
    for m in found:
        if m.fitted_as and not m.held_out and not m.machine.startswith("tpu"):  # one measurement: taken as it is
            one_node = m.machine.partition(":")[2].startswith("1x")
            groups[m.file.removesuffix(".toml"), "inside" if one_node else "between", m.kind, m.fitted_as].append(m)
    return {key: (fit_inside if key[1] == "inside" else fit_between)(rows) for key, rows in sorted(groups.items())}


def median_error(rows: Iterable[Measured]) -> float:
    return statistics.median(abs(m.error()) for m in rows)


def report(rows: bool) -> None:
    tables: dict[tuple[str, str, str], list[Measured]] = defaultdict(list)
    for m in references():
        machine = m.machine if m.machine.partition(":")[2].startswith("1x") else m.machine.partition(":")[0] + ":Nx8"
        tables[machine, m.kind, m.table].append(m)
    print(f"{'machine':<14}{'collective':<20}{'measured':<34}{'rows':>5}{'median':>9}{'worst':>9}{'held out':>10}")
    for (machine, kind, name), found in tables.items():
        worst = max((m.error() for m in found), key=abs)
        out = [m for m in found if m.held_out]
        held = f"{median_error(out):>10.1%}" if out else f"{'-':>10}"
        print(f"{machine:<14}{kind:<20}{name:<34}{len(found):>5}{median_error(found):>9.1%}{worst:>+9.1%}{held}")
        for m in found if rows else ():
            said = m.predicted_seconds()
            print(f"    {m.machine:<12}{m.nbytes / 2**20:>9.0f} MiB  measured {m.seconds * 1e6:>10.1f} us  "
                  f"predicted {said * 1e6:>10.1f} us  {m.error():>+7.1%}{'' if m.held_out else '  fitted'}")
    every = references()
    parts = {
        "all rows": every, "held-out rows": [m for m in every if m.held_out],
        "  of tables fitted to in part": [m for m in every if m.held_out and m.fitted_as],
        "  of tables held out whole": [m for m in every if not m.fitted_as],
    }
    for what, found in parts.items():
        print(f"median error of {len(found):>3} {what}: {median_error(found):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--fit", action="store_true", help="fit the figures again and print them")
    args = parser.parse_args()
    if not args.fit:
        report(args.rows)
        return
    for (file, where, kind, name), f in fits(references()).items():
        print(f"{file:<6}{where:<9}{kind:<20}{name:<12}efficiency {f.efficiency:.4f}  "
              f"own {f.own_bytes_per_second:.4g}  fixed {f.fixed_seconds:.3g}  root {f.seconds_per_root_byte:.3g}")


if __name__ == "__main__":
    main()
