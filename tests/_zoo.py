"""What every model of the zoo has to show: it learns, and its planned steps compute what one device computes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import meshplan as mp
from meshplan.hints import Workload, leaf_paths
from meshplan.lower import compare_leaves

# LLVM's work and the emission of fused loops are not what is tested, and take most of a compile's time. XLA of a later
# jax has no switch for the second.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
# What is planned has to be right, not the best: a short search will do.
QUICK = mp.Options(solver_seconds=2.0, max_axes=2)
MESH = {"data": 4, "model": 2}


def compiled(jitted: Any, *args: Any) -> Callable[..., Any]:
    return jitted.lower(*args).compile(compiler_options=FAST_COMPILE)


def host(tree: Any) -> Any:
    """Copies in host memory, but for keys, which have no numpy form."""
    return jax.tree.map(lambda x: x if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), tree)


def start(workload: Workload, seed: int = 0) -> tuple[Any, ...]:
    """Real arguments but for the batch."""
    assert workload.init is not None
    return host(compiled(jax.jit(workload.init), jax.random.key(seed))(jax.random.key(seed)))


def train(workload: Workload, steps: int) -> list[float]:
    """Losses of the first steps on one device."""
    assert workload.batches is not None
    (state,) = start(workload)
    step = compiled(jax.jit(workload.step, donate_argnums=workload.donate_argnums), *workload.args)
    found = []
    for batch in itertools.islice(workload.batches(), steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def parameters(workload: Workload) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(workload.args[0]["params"]))


@dataclass(frozen=True)
class Case:
    """A workload whose optimizer keeps the gradients, its arguments, and what one device makes of them."""

    workload: Workload
    args: tuple[Any, ...]
    alone: Any


@functools.cache
def case(make: Callable[..., Workload], **overrides: Any) -> Case:
    """With plain momentum, which starts as the gradient: Adam divides a gradient by its own size, so that where the
    true gradient is zero it makes full steps out of rounding."""
    workload = make("tiny", **{"optimizer": "sgd", "clip": None, **overrides})
    assert workload.batches is not None
    args = (*start(workload), next(workload.batches()))
    return Case(workload, args, host(compiled(jax.jit(workload.step), *args)(*args)))


def check_plan(about: Case, **how: Any) -> mp.Plan:
    """Plan, compile and run: every leaf of state, gradient and loss as on one device, placed as planned."""
    plan = mp.plan(about.workload, machine="cpu:8", **{"options": QUICK, **how})
    together = compiled(plan.jit(), *plan.abstract_args())(*plan.shard(*about.args))
    leaves = jax.tree.leaves(together)
    for spec, array in zip(jax.tree.leaves(plan.out_specs), leaves, strict=True):
        assert array.sharding.is_equivalent_to(jax.sharding.NamedSharding(plan.mesh(), spec), array.ndim)
    checks = compare_leaves(leaves, jax.tree.leaves(about.alone), leaf_paths((about.alone,), ("result",)), 1e-5)
    bad = [f"{c.path}: {c.relative_error:.2e}, {c.absolute_error:.2e} absolute" for c in checks if not c.ok]
    assert not bad, "\n".join(bad)
    assert plan.collectives, "nothing is split"
    return plan


def check_shapes(workload: Workload) -> None:
    """Real state and batches have the shapes of the arguments; batches come again the same."""
    assert workload.init is not None
    assert workload.batches is not None
    real = (*jax.eval_shape(workload.init, jax.random.key(0)), next(workload.batches()))
    assert jax.tree.structure(real) == jax.tree.structure(workload.args)
    for made, planned in zip(jax.tree.leaves(real), jax.tree.leaves(workload.args), strict=True):
        assert (made.shape, made.dtype) == (planned.shape, planned.dtype)
    jax.tree.map(np.testing.assert_array_equal, real[-1], next(workload.batches()))
