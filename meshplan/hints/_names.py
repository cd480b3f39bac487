"""Names of the dims of argument leaves: from classes marked with `params`, then from frameworks' metadata.

Optimizer states keep the classes of the parameters (optax maps over the tree), so their
leaves are named by the same marks. A factored moment (adafactor) has the parameter's shape
less some dims: it takes the names of the dims that are left.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from typing import Any

from meshplan.core import ArgumentError
from meshplan.hints._decorators import params_of
from meshplan.hints._follow import followed_leaves
from meshplan.hints._walk import DimNames, LeafView, walk


def named_leaves(args: Any) -> tuple[DimNames | None, ...]:
    """Per leaf of `jax.tree.flatten(args)`: one name or None per dim, or None where nothing is known.

    A leaf with more dims than names has unnamed leading dims (stacked layers). Dims of size 1
    stay unnamed: nothing can split them. Raises `ArgumentError` for a mark with more names than
    the parameter has dims.
    """
    views = list(walk(args))
    marks = [_class_names(view) or view.box_names for view in views]
    shapes: dict[Hashable, list[tuple[int, ...]]] = {}
    for view, names in zip(views, marks, strict=True):
        if names is not None:
            shapes.setdefault(_parameter(view), []).append(view.shape)
    for view in views:
        _check_rank(view, shapes.get(_parameter(view), []))
    found = [
        None if names is None else _fit(names, view.shape, shapes[_parameter(view)])
        for view, names in zip(views, marks, strict=True)
    ]
    for i, followed in followed_leaves(views).items():
        names = found[followed.parameter]
        if found[i] is None and names is not None:
            pairs = zip(followed.dims, views[i].shape, strict=True)
            taken = tuple(names[d] if d is not None and n > 1 else None for d, n in pairs)
            found[i] = taken if any(taken) else None
    return tuple(found)


def _class_names(view: LeafView) -> DimNames | None:
    """The mark of the innermost enclosing object whose class names this leaf."""
    for depth in range(len(view.owners) - 1, -1, -1):
        marks = params_of(type(view.owners[depth]))
        if not marks:
            continue
        keys = list(view.keys[depth:])
        while keys and keys[-1].isdigit() and "/".join(keys) not in marks:
            keys.pop()
        if "/".join(keys) in marks:
            return marks["/".join(keys)]
    return None


def _parameter(view: LeafView) -> Hashable:
    """The same for a parameter and for the optimizer's moments of it: place inside the outermost module.

    That is the first object that is no plain container (an optimizer's named tuple is one).
    """
    for depth, owner in enumerate(view.owners):
        if not isinstance(owner, (dict, list, tuple)):
            return (type(owner), view.keys[depth:])
    return (None, view.keys)


def _check_rank(view: LeafView, family: list[tuple[int, ...]]) -> None:
    names = _class_names(view) if family else None
    if names is not None and max(len(shape) for shape in family) < len(names):
        raise ArgumentError(
            f"{'/'.join(view.keys)} has {len(view.shape)} dims, shape {view.shape}, but params(...) on a class above "
            f"it names {len(names)}: {' '.join(name or '_' for name in names)!r}. Write one name per dim."
        )


def _fit(names: DimNames, shape: tuple[int, ...], family: list[tuple[int, ...]]) -> DimNames | None:
    """Names for a leaf whose parameter's family (the parameter and its moments) has these shapes."""
    rank = max(len(other) for other in family)
    missing = len(shape) - len(names)
    if len(shape) == rank and missing >= 0:
        fitted = (None,) * missing + names
    else:
        full = next(other for other in family if len(other) == rank)
        padded = (None,) * (rank - len(names)) + names
        kept = [c for c in combinations(range(rank), len(shape)) if tuple(full[i] for i in c) == shape]
        options = {tuple(padded[i] for i in c) for c in kept} if rank >= len(names) else set()
        if len(options) != 1:
            return None
        fitted = options.pop()
    fitted = tuple(name if size != 1 else None for name, size in zip(fitted, shape, strict=True))
    return fitted if any(fitted) else None
