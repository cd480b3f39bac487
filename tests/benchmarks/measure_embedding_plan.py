"""The embedding planner on the 1.7 TB case of two-dimensional sparse parallelism (arXiv 2508.03854), and at size.

    python tests/benchmarks/measure_embedding_plan.py              # the paper's case, 256 ... 4,096 GPUs
    python tests/benchmarks/measure_embedding_plan.py --thousand   # 1,000 tables on 64 devices: CPU seconds, bound

The paper's tables, batch and machine are not published. Taken here, once: nodes of 8 H100 (preset "h100:Nx8"); 740
tables by the law in `paper_tables`, scaled to 1.7 TB; 1,024 samples a GPU; ids hashed; row-wise AdaGrad; pieces of at
least 128 columns (TorchRec's planner); weights averaged every step; 8 GB a GPU for the dense part. One figure is
calibrated, the seconds of the dense part, so that 256 GPUs give the published 1.76e5 queries/s. The longest history,
400 ids, is the largest round number with which full model parallelism still fits 512 GPUs, as published; that it does
not from 1,024 on, the speeds and the memory are then predictions.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from meshplan.core import MemoryLimitError
from meshplan.embedding import EmbeddingPlan, Groups, Pricing, Table, plan
from meshplan.machine import Machine

PUBLISHED = {256: 1.76e5, 512: 3.56e5, 1024: 6.76e5, 2048: 1.34e6, 4096: 2.53e6}
PUBLISHED_FULL = {512: "3.37e5", 1024: "out of memory", 2048: "out of memory", 4096: "out of memory"}
SAMPLES = 1024
PRICING = Pricing(hashed=True, min_columns=128, reserved_bytes=8_000_000_000)


def paper_tables(total_bytes: float = 1.7e12, seed: int = 0) -> tuple[Table, ...]:
    """700 features of few ids (log-normal, median 3) and 40 histories of 100 to 400 ids, all Zipf of 1.05 and 1.2.

    Rows are log-normal with a deviation of 1.8, width 128 (one in ten 256), scaled to `total_bytes` together.
    """
    rng = np.random.default_rng(seed)
    history = np.arange(740) >= 700
    rows = np.exp(rng.normal(0, 1.8, 740))
    dims = np.where((rng.random(740) < 0.1) & ~history, 256, 128)
    ids = np.where(history, rng.uniform(100, 400, 740), np.clip(np.exp(rng.normal(np.log(3), 1, 740)), 1, 50))
    scale = total_bytes / (rows * dims * 4).sum()
    return tuple(
        Table(
            name=f"{'history' if history[i] else 'feature'}{i}", rows=max(1000, int(rows[i] * scale)), dim=int(dims[i]),
            hotness=float(np.ceil(ids[i])), zipf=1.2 if history[i] else 1.05,
        )
        for i in range(740)
    )  # fmt: skip


def attempt(devices: int, pricing: Pricing, groups: Groups | None = None) -> EmbeddingPlan | MemoryLimitError:
    machine = Machine.preset(f"h100:{devices // 8}x8")
    try:
        return plan(paper_tables(), machine, SAMPLES * devices, groups=groups, pricing=pricing)
    except MemoryLimitError as error:
        return error


def figures(p: EmbeddingPlan | MemoryLimitError) -> str:
    if isinstance(p, MemoryLimitError):
        return f"does not fit ({str(p).split(', and ')[1].split('. The largest')[0]})"
    part = 100 * p.peak_bytes / p.memory_limit
    uneven = ", ".join(f"{k} {v:.2f}" for k, v in p.imbalance.items())
    return (
        f"M={p.groups.replicas} N={p.groups.shards}: {p.queries_per_second:.3g} queries/s, memory {part:.1f} %, "
        f"imbalance {uneven}, embedding {p.step_seconds - p.parts['dense']:.3f} s of {p.step_seconds:.3f}"
    )


def paper_case(sizes: list[int]) -> None:
    first = attempt(256, PRICING)
    if isinstance(first, MemoryLimitError):
        raise first
    dense = SAMPLES * 256 / PUBLISHED[256] - first.step_seconds
    print(f"dense seconds, calibrated on 256 GPUs: {dense:.4f}")
    pricing = replace(PRICING, dense_seconds=dense)
    print("256 GPUs, published: peak memory 72.4 % (M=1), 54.7 % (M=4), imbalance 5.70, 1.57")
    for m in (1, 4):
        print(f"  {figures(attempt(256, pricing, Groups(replicas=m, shards=256 // m)))}")
    base = PUBLISHED[256] / 256
    for devices in sizes:
        found = attempt(devices, pricing)
        print(f"{devices} GPUs")
        if isinstance(found, EmbeddingPlan):
            ours = found.queries_per_second / devices / base
            print(
                f"  two-dimensional: {figures(found)}\n    published {PUBLISHED[devices]:.3g}; efficiency against 256 "
                f"GPUs {100 * ours:.1f} %, published {100 * PUBLISHED[devices] / devices / base:.1f} %"
            )
            print("    parts, ms: " + ", ".join(f"{k} {1e3 * v:.1f}" for k, v in found.parts.items()), flush=True)
        full = attempt(devices, pricing, Groups(replicas=1, shards=devices))
        print(f"  full model parallel: {figures(full)}; published {PUBLISHED_FULL.get(devices, 'none')}", flush=True)


def thousand_tables(seed: int = 0) -> tuple[Table, ...]:
    """Rows log-uniform from 100 to 1e8, widths 32 to 256, ids log-normal, half of them Zipf, one in 20 a sequence."""
    rng = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"t{i}", rows=int(10 ** rng.uniform(2, 8)), dim=int(rng.choice([32, 64, 128, 256])),
            hotness=float(np.ceil(rng.lognormal(1.2, 1))), zipf=float(rng.choice([0, 1.05])),
            pooling="none" if i % 20 == 0 else "sum",
        )
        for i in range(1000)
    )  # fmt: skip


def thousand() -> None:
    machine, tables = Machine.preset("h100:8x8"), thousand_tables()
    for method in ("search", "table-wise", "row-wise"):
        start = time.process_time()
        try:
            p = plan(tables, machine, 64 * 1024, pricing=Pricing(hashed=True), method=method)
        except MemoryLimitError as error:
            print(f"{method}: {str(error).split(', and ')[1].split('. The largest')[0]}")
            continue
        seconds = time.process_time() - start
        print(
            f"{method}: step {1e3 * p.step_seconds:.2f} ms, bound {1e3 * p.bound_seconds:.2f} ms, M="
            f"{p.groups.replicas} N={p.groups.shards}, planned in {seconds:.1f} CPU seconds", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--thousand", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(PUBLISHED))
    given = parser.parse_args()
    thousand() if given.thousand else paper_case(given.sizes)
