"""A program under constraints computes what it computed: every construct, every legal assignment, eight devices."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import MeshShape
from meshplan.cost import Chosen, MeshModel
from meshplan.lower import constrained, jit_planned, planned_function
from meshplan.lower._lower import constraints_of
from meshplan.plan import Found, PlanData, plan_data, prepare
from meshplan.plan import Search as PlanSearch
from meshplan.program import Call, trace
from meshplan.strategy import UNREDUCED, Edge
from tests._programs import adam, block_args, block_loss

Step = Callable[..., Any]
SIZES = {"data": 4, "model": 2}


# -------------------------------------------------------------------------------------- random legal plans


@dataclass(frozen=True)
class Prepared:
    """A step with arguments, what one device makes of them, and what a plan is chosen from."""

    step: Step
    args: tuple[Any, ...]
    wanted: Any
    call: Call
    search: PlanSearch
    models: dict[str, MeshModel]

    @classmethod
    def of(cls, step: Step, *args: Any, platform: str = "cpu:8") -> Prepared:
        call = Call(step=step, args=args, kwargs={})
        search = prepare(trace(call), mp.Machine.preset(platform), {}, None, mp.Options())
        meshes = [MeshShape.of(m) for m in (SIZES, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2})]
        models = {str(m): MeshModel(search.space, search.machine, m) for m in meshes}
        return cls(step, args, jax.jit(step)(*args), call, search, models)

    def data(self, mesh: str, seed: int) -> PlanData:
        """A plan of one random strategy per class; where a sum is wanted open that was completed, it is closed."""
        model, rng = self.models[mesh], np.random.default_rng(seed)
        choice = [int(rng.integers(len(choices))) for choices in model.choices]
        chosen = Chosen(model, choice)
        for c in sorted({model.space.ties.class_of[e.target] for e in chosen.graph.edges if more_open(chosen, e)}):
            closed = np.flatnonzero((model.choices[c].assign != UNREDUCED).all(axis=1))
            choice[c] = int(rng.choice(closed))
        chosen = Chosen(model, choice)
        assert not any(more_open(chosen, e) for e in chosen.graph.edges)
        found = Found(model.mesh, chosen, chosen.predict(), 0.0, True)
        return plan_data(self.search, found, [], step="step", pins={})

    def run(self, data: PlanData, mesh: Mesh) -> Any:
        """Compiled with little effort: a random plan moves everything about and runs once."""
        lowered = jit_planned(data, self.search.program, self.call, mesh).lower(*self.args)
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        return lowered.compile(quick)(*self.args)


def more_open(chosen: Chosen, edge: Edge) -> bool:
    """Whether an edge ends more unreduced than it begins, which no move can bring about."""
    return not set(chosen.target_spec(edge).unreduced) <= set(chosen.source_spec(edge).unreduced)


def mesh_of(data: PlanData, make_mesh: Callable[..., Mesh]) -> Mesh:
    return make_mesh(**data.mesh.to_dict())


def assert_same(found: Any, wanted: Any, rtol: float = 2e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind in "fc":
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.abs(b).max(initial=0.0)))
        else:
            np.testing.assert_array_equal(a, b)


def filled(tree: Any, seed: int = 0) -> Any:
    """Random floats in the shapes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: (rng.standard_normal(s.shape) / 4).astype(np.float32), tree)


def transformer_step(params: Any, tokens: Any) -> Any:
    """The loss and new parameters of an attention block with an MLP and tied embeddings."""
    value, grads = jax.value_and_grad(block_loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@functools.cache
def transformer(platform: str = "cpu:8") -> Prepared:
    params, _ = block_args()
    tokens = np.random.default_rng(1).integers(0, 32, (8, 8)).astype(np.int32)
    return Prepared.of(transformer_step, filled(params), tokens, platform=platform)


@pytest.mark.parametrize("seed", range(10))
def test_any_legal_assignment_computes_what_one_device_computes(seed: int, make_mesh: Callable[..., Mesh]):
    """Also with sums merged as for other back ends: their plans run on these devices too."""
    about = transformer("h100:1x8" if seed % 3 == 2 else "cpu:8")
    data = about.data(list(about.models)[seed % len(about.models)], seed)
    assert_same(about.run(data, mesh_of(data, make_mesh)), about.wanted)


# ------------------------------------------------------------------------------------------- constructs


@jax.custom_jvp
def soft(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


@soft.defjvp
def _soft_jvp(primals: Any, tangents: Any) -> Any:
    return soft(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])


@jax.custom_vjp
def bounded(x: Any) -> Any:
    return jnp.sin(x)


bounded.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))

