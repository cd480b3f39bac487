"""The plan and every template compute the loss and the gradients of one device, over six mesh shapes.

The step returns gradients, not an optimizer's update: Adam divides a gradient by its own size, so that where the true
gradient is zero it makes full steps out of rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

import meshplan as mp
from meshplan.hints import leaf_paths
from models import gpt, llama
from models._train import cross_entropy

BATCH, SEQ, VOCAB = 8, 16, 64
SMALL: dict[str, Any] = {"seq": SEQ, "batch": BATCH, "width": 32, "heads": 8, "head_dim": 8, "vocab": VOCAB}
TEMPLATES = ("dp", "zero1", "fsdp", "megatron", "megatron_sp", "tp_fsdp")
# (mesh, unrolled layers)
MESHES = [
    ({"data": 8}, 2), ({"data": 1, "model": 8}, 2), ({"data": 8, "model": 1}, 2), ({"data": 4, "model": 2}, 2),
    ({"data": 2, "model": 4}, 2), ({"data": 2, "fsdp": 2, "model": 2}, 1),
]  # fmt: skip
# LLVM's work and the emission of fused loops are not what is tested, and take most of a compile's time. XLA of a later
# jax has no switch for the second.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
# What is planned has to be right, not the best: a short search will do.
QUICK = mp.Options(solver_seconds=4.0)


@dataclass(frozen=True)
class Case:
    """A step `(params, batch) -> (params, loss, gradients)`, its arguments, and what one device makes of them."""

    step: Callable[..., Any]
    params: Any
    batch: dict[str, np.ndarray]
    loss: float
    gradients: Any


def weights(rng: np.random.Generator, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """About as after some training: scales near one, biases that are not zero."""
    centre, deviation = (1.0, 0.1) if path.endswith("scale") else (0.0, 0.05)
    return rng.normal(centre, deviation, shape).astype(np.float32)


def compiled(jitted: Any, *args: Any) -> Callable[..., Any]:
    return jitted.lower(*args).compile(compiler_options=FAST_COMPILE)


@functools.cache
def case(model: str, layers: int, scan: bool = False) -> Case:
    switches = {"layers": layers, "scan": scan, "remat": scan}
    if model == "gpt":
        gpt_cfg = replace(gpt.SIZES["tiny"], **SMALL, **switches)
        make, apply = functools.partial(gpt.init, cfg=gpt_cfg), functools.partial(gpt.apply, cfg=gpt_cfg)
    else:
        llama_cfg = replace(llama.SIZES["tiny"], **SMALL, **switches, kv_heads=4, mlp=64)
        make, apply = functools.partial(llama.Llama, llama_cfg), llama.Llama.__call__

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return cross_entropy(apply(p, batch["tokens"]), batch["targets"])

        return (params, *jax.value_and_grad(loss)(params))

    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32) for name in ("tokens", "targets")}
    like = jax.eval_shape(make, jax.random.key(0))
    leaves = zip(leaf_paths((like,), ("params",)), jax.tree.leaves(like), strict=True)
    params = jax.tree.unflatten(jax.tree.structure(like), [weights(rng, path, leaf.shape) for path, leaf in leaves])
    _, loss, gradients = compiled(jax.jit(step), params, batch)(params, batch)
    return Case(step, params, batch, float(loss), jax.tree.map(np.asarray, gradients))


def distances(found: Any, wanted: Any) -> Iterator[tuple[str, float]]:
    """Path and distance of every gradient: over its own norm, or where that is rounding alone, over the largest."""
    paths = leaf_paths((wanted,), ("gradients",))
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in
             zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]  # fmt: skip
    largest = max(np.linalg.norm(b) for _, b in pairs)
    for path, (a, b) in zip(paths, pairs, strict=True):
        # the key bias shifts all scores of a row alike, which a softmax does not see
        size = largest if path.endswith("k_bias") else np.linalg.norm(b)
        yield path, float(np.linalg.norm(a - b) / size)


def faults(name: str, plan: mp.Plan, about: Case) -> list[str]:
    """What the planned step does otherwise than one device."""
    args = (jax.tree.map(np.array, about.params), about.batch)
    params, loss, gradients = compiled(plan.jit(), *args)(*args)
    out = [f"{name}: {path} is off by {off:.1e}" for path, off in distances(gradients, about.gradients) if off > 1e-5]
    if abs(float(loss) - about.loss) > 1e-6 * about.loss:
        out.append(f"{name}: loss {float(loss):.9g}, one device {about.loss:.9g}")
    for spec, array in zip(jax.tree.leaves(plan.out_specs), jax.tree.leaves((params, loss, gradients)), strict=True):
        if not array.sharding.is_equivalent_to(jax.sharding.NamedSharding(plan.mesh(), spec), array.ndim):
            out.append(f"{name}: a result is {array.sharding}, planned was {spec}")
    for kept, given in zip(jax.tree.leaves(params), jax.tree.leaves(about.params), strict=True):
        if not np.array_equal(kept, given):
            out.append(f"{name}: the parameters that pass through are changed")
    return out


def check(about: Case, mesh: dict[str, int], templates: tuple[str, ...]) -> dict[str, mp.Plan]:
    """Plan, run and compare; plans that say the same are run once."""
    shapes = jax.eval_shape(lambda: (about.params, about.batch))
    plans = mp.compare(about.step, *shapes, machine="cpu:8", mesh=mesh, templates=templates, options=QUICK).plans
    assert tuple(plans) == ("plan", *templates)
    different = {(p.data.arguments, p.data.results, p.data.ops): (name, p) for name, p in reversed(list(plans.items()))}
    found = [fault for name, plan in different.values() for fault in faults(name, plan, about)]
    assert not found, "\n".join(found)
    return dict(plans)


@pytest.mark.parametrize(
    ("mesh", "layers"), MESHES, ids=[" ".join(f"{k}={n}" for k, n in mesh.items()) for mesh, _ in MESHES]
)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_loss_and_gradients_are_those_of_one_device(model: str, mesh: dict[str, int], layers: int) -> None:
    about = case(model, layers)
    plans = check(about, mesh, TEMPLATES)
    data = math.prod(n for axis, n in mesh.items() if axis != list(mesh)[-1]) if len(mesh) > 1 else 8
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(about.params))
    if data > 1:  # the templates are what they are called
        assert plans["fsdp"].data.argument_bytes < 0.5 * whole < plans["dp"].data.argument_bytes
        tokens = plans["dp"].specs["batch/tokens"]
        assert math.prod(mesh[a] for a in jax.tree.leaves(tuple(tokens))) == 8


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_scanned_and_rematerialised_layers_compute_what_one_device_does(model: str) -> None:
    check(case(model, 2, scan=True), {"data": 4, "model": 2}, ("fsdp", "megatron_sp"))
