"""A graph network in pure JAX: GraphSAGE with mean aggregation, which names the classes of nodes.

Hamilton et al. 2017, arXiv 1706.02216, trained on the whole graph at once. Nodes read their senders by a gather
over the edges and add up what arrives by `segment_sum`. "tiny" is a real graph: handwritten digits, each with
its nearest neighbours. The other sizes have the shapes of graphs of the Open Graph Benchmark (Hu et al. 2020,
arXiv 2005.00687; nodes and edges rounded up to multiples of 128), and a generated graph, as `sampled` states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from meshplan.hints import Workload, dims, params
from models._train import Optimizer, make_optimizer, new_state, train_step

Graph = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. `edges` are directed: a link that works both ways counts twice."""

    layers: int
    width: int
    nodes: int
    edges: int
    features: int
    classes: int
    real: bool = False
    dtype: str = "bfloat16"
    learning_rate: float = 1e-2
    clip: float | None = None


SIZES = {
    "tiny": Config(layers=2, width=32, nodes=1792, edges=7168, features=64, classes=10, real=True, dtype="float32"),
    "arxiv": Config(layers=3, width=256, nodes=169344, edges=2332544, features=128, classes=40),
    "products": Config(layers=3, width=256, nodes=2449152, edges=123718400, features=100, classes=47),
}


@register_dataclass
@params(own="features hidden", seen="features hidden", bias="hidden")
@dataclass(frozen=True)
class Layer:
    """Weights for the node's own features and for the mean of its senders'."""

    own: jax.Array
    seen: jax.Array
    bias: jax.Array


def init(key: jax.Array, cfg: Config) -> tuple[Layer, ...]:
    """Fresh parameters, f32."""
    widths = [cfg.features, *[cfg.width] * (cfg.layers - 1), cfg.classes]
    keys = jax.random.split(key, (cfg.layers, 2))
    return tuple(
        Layer(*(jax.random.normal(pair[i], (m, n)) * m**-0.5 for i in (0, 1)), bias=jnp.zeros(n))
        for pair, m, n in zip(keys, widths[:-1], widths[1:], strict=True)
    )


@dims("node features, edge, edge -> node features")
def mean_of_senders(x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """Mean of `x` [nodes, features] over the senders of each node; zero where there is none."""
    nodes = x.shape[0]
    total = jax.ops.segment_sum(x[senders], receivers, num_segments=nodes)
    degree = jax.ops.segment_sum(jnp.ones(senders.shape, jnp.float32), receivers, num_segments=nodes)
    return total * (1 / jnp.maximum(degree, 1)).astype(x.dtype)[:, None]


@dims("_, node features, edge, edge -> node classes")
def apply(layers: tuple[Layer, ...], x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """Logits, f32 [nodes, classes]."""
    for i, layer in enumerate(layers):
        own, seen = (w.astype(x.dtype) for w in (layer.own, layer.seen))
        wide = x @ own + mean_of_senders(x, senders, receivers) @ seen + layer.bias.astype(x.dtype)
        x = jax.nn.relu(wide) if i + 1 < len(layers) else wide
    return x.astype(jnp.float32)


def loss(layers: tuple[Layer, ...], graph: dict[str, jax.Array], cfg: Config) -> jax.Array:
    """Mean cross entropy in nats over the nodes whose class is `known`."""
    logits = apply(layers, graph["features"].astype(cfg.dtype), graph["senders"], graph["receivers"])
    classes = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    log_probs = jnp.where(classes == graph["classes"][:, None], jax.nn.log_softmax(logits), 0.0).sum(-1)
    return -jnp.where(graph["known"], log_probs, 0.0).sum() / graph["known"].sum()


def digits(cfg: Config, seed: int = 0) -> Graph:
    """The first digits of scikit-learn, every one linked from its nearest others by their pixels.

    The class of every fourth node, chosen at random, is known.
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    x = np.asarray(pixels[: cfg.nodes] / 16, np.float32)
    neighbours = cfg.edges // cfg.nodes
    squares = (x * x).sum(-1)
    distance = squares[:, None] + squares - 2 * x @ x.T
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :neighbours]
    return _graph(cfg, x, np.asarray(classes[: cfg.nodes]), nearest.ravel(),
                  np.repeat(np.arange(cfg.nodes), neighbours), np.random.default_rng(seed))  # fmt: skip


def sampled(cfg: Config, seed: int = 0) -> Graph:
    """A stochastic block model: classes of equal chance, four of five edges inside a class, the rest anywhere.

    Receivers are uniform; a sender is uniform in the receiver's class, or in the graph. Features are those of
    the class (normal) plus a normal of twice the deviation. The class of every fourth node is known.
    """
    rng = np.random.default_rng(seed)
    classes = np.sort(rng.integers(0, cfg.classes, cfg.nodes))
    firsts = np.searchsorted(classes, np.arange(cfg.classes + 1))
    receivers = rng.integers(0, cfg.nodes, cfg.edges)
    first, after = (firsts[classes[receivers] + i] for i in (0, 1))
    inside = first + (rng.random(cfg.edges) * (after - first)).astype(np.int64)
    senders = np.where(rng.random(cfg.edges) < 0.8, inside, rng.integers(0, cfg.nodes, cfg.edges))
    centres = rng.normal(size=(cfg.classes, cfg.features))
    x = centres[classes] + 2 * rng.normal(size=(cfg.nodes, cfg.features))
    return _graph(cfg, x, classes, senders, receivers, rng)


def _graph(
    cfg: Config, x: np.ndarray, classes: np.ndarray, senders: np.ndarray, receivers: np.ndarray,
    rng: np.random.Generator,
) -> Graph:  # fmt: skip
    edges = {"senders": senders, "receivers": receivers, "classes": classes}
    return {
        "features": np.asarray(x, np.float32),
        "known": rng.random(cfg.nodes) < 0.25,
        **{name: np.asarray(value, np.int32) for name, value in edges.items()},
    }


def batches(cfg: Config) -> Iterator[Graph]:
    """The one graph, again and again."""
    return repeat(digits(cfg) if cfg.real else sampled(cfg))


def workload(
    size: str = "tiny", *, dtype: str | None = None, optimizer: Optimizer = "adamw", **overrides: Any
) -> Workload:
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, graph) -> (state, {"loss"})` with the state donated; every batch is the whole graph.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    cfg = replace(SIZES[size], **({"dtype": dtype} if dtype else {}), **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(init(key, cfg), tx),)

    shape = jax.ShapeDtypeStruct
    graph = {
        "features": shape((cfg.nodes, cfg.features), jnp.float32),
        "known": shape((cfg.nodes,), jnp.bool_),
        "senders": shape((cfg.edges,), jnp.int32),
        "receivers": shape((cfg.edges,), jnp.int32),
        "classes": shape((cfg.nodes,), jnp.int32),
    }
    return Workload(
        step=train_step(partial(loss, cfg=cfg), tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), graph),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: batches(cfg),
        name=f"gnn-{size}",
    )