TABLE = np.linspace(-1, 1, 16 * 16, dtype=np.float32).reshape(16, 16)


def scanned(x: Any, ws: Any) -> Any:
    def body(c: Any, w: Any) -> Any:
        h = jnp.tanh(c[0] @ w)
        return (h, c[1] + 1), h.mean(0)

    return jax.lax.scan(body, (x, jnp.int32(0)), ws, reverse=True)


def looped(x: Any, ws: Any) -> Any:
    def body(c: Any) -> Any:
        return c[0] + 1, c[1] @ ws[0] * 0.1 + x

    return jax.lax.while_loop(lambda c: (c[0] < 5) & (jnp.abs(c[1]).sum() < 1e6), body, (0, x))


def branched(x: Any, ws: Any) -> Any:
    flag = x.sum() > 0
    first = jax.lax.cond(flag, lambda a: (a @ ws[0], a.sum()), lambda a: (a * 2, 0.0 * a.sum()), x)
    return first, jax.lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, lambda a: a @ ws[1]], x)


def rematerialised(x: Any, ws: Any) -> Any:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w) @ jnp.asarray(TABLE)

    def loss(v: Any) -> Any:
        return jax.lax.scan(lambda c, w: (layer(c, w), None), x, v)[0].sum()

    return jax.value_and_grad(loss)(ws)


def nested(x: Any, ws: Any) -> Any:
    inner = jax.jit(lambda a, b: a @ b)
    outer = jax.jit(lambda a: inner(inner(a, ws[0]), ws[1]) + inner(a, ws[2]))
    return outer(x), jax.jit(outer)(x * 2)


def custom(x: Any, ws: Any) -> Any:
    return jax.value_and_grad(lambda w: bounded(soft(x @ w[0])).sum())(ws)


def constant(x: Any, ws: Any) -> Any:
    table = jnp.asarray(TABLE)
    return jax.lax.scan(lambda c, w: (c @ table @ w, (c @ table)[0]), x, ws), x @ table


def of_other_dtypes(x: Any, ws: Any) -> Any:
    order = jnp.argsort(x, axis=1)
    return order, x > 0, (x * 100).astype(jnp.int8), jnp.any(x > 1), ws.argmax(), x.astype(jnp.bfloat16)


def with_keys(x: Any, ws: Any) -> Any:
    keys = jax.random.split(jax.random.key(7), 8)
    kept = jax.vmap(lambda k, row: jax.random.normal(k, row.shape) * row)(keys, x[:8])
    return kept, keys, jax.random.fold_in(keys[0], 3)


def of_literals(x: Any, ws: Any) -> Any:
    return x + 1, 3.0, jnp.zeros(()), jnp.zeros((8, 16)), jnp.arange(16), None, ws


def loop_in_branch_in_loop(x: Any, ws: Any) -> Any:
    def body(c: Any, w: Any) -> Any:
        go = c.sum() > 0
        return jax.lax.cond(go, lambda h: jax.lax.fori_loop(0, 3, lambda i, g: jnp.tanh(g @ w), h), jnp.cos, c), c.max()

    return jax.lax.scan(body, x, ws)


CONSTRUCTS: list[Step] = [
    scanned, looped, branched, rematerialised, nested, custom, constant, of_other_dtypes, with_keys, of_literals,
    loop_in_branch_in_loop,
]  # fmt: skip


@functools.cache
def construct(step: Step) -> Prepared:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 16)).astype(np.float32)
    return Prepared.of(step, x, (rng.standard_normal((4, 16, 16)) / 4).astype(np.float32))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("step", CONSTRUCTS, ids=lambda s: s.__name__)
def test_a_program_under_constraints_equals_the_plain_function(step: Step, seed: int, make_mesh: Callable[..., Mesh]):
    about = construct(step)
    data = about.data(str(MeshShape.of(SIZES)), seed)
    mesh = mesh_of(data, make_mesh)
    flat = constrained(about.search.program.jaxpr, constraints_of(data, about.search.program), mesh)
    outs = jax.jit(flat)(*jax.tree.leaves(about.args))
    assert_same(jax.tree.unflatten(about.search.program.out_tree, outs), about.wanted)
    assert_same(about.run(data, mesh), about.wanted)


