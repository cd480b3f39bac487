"""Private names of `jax.export` that handing a program to another process needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


def flat_exported(exported: Any) -> Any:
    """The same program over flat tuples, without its derivative: picklable whatever pytrees it was made with."""
    return dataclasses.replace(
        exported, _get_vjp=None,
        in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )


def exported_shardings(exported: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shardings over abstract meshes of the flat arguments and results, None where left to the compiler."""
    # jax 0.10 declares the mesh as required but takes None for "as exported", 0.12 declares it optional.
    return tuple(exported.in_shardings_jax(None)), tuple(exported.out_shardings_jax(None))
