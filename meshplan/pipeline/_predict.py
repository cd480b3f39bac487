"""Weights some updates ahead, predicted from Adam's moments (XPipe, arXiv 1911.04610)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshplan.core import ArgumentError, nearest

BiasCorrection = Literal["exact", "literal"]
BIAS_CORRECTIONS: tuple[BiasCorrection, ...] = ("exact", "literal")
_MOMENTS = ("count", "mu", "nu")


def predict(
    opt_state: Any, params: Any, lag: Any, *, learning_rate: float | jax.Array | Callable[[Any], Any],
    bias_correction: BiasCorrection = "exact", b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
) -> Any:
    """`params` as they are expected `lag` updates later, the same pytree: W - lag * lr * v_hat / (sqrt(m_hat) + eps).

    v is Adam's first moment and m its second, found in any `ScaleByAdamState` inside `opt_state`, at any depth; where
    there are several (`optax.partition`), each leaf has the one that holds its moments. `lag`: a number of updates,
    known or traced; 0 gives the params bit by bit. `learning_rate`: as in optax, a schedule is asked at the state's
    count. "exact" divides the moments by 1 - b^count as Adam does, "literal" by 1 - b as the paper prints it, which
    in the long run makes the step sqrt(1 - b2) / (1 - b1) of Adam's: 0.316 with the usual figures. Before the first
    update there is nothing to go by and the params come back. Weight decay and what else follows Adam in the chain
    is not predicted. Raises ArgumentError where no moments are found, or some leaf has none.
    """
    if bias_correction not in BIAS_CORRECTIONS:
        raise ArgumentError(
            f"predict(): bias_correction={bias_correction!r} is none. {nearest(str(bias_correction), BIAS_CORRECTIONS)}"
        )
    if isinstance(lag, int) and lag < 0:
        raise ArgumentError(f"predict(): lag={lag} updates cannot be; give 0 or more.")
    moments = _moments(opt_state)
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    missing = [jax.tree_util.keystr(path) for path, _ in leaves if path not in moments]
    if missing:
        raise ArgumentError(
            f"predict(): params{missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''} "
            "has no Adam moments in the optimizer state; give the params that this state was made for, or predict "
            "only those that Adam updates."
        )
    if isinstance(lag, int) and lag == 0:
        return params

    def ahead(path: Any, weight: jax.Array) -> jax.Array:
        count, first, second = moments[path]
        steps = count if bias_correction == "exact" else jnp.ones_like(count)
        steps = jnp.maximum(steps, 1).astype(jnp.float32)
        first = first.astype(jnp.promote_types(first.dtype, jnp.float32)) / (1 - b1**steps)
        second = second.astype(jnp.promote_types(second.dtype, jnp.float32)) / (1 - b2**steps)
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        found = (weight - lag * rate * first / (jnp.sqrt(second) + eps)).astype(weight.dtype)
        return jnp.where(jnp.logical_or(lag == 0, count == 0), weight, found)

    return jax.tree_util.tree_unflatten(tree, [ahead(path, weight) for path, weight in leaves])


def prediction_error(old: Any, new: Any, predicted: Any) -> jax.Array:
    """||W^ - W|| / ||W_old - W|| over all leaves: the distance left, as a fraction of that without a prediction.

    `old`: the weights that the prediction started from, `new` (W): those that came, `predicted` (W^), three equal
    pytrees. Below 1 the prediction helped. Infinite where nothing moved and the prediction did, nan where neither.
    """
    return _distance(predicted, new) / _distance(old, new)


def _distance(a: Any, b: Any) -> jax.Array:
    squares = jax.tree.map(lambda x, y: jnp.sum(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32))), a, b)
    return jnp.sqrt(sum(jax.tree.leaves(squares), start=jnp.zeros(())))


def _moments(opt_state: Any) -> dict[Any, tuple[jax.Array, jax.Array, jax.Array]]:
    """For each leaf of the params, by its path: (updates so far, first moment, second moment)."""
    seen: list[str] = []
    found: dict[Any, tuple[jax.Array, jax.Array, jax.Array]] = {}
    for state in _states(opt_state, seen):
        first = jax.tree_util.tree_flatten_with_path(state.mu)[0]
        second = jax.tree.leaves(state.nu)
        # A leaf that another transformation updates is a MaskedNode here: no leaf at all.
        for (path, mu), nu in zip(first, second, strict=True):
            found[path] = (state.count, mu, nu)
    if not found:
        names = ", ".join(dict.fromkeys(seen)) or type(opt_state).__name__
        raise ArgumentError(
            f"predict(): the optimizer state holds no ScaleByAdamState, whose moments say where weights are going; "
            f"found {names}. Use optax.adam, adamw or a chain with optax.scale_by_adam."
        )
    return found


def _states(node: Any, seen: list[str]) -> Iterator[Any]:
    """Every ScaleByAdamState below the node, in order; the names of all named tuples met go to `seen`."""
    fields = getattr(node, "_fields", None) if isinstance(node, tuple) else None
    if fields is not None:
        seen.append(type(node).__name__)
        # By name and fields, so that optax need not be there.
        if type(node).__name__ == "ScaleByAdamState" and fields == _MOMENTS:
            yield node
            return
    if isinstance(node, Mapping):
        children = list(node.values())
    elif isinstance(node, tuple | list):
        children = list(node)
    elif hasattr(node, "__dataclass_fields__"):
        children = [getattr(node, field) for field in node.__dataclass_fields__]
    else:
        children = []
    for child in children:
        yield from _states(child, seen)