def test_a_loop_of_no_steps_leaves_its_carry(make_mesh: Callable[..., Mesh]):
    about = Prepared.of(scanned, np.ones((16, 16), np.float32), np.ones((0, 16, 16), np.float32))
    data = about.data(str(MeshShape.of(SIZES)), 0)
    assert_same(about.run(data, mesh_of(data, make_mesh)), about.wanted)


# ------------------------------------------------------------------------------------------- what is kept


def primitives(jaxpr: Any) -> Counter[str]:
    """Of a jaxpr and all jaxprs in it."""
    found: Counter[str] = Counter()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found[eqn.primitive.name] += 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    found += primitives(inner)
    return found


def test_rematerialised_blocks_stay_and_their_recomputation_with_them(make_mesh: Callable[..., Mesh]):
    about = construct(rematerialised)
    data = about.data(str(MeshShape.of(SIZES)), 0)
    planned = jax.make_jaxpr(planned_function(data, about.search.program, mesh_of(data, make_mesh)))(*about.args)
    plain = jax.make_jaxpr(about.step)(*about.args)
    names = primitives(planned), primitives(plain)
    for name in ("dot_general", "checkpoint", "remat2", "scan", "tanh"):
        assert names[0][name] == names[1][name]
    assert names[0]["checkpoint"] + names[0]["remat2"] >= 1
    assert names[0]["sharding_constraint"] > names[1]["sharding_constraint"]


def test_a_constraint_that_the_user_wrote_for_another_mesh_is_written_again_for_the_plans(
    make_mesh: Callable[..., Mesh],
):
    other = make_mesh(**dict(reversed(SIZES.items())))

    def step(x: Any) -> Any:
        return jnp.sin(jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(other, P(next(iter(SIZES))))))

    x = np.ones((16, 16), np.float32)
    about = Prepared.of(step, x)
    assert about.search.program.notes == ()
    data = about.data(str(MeshShape.of(SIZES)), 0)
    assert_same(about.run(data, mesh_of(data, make_mesh)), about.wanted)


def test_results_lie_as_planned_and_arguments_are_donated(make_mesh: Callable[..., Mesh]):
    def step(state: Any, g: Any) -> Any:
        return {"w": state["w"] - adam(dict.fromkeys(("params", "mu", "nu"), state), state)["mu"]["w"] * g}, g.sum()

    args = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}, jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = mp.plan(step, *args, machine="cpu:8", mesh=SIZES, pins={"state/w": P("data", "model")})
    mesh = plan.mesh()
    state = jax.device_put({"w": np.ones((16, 16), np.float32)}, plan.in_shardings(mesh)[0])
    new, _ = plan.jit(mesh)(state, np.ones((16, 16), np.float32))
    assert new["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert state["w"].is_deleted()


def test_keyword_and_static_arguments_reach_the_step_and_lie_as_planned():
    def step(w: Any, power: int, *, x: Any, mode: str) -> Any:
        y = (x @ w) ** power
        return y.sum(0) if mode == "sum" else y

    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((128, 64), jnp.float32)
    plan = mp.plan(
        step, w, 2, kwargs={"x": x, "mode": "sum"}, static_argnums=1, static_argnames="mode", donate_argnums=(),
        machine="cpu:8", mesh=SIZES, pins={"x": P(("data", "model"))},
    )
    fn = plan.jit()
    compiled = fn.lower(w, 2, x=x, mode="sum").compile()
    assert compiled.input_shardings[1]["x"].is_equivalent_to(NamedSharding(plan.mesh(), P(("data", "model"))), 2)
    rng = np.random.default_rng(0)
    values = {k: rng.standard_normal(s.shape).astype(np.float32) for k, s in (("w", w), ("x", x))}
    found = fn(values["w"], 2, x=values["x"], mode="sum")
    np.testing.assert_allclose(found, ((values["x"] @ values["w"]) ** 2).sum(0), rtol=1e-4)
    with pytest.raises(mp.ArgumentError, match="static argument 1 is 3, planned was 2"):
        fn(values["w"], 3, x=values["x"], mode="sum")
    with pytest.raises(mp.ArgumentError, match="static argument 'mode' is 'all', planned was 'sum'"):
        fn(values["w"], 2, x=values["x"], mode="all")
