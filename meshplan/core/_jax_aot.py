"""Private names of `jax.export` that handing a program to another process needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


def flat_exported(exported: Any) -> Any:
    """The same program over flat tuples, without derivative and shardings: picklable whatever pytrees it was made with.

    The shardings go another way (`exported_shardings`): a call of the program would constrain its arguments
    and results once more, and XLA would name that call, not the user's line, as the source of their collectives.
    """
    return dataclasses.replace(
        exported, _get_vjp=None,
        _in_named_shardings=(None,) * len(exported.in_avals), _out_named_shardings=(None,) * len(exported.out_avals),
        in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )


def exported_shardings(exported: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shardings over abstract meshes of the flat arguments and results, None where left to the compiler."""
    # jax 0.10 declares the mesh as required but takes None for "as exported", 0.12 declares it optional.
    return tuple(exported.in_shardings_jax(None)), tuple(exported.out_shardings_jax(None))


def argument_names(traced: Any) -> tuple[str, ...]:
    """How jax names the flat arguments of a traced function: `state['w']`, `batch`."""
    jaxpr = traced.jaxpr
    names = getattr(jaxpr, "jaxpr", jaxpr).debug_info.arg_names
    return tuple(str(name) for name in names or ())
