"""Small training steps as programs, graphs and searches, for tests of what is built from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshplan import Options
from meshplan.core import MeshShape
from meshplan.cost import MeshModel, Space
from meshplan.machine import Machine
from meshplan.plan import Search, prepare, resolve_pins
from meshplan.program import Call, Program, trace
from meshplan.solve import evaluate
from meshplan.strategy import Graph, build_graph, tie

Step = Callable[..., Any]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def program_of(step: Step, *args: Any, donate: tuple[int, ...] = ()) -> Program:
    return trace(Call(step=step, args=args, kwargs={}, donate_argnums=donate))


def graph_of(step: Step, *args: Any, donate: tuple[int, ...] = (), merge_sums: bool = True) -> Graph:
    return build_graph(program_of(step, *args, donate=donate), merge_sums)


def without_latency(name: str) -> Machine:
    """A known machine on whose links only bytes take time."""
    machine = Machine.preset(name)
    return replace(machine, dims=tuple(replace(d, latency_seconds=0.0) for d in machine.dims))


def model_of(graph: Graph, machine: str | Machine, radius: int = 2, **sizes: int) -> MeshModel:
    where = Machine.preset(machine) if isinstance(machine, str) else machine
    return MeshModel(Space.of(graph, tie(graph, {}, radius)), where, MeshShape.of(sizes))


def priced(model: MeshModel, choice: Sequence[int]) -> float:
    """What the problem of a model says that a choice costs."""
    return evaluate(model.problem((), math.inf), choice)[0]


def search_of(
    step: Step, *args: Any, machine: str = "cpu:8", donate: tuple[int, ...] = (),
    pins: Mapping[str, PartitionSpec] | None = None, limit: float | None = None, **options: Any,
) -> Search:
    program = program_of(step, *args, donate=donate)
    found = resolve_pins(pins or {}, program.args)
    return prepare(program, Machine.preset(machine), found, limit, Options(**options))


# ------------------------------------------------------------------------------------------------- steps


def mlp_params(layers: int, width: int, hidden: int) -> list[dict[str, jax.ShapeDtypeStruct]]:
    return [{"up": f32(width, hidden), "down": f32(hidden, width)} for _ in range(layers)]


def mlp_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in params:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - y) ** 2)


def sgd_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """Plain gradient descent: no state beside the parameters."""
    loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def adam(state: Any, grads: Any) -> Any:
    """Adam without its step count: `state` holds params, mu and nu of one structure."""
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
    return {"params": params, "mu": mu, "nu": nu}


def adam_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    loss, grads = jax.value_and_grad(mlp_loss)(state["params"], x, y)
    return adam(state, grads), loss


def mlp_args(layers: int, *, batch: int = 32, width: int = 16, hidden: int = 64) -> tuple[Any, ...]:
    return mlp_params(layers, width, hidden), f32(batch, width), f32(batch, width)


def adam_args(layers: int, *, batch: int = 32, width: int = 16, hidden: int = 64) -> tuple[Any, ...]:
    params, x, y = mlp_args(layers, batch=batch, width=width, hidden=hidden)
    return {"params": params, "mu": params, "nu": params}, x, y


def block_params(width: int, heads: int, head_dim: int, hidden: int) -> dict[str, jax.ShapeDtypeStruct]:
    inner = heads * head_dim
    return {
        "q": f32(width, inner), "k": f32(width, inner), "v": f32(width, inner), "out": f32(inner, width),
        "up": f32(width, hidden), "down": f32(hidden, width), "scale": f32(width),
    }  # fmt: skip


def block(params: Any, x: jax.Array, heads: int) -> jax.Array:
    """Causal attention and an MLP, both around a residual."""

    def norm(h: jax.Array) -> jax.Array:
        return h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6) * params["scale"]

    def split(h: jax.Array) -> jax.Array:
        return h.reshape(*h.shape[:2], heads, -1)

    h = norm(x)
    q, k, v = (split(h @ params[name]) for name in ("q", "k", "v"))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    seq = x.shape[1]
    logits = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), logits, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
    x = x + mixed.reshape(*x.shape[:2], -1) @ params["out"]
    return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]


def block_loss(params: Any, tokens: jax.Array, heads: int = 4) -> jax.Array:
    """Next-token loss of one block over an embedding that is also the output."""
    x = block(params["block"], params["embed"][tokens], heads)
    logits = x[:, :-1] @ params["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))


def block_step(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    value, grads = jax.value_and_grad(block_loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def adam_block_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    value, grads = jax.value_and_grad(block_loss)(state["params"], tokens)
    return adam(state, grads), value


def block_args(*, batch: int = 8, seq: int = 8, width: int = 16, vocab: int = 32) -> tuple[Any, ...]:
    params = {"embed": f32(vocab, width), "block": block_params(width, 4, width // 2, 4 * width)}
    return params, jax.ShapeDtypeStruct((batch, seq), jnp.int32)


def adam_block_args(**sizes: int) -> tuple[Any, ...]:
    params, tokens = block_args(**sizes)
    return {"params": params, "mu": params, "nu": params}, tokens
