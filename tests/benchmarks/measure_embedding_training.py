"""DLRM on click logs of a known law: full model parallel against two-dimensional tables and their moment scaling.

    python tests/benchmarks/measure_embedding_training.py --steps 6000 --seeds 3

Eight host devices. For each way the normalised entropy and the area under the curve on later logs, mean and standard
deviation over the seeds (of parameters and logs), beside what the true odds of the same logs reach. Steps run many to
a call, in a `lax.scan`: one by one, starting a step on host devices takes longer than the step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

from meshplan.embedding import Groups, RowAdagrad, check_ids
from models import dlrm, dlrm_sharded
from models._clicks import auc, normalised_entropy

Ways = dict[str, tuple[int, int, Any]]
WAYS: Ways = {
    "full model parallel (1, 8)": (1, 8, "none"),
    "2D (4, 2), c = 1": (4, 2, "none"),
    "2D (4, 2), c = M": (4, 2, "replicas"),
    "2D (4, 2), c estimated": (4, 2, "estimate"),
}
MORE: Ways = {
    "2D (8, 1), c = 1": (8, 1, "none"),
    "2D (8, 1), c = M": (8, 1, "replicas"),
    "2D (8, 1), c estimated": (8, 1, "estimate"),
}
TOGETHER = 100  # steps of one call
LATER = 40  # batches of the logs after those trained on


def make(cfg: dlrm.Config, way: tuple[int, int, Any]) -> tuple[dlrm_sharded.Sharded, Callable[..., Any]]:
    """The model, and `run(dense, tables, batches) -> (dense, tables, losses)`, a step for each stacked batch."""
    m, n, scale = way
    optimizer = RowAdagrad(learning_rate=cfg.learning_rate, moment_scale=scale)
    made = dlrm_sharded.make(cfg, Groups(replicas=m, shards=n), optimizer, overflow="exact")

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(dense: Any, tables: Any, batches: Any) -> Any:
        def one(held: Any, batch: Any) -> Any:
            dense, tables, loss, _ = made.step(*held, batch)
            return (dense, tables), loss

        (dense, tables), losses = jax.lax.scan(one, (dense, tables), batches)
        return dense, tables, losses

    return made, run


def train(
    cfg: dlrm.Config, made: dlrm_sharded.Sharded, run: Callable[..., Any], seed: int, steps: int
) -> dict[str, float]:
    dense, tables = made.init(jax.random.key(seed))
    logs = dlrm.logs(cfg, seed)
    names = [t.name for t in made.embeddings.collection.tables]
    losses = np.zeros(0)
    for _ in range(steps // TOGETHER):
        batches = [next(logs)[0] for _ in range(TOGETHER)]
        check_ids(made.embeddings.collection, dict(zip(names, batches[0]["ids"], strict=True)))
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
        dense, tables, losses = jax.block_until_ready(run(dense, tables, stacked))
    assert np.isfinite(np.asarray(losses)).all()  # no id was lost
    later = [next(logs) for _ in range(LATER)]
    odds = np.concatenate([np.asarray(made.predict(dense, tables, batch)) for batch, _ in later]).astype(np.float64)
    clicks = np.concatenate([batch["clicks"] for batch, _ in later])
    true = np.concatenate([odds for _, odds in later])
    scales = np.asarray(made.embeddings.moment_scales(tables))
    ne, true_ne = normalised_entropy(odds, clicks), normalised_entropy(true, clicks)
    return {
        "ne": ne, "auc": auc(odds, clicks), "scale": float(scales.mean()), "true_ne": true_ne,
        "true_auc": auc(true, clicks), "above": ne - true_ne,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000, help=f"of a run, a multiple of {TOGETHER}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", default="", help="only those whose names hold this")
    parser.add_argument("--all", action="store_true", help="groups of one device, too")
    parser.add_argument("--rate", type=float, default=0.0, help="learning rate (default: the model's)")
    about = parser.parse_args()
    cfg = replace(dlrm.SIZES["tiny"], batch=512)
    cfg = replace(cfg, learning_rate=about.rate) if about.rate else cfg
    print(
        f"tables of {cfg.rows} rows, batch {cfg.batch}, {about.steps} steps, {about.seeds} seeds, "
        f"learning rate {cfg.learning_rate:g}"
    )
    for name, way in (WAYS | MORE if about.all else WAYS).items():
        if about.ways not in name:
            continue
        began = time.process_time()
        made, run = make(cfg, way)
        found = [train(cfg, made, run, seed, about.steps) for seed in range(about.seeds)]
        ne, area, above = spread(found, "ne"), spread(found, "auc"), spread(found, "above")
        told = ", ".join(f"{k} {np.mean([f[k] for f in found]):.4f}" for k in ("true_ne", "true_auc"))
        print(f"{name:28} NE {ne}, AUC {area}, NE above that of the true odds {above}, "
              f"c {np.mean([f['scale'] for f in found]):.2f} (true odds: {told}; "
              f"{time.process_time() - began:.0f} CPU s)", flush=True)  # fmt: skip


def spread(found: list[dict[str, float]], what: str) -> str:
    values = [f[what] for f in found]
    return f"{np.mean(values):.4f} +- {np.std(values, ddof=1) if len(values) > 1 else 0:.4f}"


if __name__ == "__main__":
    main()
