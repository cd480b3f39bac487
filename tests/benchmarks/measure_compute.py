"""Modelled compute seconds of the zoo's training steps against XLA:TPU's estimated cycles over the chip's clock.

    python tests/benchmarks/measure_compute.py                              # every model, both chips (an hour)
    python tests/benchmarks/measure_compute.py --only vit dlrm --target tpu-v5e:2x4 --kinds
    python tests/benchmarks/measure_compute.py --modules FOLDER             # keeps the modules, compiles what lacks

Needs libtpu (`pip install 'meshplan[tpu]'`), no accelerator. The models have few layers, so that they compile in
minutes. The compiler estimates no cycles for gathers, scatters, sorts and the like (kernels of its own): they are left
out of both sides, and shown beside.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

import meshplan as mp
from meshplan._api._planning import answer, fixed_mesh, make_call, make_search
from meshplan.core import CompileError, MeshplanError
from meshplan.cost._compute import compute_parts
from meshplan.lower._hlo_cycles import count_cycles

TARGETS = ("tpu-v5e:2x4", "tpu-v5p:2x2x1")
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("small", {"layers": 2, "batch": 16}),
    "llama": ("small", {"layers": 2, "batch": 16}),
    "vit": ("base", {"layers": 2, "batch": 256}),
    "resnet": ("resnet18", {"batch": 512}),
    "unet": ("cifar", {"batch": 64, "scales": (1, 2), "blocks": 1}),
    "encoder_decoder": ("base", {"layers": 2, "batch": 64}),
    "ssm": ("130m", {"layers": 1, "batch": 8}),
    "lstm": ("base", {"batch": 128}),
    "gnn": ("arxiv", {}),
    "dlrm": ("criteo", {"rows": (131072,) * 8 + (1024,) * 18, "batch": 8192}),
    "mixer": ("b16", {"layers": 1, "batch": 128}),
    "moe": ("base", {"layers": 1, "batch": 8}),
}  # fmt: skip


def module_text(plan: mp.Plan, target: str, kept: Path | None) -> str:
    """The compiled module, from `kept` where it lies there."""
    if kept is not None and kept.is_file():
        return kept.read_text(encoding="utf-8")
    audit = plan.audit(target, timeout_seconds=1800.0)
    if not audit.module_text:
        raise CompileError(f"does not fit: {audit.out_of_memory}")
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(audit.module_text, encoding="utf-8")
    return audit.module_text


def measure(name: str, target: str, kept: Path | None, kinds: bool) -> float:
    """Modelled over estimated; prints a row."""
    size, overrides = ZOO[name]
    workload = importlib.import_module(f"models.{name}").workload(size, **overrides)
    call, options = make_call(workload, (), ()), mp.Options()
    search = make_search(call, target, {}, None, options)
    found, tried = search.best([fixed_mesh({"data": search.machine.devices}, search.machine)])
    parts = compute_parts(found.chosen)
    text = module_text(answer(search, call, found, tried, {}, options, 0.0), target, kept)
    cycles, clock = count_cycles(text), search.machine.chip.clock_hertz
    assert cycles is not None and clock is not None
    seconds = sum(p.seconds * p.count for p in parts if p.estimated)
    beside = sum(p.seconds * p.count for p in parts if not p.estimated)
    ratio = seconds / cycles.seconds(clock)
    peak = found.prediction.compute_seconds
    print(
        f"{target:14} {name:16} modelled {seconds * 1e3:9.3f} ms  estimated {cycles.seconds(clock) * 1e3:9.3f} ms  "
        f"{ratio - 1:+7.1%}   FLOPs at peak {peak * 1e3:9.3f} ms  without an estimate {beside * 1e3:8.3f} ms",
        flush=True,
    )  # fmt: skip
    if kinds:
        modelled: dict[str, float] = {}
        for p in parts:
            modelled[p.kind] = modelled.get(p.kind, 0.0) + p.seconds * p.count
        print("    modelled  " + ", ".join(f"{k} {v * 1e3:.3f}" for k, v in sorted(modelled.items())))
        print("    estimated " + ", ".join(f"{k} {v / clock * 1e3:.3f}" for k, v in sorted(cycles.by_kind.items())))
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(ZOO), default=list(ZOO))
    parser.add_argument("--target", nargs="+", default=list(TARGETS))
    parser.add_argument("--modules", type=Path, help="folder of module texts: read what is there, keep the others")
    parser.add_argument("--present", action="store_true", help="with --modules: only models whose module is there")
    parser.add_argument("--kinds", action="store_true", help="milliseconds by kind of kernel")
    options = parser.parse_args()
    for target in options.target:
        off = {}
        for name in options.only:
            kept = options.modules / f"{target.replace(':', '_')}_{name}.hlo" if options.modules else None
            if options.present and not (kept and kept.is_file()):
                continue
            try:
                off[name] = abs(measure(name, target, kept, options.kinds) - 1)
            except MeshplanError as error:
                print(f"{target:14} {name:16} {error}", flush=True)
        if off:
            worst = max(off, key=lambda n: off[n])
            print(f"{target}: {len(off)} models, median {median(off.values()):.1%}, largest {off[worst]:.1%} ({worst})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
