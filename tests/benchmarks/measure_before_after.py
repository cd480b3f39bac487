"""The README's figures: one set of FSDP input shardings, compiled for 8 x H100 with and without a plan.

    python tests/benchmarks/measure_before_after.py

Needs the CUDA compiler (`pip install 'meshplan[cuda-aot]'`), no GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import meshplan as mp
from meshplan.core import format_bytes, format_flops, format_seconds
from models import gpt

TARGET = "h100:1x8"


def unplanned(workload: mp.Workload, plan: mp.Plan) -> mp.Audit:
    """The step jitted by hand: the plan's shardings of arguments and results, nothing inside."""
    shape = plan.data.mesh
    mesh = AbstractMesh(shape.sizes, shape.names, axis_types=(AxisType.Auto,) * len(shape.axes))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (plan.in_specs, plan.out_specs))
    fn = jax.jit(workload.step, in_shardings=shardings[0], out_shardings=shardings[1], donate_argnums=(0,))
    args = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tuple(workload.args), shardings[0]
    )
    return mp.audit(fn, *args, target=TARGET)


def line(name: str, found: mp.Audit) -> str:
    moved = ", ".join(f"{format_bytes(v)} {k}" for k, v in found.bytes_by_kind().items() if v > 1e6)
    assert found.memory is not None and found.seconds is not None
    return (
        f"{name}: {moved}; {format_bytes(found.memory.temp_bytes)} temporaries, "
        f"{format_bytes(found.memory.peak_bytes)} peak; "
        f"{format_flops(found.flops)}; {format_seconds(found.seconds)} by FLOPs and links; compiled in "
        f"{found.compile_seconds:.1f} s"
    )


def main() -> None:
    workload = gpt.workload("small")
    compared = mp.compare(workload, machine=TARGET, templates=["fsdp"])
    fsdp, free = compared.plans["fsdp"], compared.plans["plan"]
    print(line("fsdp shardings alone  ", unplanned(workload, fsdp)), flush=True)
    print(line("fsdp shardings, planned", fsdp.audit()), flush=True)
    print(line("free plan              ", free.audit()), flush=True)


if __name__ == "__main__":
    main()
