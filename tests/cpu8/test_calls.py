"""Calls of other kinds than jit: their operations stand in their place, so that factors pass through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental.scheduling_groups import xla_metadata_call
from jax.extend.linear_util import wrap_init
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import _jax, _jax_primitives
from tests._programs import f32

ROWS, WIDTH = 2048, 16


def body(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def bound(name: str) -> Callable[[Any, Any], Any]:
    """The body as an equation of a primitive that jax's own transformations make, bound by its own parameters."""

    def call(x: Any, w: Any) -> Any:
        primitive = _jax_primitives.primitive_named(name)
        if primitive is None:
            pytest.skip(f"jax {jax.__version__} has no primitive '{name}'")
        jaxpr = jax.make_jaxpr(body)(x, w)
        if name == "closed_call":
            return primitive.bind(x, w, **primitive.get_bind_params({"call_jaxpr": jaxpr}))[0]
        if name == "call":
            function = wrap_init(lambda *xs: [body(*xs)], debug_info=jaxpr.jaxpr.debug_info)
            return primitive.bind(x, w, subfuns=(function,))[0]
        old = jax.__version_info__ < (0, 12) and name == "eval_jaxpr"
        return primitive.bind(x, w, **{"jaxpr" if old else "call_jaxpr": jaxpr})[0]

    return call


def mapped() -> Callable[[Any, Any], Any]:
    call = custom_vmap(body)
    call.def_vmap(lambda size, batched, x, w: (call(x, w), True))
    return call


def linear(x: Any, w: Any) -> Any:
    return linear_call(lambda w, x: x @ w, lambda w, t: t @ w.T, lax.stop_gradient(w), jnp.tanh(x))


CALLS: dict[str, Any] = {
    "composite": lax.composite(body, name="my.op"),
    "custom_vmap_call": mapped(),
    "linear_call": linear,
    "xla_metadata_call": xla_metadata_call(body, scheduling_group="1"),
    **{name: bound(name) for name in ("eval_jaxpr", "closed_call", "call")},
}


def primitives(fn: Callable[..., Any], *args: Any) -> set[str]:
    return {eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_factor_passes_through_a_call(name: str) -> None:
    call = CALLS[name]
    staged = {name, "closed_call"} if name == "eval_jaxpr" else {name}  # jax 0.10 stages the one as the other
    assert staged & primitives(call, f32(ROWS, WIDTH), f32(WIDTH, WIDTH)), "the call is in the program"

    made = mp.plan(lambda x, w: call(x, w) * 2, f32(ROWS, WIDTH), f32(WIDTH, WIDTH), machine="cpu:8",
                   mesh={"data": 8}, pins={"x": P("data"), "w": P(), "0": P("data")}, donate_argnums=())  # fmt: skip
    assert made.collectives == made.audit().collectives == ()
    told = [note for note in made.notes if "is opened" in note]
    assert len(told) == (name in _jax.TOLD_CALLS)
    assert [note for note in made.notes if "no sharding rule" in note] == []
    rng = np.random.default_rng(0)
    assert made.verify(*(rng.normal(size=s).astype(np.float32) for s in ((ROWS, WIDTH), (WIDTH, WIDTH)))).ok


def test_what_the_compiler_is_not_told_is_said() -> None:
    made = mp.plan(lambda x, w: CALLS["composite"](x, w) + CALLS["composite"](x, 2 * w), f32(ROWS, WIDTH),
                   f32(WIDTH, WIDTH), machine="cpu:8", mesh={"data": 8}, donate_argnums=())  # fmt: skip
    assert made.notes == (
        "composite 'my.op' is opened (2 times): the compiler sees its operations, not what it was told by that name",
    )


def test_derivatives_of_calls_pass_factors_too() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: (linear(CALLS["xla_metadata_call"](x, w), w + 1) ** 2).mean())(w)

    made = mp.plan(step, f32(WIDTH, WIDTH), f32(ROWS, WIDTH), machine="cpu:8", mesh={"data": 8},
                   pins={"x": P("data"), "w": P()})  # fmt: skip
    assert [note for note in made.notes if "no sharding rule" in note] == []
    assert {c.kind for c in made.collectives} <= {"all-reduce"}
    rng = np.random.default_rng(0)
    assert made.verify(*(rng.normal(size=s).astype(np.float32) for s in ((WIDTH, WIDTH), (ROWS, WIDTH)))).ok


# ------------------------------------------------------------------------------------------------- linear solves


def solved(a: Any, b: Any) -> Any:
    """One system for every row of the batch, with constants in each of the four functions."""

    def one(a: Any, b: Any) -> Any:
        return lax.custom_linear_solve(
            lambda v: a @ v, b, lambda _, v: jnp.linalg.inv(a) @ v, lambda _, v: jnp.linalg.inv(a.T) @ v
        )

    return jax.vmap(one)(a, b)


@pytest.mark.parametrize("which", ["forward", "gradient", "solve", "conjugate gradients"])
def test_a_batch_of_linear_solves_splits(which: str) -> None:
    steps: dict[str, Callable[..., Any]] = {
        "forward": solved,
        "gradient": lambda a, b: jax.grad(lambda b: (solved(a, b) ** 2).sum())(b),
        "solve": jnp.linalg.solve,
        "conjugate gradients": lambda a, b: jax.vmap(lambda a, b: jax.scipy.sparse.linalg.cg(
            lambda v: a @ v, b, maxiter=8)[0])(a, b),
    }  # fmt: skip
    step = steps[which]
    shapes = (64, 8, 8), (64, 8, 4) if which == "solve" else (64, 8)
    made = mp.plan(step, *(f32(*s) for s in shapes), machine="cpu:8", mesh={"data": 8}, donate_argnums=(),
                   pins={"a": P("data"), "b": P("data")})  # fmt: skip
    assert made.out_specs == P("data")
    assert [note for note in made.notes if "no sharding rule" in note] == []
    assert max((c.nbytes for c in made.audit().collectives), default=0) <= 8, "flags of a loop's end at most"
    rng = np.random.default_rng(0)
    a = rng.normal(size=shapes[0]) * 0.1
    a = (a @ a.swapaxes(1, 2) + np.eye(8)).astype(np.float32)
    assert made.verify(a, rng.normal(size=shapes[1]).astype(np.float32)).ok
