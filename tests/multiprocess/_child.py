"""One process of a job that trains the planned gpt for some steps: `_child.py index processes port out steps`.

Started with XLA_FLAGS that give every process its part of eight host devices.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import jax

import meshplan as mp
from models import gpt

MESH = {"data": 4, "model": 2}


def join(index: int, processes: int, port: int) -> None:
    """Make this process one of the job's; a job of one needs nothing."""
    if processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=processes, process_id=index, initialization_timeout=120
    )


def train(steps: int) -> dict[str, object]:
    """Plan for the devices of the whole job, place state and batches, train."""
    workload = gpt.workload("tiny")
    plan = mp.plan(workload, mesh=MESH, pins={"batch.*": jax.P("data")})
    assert workload.init is not None
    assert workload.batches is not None
    mesh = plan.mesh()
    placed, batch_placed = plan.in_shardings(mesh)
    (state,) = jax.jit(workload.init, out_shardings=(placed,))(jax.random.key(0))
    step, losses = plan.jit(mesh), []
    for batch in itertools.islice(workload.batches(), steps):
        state, metrics = step(state, jax.device_put(batch, batch_placed))
        losses.append(float(metrics["loss"]))
    held = sum(s.data.nbytes for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards)
    return {
        "losses": losses, "machine": plan.data.machine, "fingerprint": plan.data.fingerprint,
        "specs": {path: str(spec) for path, spec in plan.specs.items()}, "devices": jax.device_count(),
        "local_devices": jax.local_device_count(), "processes": jax.process_count(), "held_bytes": held,
        "across": sorted(a for a in MESH if spans_processes(mesh, a)),
    }  # fmt: skip


def spans_processes(mesh: jax.sharding.Mesh, axis: str) -> bool:
    """Whether devices along the axis belong to several processes."""
    lines = mesh.devices.swapaxes(mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return any(len({d.process_index for d in line}) > 1 for line in lines)


def main(index: int, processes: int, port: int, out: str, steps: int) -> None:
    join(index, processes, port)
    found = train(steps)
    Path(out).write_text(json.dumps(found))
    if processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
