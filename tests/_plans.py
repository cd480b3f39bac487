"""Plans made by hand, for tests of what shows and stores them."""

from __future__ import annotations

from typing import Any

from meshplan.core import Collective, MeshShape, Spec
from meshplan.plan import ArrayPlan, Candidate, HeldBytes, OpPlan, PlanData

MESH = MeshShape((("data", 2), ("model", 4)))


def spec(*dims: str | None, unreduced: tuple[str, ...] = ()) -> Spec:
    """`spec("data+model", None)`."""
    return Spec(tuple(tuple(d.split("+")) if d else () for d in dims), unreduced)


def array(path: str, shape: tuple[int, ...], stored: Spec, **more: Any) -> ArrayPlan:
    return ArrayPlan(path=path, shape=shape, dtype=more.pop("dtype", "float32"), spec=stored, **more)


def arguments(layers: int = 3) -> tuple[ArrayPlan, ...]:
    """A model of `layers` equal layers with Adam's moments, and a batch."""
    found: list[ArrayPlan] = []
    for root in ("state/mu", "state/params"):
        moment = root == "state/mu"
        used = () if moment else (spec(None, "model"),)
        found.append(array(f"{root}/embed", (512, 64), spec("model", None), used=used, dims=("vocab", "embed")))
        for i in range(layers):
            gathered = () if moment else (spec(None, "model"),)
            stored, dims = spec("data", "model"), ("embed", "mlp")
            found.append(array(f"{root}/layers/{i}/up", (64, 256), stored, used=gathered, dims=dims))
            found.append(array(f"{root}/layers/{i}/scale", (64,), spec(None), dims=("embed",)))
    batch = array("batch/tokens", (16, 32), spec("data", None), dtype="int32", pinned=True, dims=("batch", "seq"))
    return (*found, batch)


def make_plan(**changes: Any) -> PlanData:
    """A small plan of every kind of entry; `changes` replace fields."""
    args = list(changes.pop("arguments", arguments()))
    owned = [i for i, a in enumerate(args) if a.path.startswith("state/")]
    results = []
    for j, i in enumerate(owned):
        a = args[i]
        args[i] = ArrayPlan(
            path=a.path, shape=a.shape, dtype=a.dtype, spec=a.spec, used=a.used, dims=a.dims, pair=j, pinned=a.pinned
        )
        moves = (a.spec,) if a.path.endswith("up") else ()
        results.append(array(a.path.replace("state/", "0/", 1), a.shape, a.spec, pair=i, dtype=a.dtype, moves=moves))
    results.append(array("1/loss", (), spec()))
    fields: dict[str, Any] = {
        "step": "train_step", "fingerprint": "0123456789abcdef", "machine": "tpu-v5e:2x4", "mesh": MESH,
        "ops": (
            OpPlan(index=3, results=((spec("data", "model"),),), uses=((0, (spec("data", None), spec(None, None))),)),
            OpPlan(index=7, results=((),), uses=((1, (spec("data", "model", unreduced=()),)),)),
        ),
        "collectives": (
            Collective(
                kind="all-gather", nbytes=65536, group_size=2, count=3.0, axes=("data",), dtype="float32",
                source="/home/someone/models/gpt.py:12", op_name="dot_general state/params/layers/0/up",
            ),
            Collective(
                kind="all-reduce", nbytes=4, group_size=8, axes=("data", "model"), dtype="float32",
                source="/home/someone/models/gpt.py:40", op_name="reduce_sum",
            ),
        ),
        "flops": 2.5e9, "compute_seconds": 3e-3, "communication_seconds": 1e-3, "argument_bytes": 2e5,
        "peak_bytes": 5e6, "memory_limit": 16e9, "gap": 0.0,
        "at_peak": (
            HeldBytes(what="dot_general float32[16,32,256] /home/someone/models/gpt.py:12", nbytes=3e6),
            HeldBytes(what="state/params/embed float32[512,64]", nbytes=32768.0),
        ),
        "candidates": (
            Candidate(mesh=MESH, step_seconds=4e-3, peak_bytes=5e6, feasible=True),
            Candidate(mesh=MeshShape((("data", 8),)), step_seconds=9e-3, peak_bytes=5e10, feasible=False),
        ),
        "pins": (("batch.tokens", "P('data')"),), "notes": ("primitive 'sort' has no sharding rule",),
        "rules": (("batch", ("data",)), ("embed", ()), ("mlp", ("data", "model"))), "donated": (0,),
        "workload": "models.gpt:workload size=tiny",
    }
    return PlanData(arguments=tuple(args), results=tuple(results), **{**fields, **changes})
