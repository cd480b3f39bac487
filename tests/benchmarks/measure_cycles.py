"""XLA:TPU's estimated cycles of small programs, and the compute model's figures fitted to them.

    python tests/benchmarks/measure_cycles.py                  # compiles all, shows what differs from the tables
    python tests/benchmarks/measure_cycles.py --write          # replaces the tables meshplan/cost/compute/tpu-*.json
    python tests/benchmarks/measure_cycles.py --fit --write    # fits again to the cycles that are stored

Needs libtpu (`pip install 'meshplan[tpu]'`), no accelerator. Every third program of a kind is held out of the fit. Each
chip is compiled for in a child process, started again after a program that the compiler dies of.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
sys.path.insert(0, str(ROOT))

from meshplan.cost._compute import Pricing, price_parts  # noqa: E402
from meshplan.cost._compute_fit import ComputeFit  # noqa: E402
from meshplan.lower._hlo_cycles import count_cycles  # noqa: E402
from meshplan.machine import Machine  # noqa: E402
from tests._children import reports  # noqa: E402
from tests._cycles import TARGETS, Sweep, chosen_of, compile_one, sweeps  # noqa: E402

TABLES = ROOT / "meshplan" / "cost" / "compute"
# What no program here can tell is the compiler's: tiles of the vector unit and of the matrix unit, 32-bit writes.
STATED = ComputeFit(tiles=(128, 8), matrix=128, element_bytes=4.0)
# figure -> (kinds of programs that it is fitted to, least, most)
FITTED: dict[str, tuple[tuple[str, ...], float, float]] = {
    "kernel_seconds": (("small",), 1e-7, 1e-5),
    "memory_efficiency": (("elementwise", "reduce"), 0.3, 1.0),
    "product_efficiency": (("product",), 0.3, 1.0),
    "exposed_bytes": (("product",), 0.0, 2.0**25),
    "convolution_efficiency": (("convolution",), 0.3, 1.0),
    "alone_bytes": (("alone",), 0.0, 30.0),
    "transpose_bytes": (("transpose",), 0.0, 30.0),
    "vector_per_second": (("beside",), 1e11, 1e15),
    "spread_per_second": (("attention",), 1e10, 1e15),
    "relaid_bytes": (("table",), 0.0, 30.0),
    "fast_bytes": (("kept",), 2.0**22, 2.0**28),
}
ROUNDS = 3


def child(target: str, skip: int, kinds: list[str]) -> None:
    """Prints `case number name` before and `cycles` after each program from number `skip` on."""
    from meshplan.lower._aot_child import topology_devices

    device = topology_devices(*Machine.preset(target).aot_topology())[0]
    for number, sweep in enumerate(sweeps()):
        if number < skip or (kinds and sweep.kind not in kinds):
            continue
        print(f"case {number} {sweep.name}", flush=True)
        found = count_cycles(compile_one(sweep, device))
        print(f"cycles {found.cycles if found else 0}", flush=True)


def measure(target: str, kinds: list[str]) -> dict[str, float]:
    """Cycles by the program's name."""
    found: dict[str, float] = {}
    for name, cycles in reports(__file__, target, kinds, "cycles"):
        if cycles is None:
            print(f"  {target} {name}: the compiler died", flush=True)
        else:
            found[name] = float(cycles)
    return found


def errors(
    pricings: dict[str, Pricing], cycles: dict[str, float], fit: ComputeFit, clock: float, kinds: tuple[str, ...],
    which: Callable[[Sweep], bool],
) -> list[float]:
    """Logarithms of predicted over estimated."""
    out = []
    for sweep in sweeps():
        if sweep.kind in kinds and which(sweep) and cycles.get(sweep.name):
            parts = price_parts(pricings[sweep.name], fit)
            seconds = sum(p.seconds * p.count for p in parts if p.estimated)
            out.append(math.log(seconds * clock / cycles[sweep.name]))
    return out


def fit_to(pricings: dict[str, Pricing], cycles: dict[str, float], clock: float) -> ComputeFit:
    """One figure after the other: the one with which the programs of its kinds are off the least, in the mean."""
    fit = replace(
        STATED, memory_efficiency=0.8, kernel_seconds=1e-6, fast_bytes=2.0**26, vector_per_second=1e13,
        spread_per_second=1e12,
    )  # fmt: skip
    for _ in range(ROUNDS):
        for figure, (kinds, least, most) in FITTED.items():
            fit = replace(fit, **{figure: _best(pricings, cycles, clock, fit, figure, kinds, least, most)})
    return fit


