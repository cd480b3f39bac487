"""Steps whose arguments hold more than arrays: functions, strings, an equinox module's settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshplan.hints._walk import walk
from meshplan.hints.adapters import is_setting


def arrays(tree: Any) -> Any:
    """`tree` with None in place of whatever jit cannot take: `eqx.filter(tree, eqx.is_array)` for equinox modules."""
    return split(tree)[0]


def arrays_only(
    step: Callable[..., Any], args: Sequence[Any], static: Sequence[int] = ()
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step as a function of the arrays among its arguments, and those; both as given where all leaves are arrays.

    What is no array is fixed at what it is now; in the results it is None (`eqx.combine` puts it back).
    """
    step, args, _ = parted(step, args, static)
    return step, args


def parted(
    step: Callable[..., Any], args: Sequence[Any], static: Sequence[int] = ()
) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], Any]]:
    """As `arrays_only`, and a function that puts back into a result what is no array, as it was when the step ran
    last."""
    halves = {i: split(a) for i, a in enumerate(args) if i not in static}
    if not any(jax.tree.leaves(rest) for _, rest in halves.values()):
        return step, tuple(args), lambda result: result
    left: list[Any] = []

    @functools.wraps(step)
    def of_arrays(*given: Any, **kwargs: Any) -> Any:
        whole = [_joined(a, halves[i][1]) if i in halves else a for i, a in enumerate(given)]
        first, rest = split(step(*whole, **kwargs))
        left[:] = [rest]
        return first

    kept = tuple(halves[i][0] if i in halves else a for i, a in enumerate(args))
    return of_arrays, kept, lambda result: _joined(result, left[0])


def split(tree: Any) -> tuple[Any, Any]:
    """(arrays, all else), both of the tree's structure with None for the other half."""
    leaves, structure = jax.tree.flatten(tree)
    if all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):  # of most trees; the walk takes time
        return tree, jax.tree.unflatten(structure, [None] * len(leaves))
    views = list(walk(tree))
    kept = [_is_array(view.leaf) and not is_setting(view.leaf, view.owners) for view in views]
    first = [x if keep else None for x, keep in zip(leaves, kept, strict=True)]
    second = [None if keep else x for x, keep in zip(leaves, kept, strict=True)]
    return jax.tree.unflatten(structure, first), jax.tree.unflatten(structure, second)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _joined(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None)
