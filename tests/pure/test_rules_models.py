"""Every primitive of a training step has a rule, and every rule holds where the step uses it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from meshplan.rules import TABLE
from tests._proof import equations, prove, random_operands
from tests._rule_cases import ELEMENTWISE

_D, _V, _B, _S = 8, 12, 4, 6
_CALLS = frozenset({"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "scan", "while", "cond", "checkpoint"})


def _normal(x: Any, scale: Any, bias: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def _gpt(params: Any, tokens: Any, key: Any) -> Any:
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    split = lambda t: t.reshape(*t.shape[:-1], 2, -1)  # noqa: E731
    q, k, v = map(split, jnp.split(_normal(x, params["scale"], params["bias"]) @ params["qkv"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ params["out"]
    hidden = jax.nn.gelu(x @ params["up"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0)
    logits = (x + hidden @ params["down"]) @ params["embed"].T
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()
    one_hot = jax.nn.one_hot(tokens, _V)
    return loss - (one_hot * jax.nn.log_softmax(logits)).sum(-1).mean()


def _rope(t: Any) -> Any:
    angle = jnp.arange(t.shape[1])[:, None] / (1e4 ** (jnp.arange(t.shape[-1] // 2) / 2))
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(t, 2, -1)
    c, d = t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]
    return jnp.concatenate([a * cos - b * sin, d * cos + c * sin], -1) + jnp.concatenate([-d, c], -1)


def _llama(params: Any, tokens: Any, key: Any) -> Any:
    x = jnp.take(params["embed"], tokens, axis=0)
    normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * params["scale"]
    heads = (normal @ params["qkv"]).reshape(_B, _S, 6, 4)
    q, k, v = heads[:, :, :2], heads[:, :, 2:3], heads[:, :, 3:4]
    q, k, v = _rope(q), jnp.repeat(_rope(k), 2, 2), jnp.repeat(v, 2, 2)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params["out"]
    x = x + (jax.nn.silu(x @ params["up"]) * (x @ params["gate"])) @ params["down"]
    logits = (x @ params["embed"].T).astype(jnp.bfloat16).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
    return -picked.mean()


def _mlp(params: Any, tokens: Any, key: Any) -> Any:
    x = params["embed"][:_S] + params["position"]
    hidden = jax.nn.relu(jax.nn.tanh(x @ params["up"]))
    return ((hidden @ params["down"]) ** 2).sum() + optax.sigmoid_binary_cross_entropy(x, x > 0).mean()


def _params() -> Any:
    shapes = {
        "embed": (_V, _D), "position": (_S, _D), "scale": (_D,), "bias": (_D,), "qkv": (_D, 3 * _D),
        "out": (_D, _D), "up": (_D, 16), "gate": (_D, 16), "down": (16, _D),
    }  # fmt: skip
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


_OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "clipped_lion": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
}
_LOSSES = {"gpt": _gpt, "llama": _llama, "mlp": _mlp}


def _step(loss: Any, optimizer: Any) -> Any:
    def step(params: Any, state: Any, tokens: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _traced(loss: str, optimizer: str) -> list[Any]:
    params, opt = _params(), _OPTIMIZERS[optimizer]()
    key = jax.random.key(0)
    args = (params, opt.init(params), jnp.zeros((_B, _S), jnp.int32), key)
    return list(equations(_step(_LOSSES[loss], opt), *args))


_STEPS = [("gpt", "adamw"), ("llama", "clipped_lion"), ("mlp", "adafactor"), ("mlp", "sgd"), ("mlp", "adamw")]


@pytest.mark.parametrize(("loss", "optimizer"), _STEPS)
def test_every_primitive_of_a_training_step_has_a_rule(loss: str, optimizer: str) -> None:
    names = {eqn.primitive.name for eqn in _traced(loss, optimizer)} - _CALLS
    assert len(names) > 20
    assert sorted(names - set(TABLE)) == []


# random_bits is proved beside its counters in test_rules_random
_ELSEWHERE = frozenset({"random_bits"}) | _CALLS


_ELEMENTWISE = frozenset(case.name for case in ELEMENTWISE)
_SIZES = frozenset({"shape", "slice_sizes", "limit_indices", "padding_config"})


def _signature(eqn: Any) -> str:
    """Equal for equations that differ in sizes alone, but for reshapes, whose rule is a matter of sizes.

    Elementwise operations, each proved in test_rules_proofs, differ in how operands are broadcast alone.
    """
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name in _ELEMENTWISE:
        return str([[n == 1 for n in a.shape] for a in avals])
    if eqn.primitive.name == "reshape":
        return str([a.shape for a in avals])
    params = {k: v for k, v in eqn.params.items() if k not in _SIZES}
    return f"{eqn.primitive.name} {[[n == 1 for n in a.shape] for a in avals]} {params}"


@pytest.mark.slow
def test_the_rules_hold_for_every_kind_of_equation_of_training_steps() -> None:
    steps = [("gpt", "adamw"), ("llama", "clipped_lion"), ("mlp", "adafactor")]
    traced = [eqn for step in steps for eqn in _traced(*step) if eqn.primitive.name not in _ELSEWHERE]
    distinct = {_signature(eqn): eqn for eqn in traced}
    factors = 0
    for i, eqn in enumerate(distinct.values()):
        factors += len(prove(eqn, random_operands(eqn, seed=i), most_counts=1).sizes)
    assert len(distinct) > 50
    assert factors > len(distinct)