def _best(
    pricings: dict[str, Pricing], cycles: dict[str, float], clock: float, fit: ComputeFit, figure: str,
    kinds: tuple[str, ...], least: float, most: float,
) -> float:
    """The figure's best value while the others stay."""
    from scipy.optimize import minimize_scalar

    def off(value: float) -> float:
        found = errors(pricings, cycles, replace(fit, **{figure: value}), clock, kinds, lambda s: not s.held)
        return sum(abs(e) for e in found) / max(1, len(found))

    if figure == "fast_bytes":  # it only says which arrays: steps, not a slope
        best = min((i * 2.0**23 for i in range(1, 18)), key=lambda n: (off(n), n))
    elif least:
        bounds = (math.log(least), math.log(most))
        found: Any = minimize_scalar(lambda x: off(math.exp(x)), bounds=bounds, method="bounded")
        best = math.exp(found.x)
    else:
        found = minimize_scalar(off, bounds=(least, most), method="bounded")
        best = float(found.x)
    return float(f"{best:.4g}")


def held_out(pricings: dict[str, Pricing], cycles: dict[str, float], fit: ComputeFit, clock: float) -> dict[str, float]:
    """Median error by kind of the programs that were not fitted to."""
    kinds = dict.fromkeys(s.kind for s in sweeps())
    out = {}
    for kind in kinds:
        found = errors(pricings, cycles, fit, clock, (kind,), lambda s: s.held)
        if found:
            out[kind] = round(median(abs(math.exp(e) - 1) for e in found), 4)
    return out


def write(
    chip: str, cycles: dict[str, float], fit: ComputeFit, off: dict[str, float], versions: dict[str, str]
) -> None:
    names = ["tiles", "matrix", "element_bytes", *FITTED]
    figures = {name: list(v) if isinstance(v := getattr(fit, name), tuple) else v for name in names}
    kinds = {s.name: s for s in sweeps()}
    rows = [
        f"    {json.dumps(n)}: {json.dumps([kinds[n].kind, c, 'held' if kinds[n].held else 'fit'])}"
        for n, c in cycles.items() if n in kinds
    ]
    source = (
        f"fitted to the estimated cycles of {len(rows)} small programs, libtpu {versions['libtpu']}, "
        f"jax {versions['jax']}; tests/benchmarks/measure_cycles.py"
    )
    head = {"chip": chip, "source": source, "versions": versions, "fit": figures, "held_out": off}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "cycles": {\n' + ",\n".join(rows) + "\n  }\n}\n"
    TABLES.mkdir(exist_ok=True)
    (TABLES / f"{chip}.json").write_text(text, encoding="utf-8")


def run(chip: str, again: bool, only: list[str], store: bool) -> bool:
    """Whether the cycles are those of the table."""
    path = TABLES / f"{chip}.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cycles": {}, "versions": {}}
    known = {name: row[1] for name, row in old["cycles"].items()}
    began = time.perf_counter()
    cycles = known if again else measure(TARGETS[chip], only)
    if not again:
        changed = [n for n in cycles if known.get(n) != cycles[n]]
        print(f"{chip}: {len(cycles)} programs in {time.perf_counter() - began:.0f} s, {len(changed)} differ")
        for name in changed if known else ():
            print(f"  {name}: {known.get(name)} -> {cycles[name]}")
        if only:
            cycles = known | cycles
    machine = Machine.preset(TARGETS[chip])
    assert machine.chip.clock_hertz is not None
    clock = machine.chip.clock_hertz
    pricings = {s.name: Pricing.of(chosen_of(s.fn, s.args, TARGETS[chip])) for s in sweeps() if s.name in cycles}
    fit = fit_to(pricings, cycles, clock)
    off = held_out(pricings, cycles, fit, clock)
    for name in FITTED:
        print(f"  {name} = {getattr(fit, name):.4g}")
    for kind, error in off.items():
        fitted = errors(pricings, cycles, fit, clock, (kind,), lambda s: not s.held)
        worst = max(abs(math.exp(e) - 1) for e in errors(pricings, cycles, fit, clock, (kind,), lambda s: True))
        inside = median(abs(math.exp(e) - 1) for e in fitted)
        print(f"  {kind:12} median error held out {error:6.1%}, fitted {inside:6.1%}, worst of all {worst:6.1%}")
    if store:
        versions = old["versions"] if again else {v: metadata.version(v) for v in ("jax", "libtpu")}
        write(chip, cycles, fit, off, versions)
    return again or cycles == known


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--only", nargs="+", default=[], help="compile these kinds, keep the others")
    parser.add_argument("--fit", action="store_true", help="compile nothing, fit to the cycles in the tables")
    parser.add_argument("--write", action="store_true", help="replace the tables")
    options = parser.parse_args()
    same = [run(chip, options.fit, options.only, options.write) for chip in options.chip]
    return int(not all(same) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
