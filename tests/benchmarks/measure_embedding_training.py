"""DLRM on click logs of a known law: full model parallel against two-dimensional tables and their moment scaling.

    python tests/benchmarks/measure_embedding_training.py --steps 600 --seeds 3

Eight host devices. For each way the normalised entropy and the area under the curve on later logs, mean and standard
deviation over the seeds (of parameters and logs), beside what the true odds of the same logs reach.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

from meshplan.embedding import Groups, RowAdagrad
from models import dlrm, dlrm_sharded
from models._clicks import auc, normalised_entropy

WAYS: dict[str, tuple[int, int, Any]] = {
    "full model parallel (1, 8)": (1, 8, "none"),
    "2D (4, 2), c = 1": (4, 2, "none"),
    "2D (4, 2), c = M": (4, 2, "replicas"),
    "2D (4, 2), c estimated": (4, 2, "estimate"),
    "2D (8, 1), c = 1": (8, 1, "none"),
    "2D (8, 1), c = M": (8, 1, "replicas"),
    "2D (8, 1), c estimated": (8, 1, "estimate"),
}
LATER = 16  # batches of the logs after those trained on


def train(cfg: dlrm.Config, way: str, seed: int, steps: int) -> dict[str, float]:
    m, n, scale = WAYS[way]
    optimizer = RowAdagrad(learning_rate=cfg.learning_rate, moment_scale=scale)
    made = dlrm_sharded.make(cfg, Groups(replicas=m, shards=n), optimizer, overflow="exact")
    dense, tables = made.init(jax.random.key(seed))
    logs = dlrm.logs(cfg, seed)
    for _ in range(steps):
        # Many steps under way at once take the threads that XLA's CPU collectives wait for each other on.
        dense, tables, _, residuals = jax.block_until_ready(made.step(dense, tables, next(logs)[0]))
    made.embeddings.check(residuals)
    later = [next(logs) for _ in range(LATER)]
    odds = np.concatenate([np.asarray(made.predict(dense, tables, batch)) for batch, _ in later]).astype(np.float64)
    clicks = np.concatenate([batch["clicks"] for batch, _ in later])
    true = np.concatenate([odds for _, odds in later])
    scales = np.asarray(made.embeddings.moment_scales(tables))
    return {
        "ne": normalised_entropy(odds, clicks), "auc": auc(odds, clicks), "scale": float(scales.mean()),
        "true_ne": normalised_entropy(true, clicks), "true_auc": auc(true, clicks),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", default="", help="only those whose names hold this")
    about = parser.parse_args()
    cfg = replace(dlrm.SIZES["tiny"], batch=512)
    print(f"tables of {cfg.rows} rows, batch {cfg.batch}, {about.steps} steps, {about.seeds} seeds")
    for way in (w for w in WAYS if about.ways in w):
        began = time.perf_counter()
        found = [train(cfg, way, seed, about.steps) for seed in range(about.seeds)]
        ne, area = ([f[k] for f in found] for k in ("ne", "auc"))
        told = ", ".join(f"{k} {np.mean([f[k] for f in found]):.4f}" for k in ("true_ne", "true_auc"))
        print(f"{way:28} NE {np.mean(ne):.4f} +- {np.std(ne, ddof=1) if len(ne) > 1 else 0:.4f}, "
              f"AUC {np.mean(area):.4f} +- {np.std(area, ddof=1) if len(area) > 1 else 0:.4f}, "
              f"c {np.mean([f['scale'] for f in found]):.2f} (true odds: {told}; "
              f"{time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
