"""How jax writes shardings into equations: constraints, `reshard`, `out_sharding`, and types with Explicit axes."""

from __future__ import annotations

import contextlib
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh

# A parameter by which the user states where the first result lies. (`broadcast_in_dim` and `reshape` have one
# too, but jax fills it in from the operand's type.)
STATED = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
WORDS = {"sharding_constraint": "with_sharding_constraint", "reshard": "reshard"}
TYPED = ("out_sharding", "dst_sharding", "sharding")


def stated_sharding(eqn: Any) -> tuple[str, NamedSharding] | None:
    """(the user's word for it, sharding) that an equation states for its first result, else None.

    Over Auto axes the user states with `with_sharding_constraint` alone; what else names such a mesh was filled in by
    jax (transposed sums and products, the way out of Explicit mode).
    """
    name = eqn.primitive.name
    found = eqn.params.get(STATED.get(name, "out_sharding"))
    if not isinstance(found, NamedSharding):
        return None
    if name != "sharding_constraint" and any(t is not AxisType.Explicit for t in found.mesh.axis_types):
        return None
    return WORDS.get(name, f"out_sharding of {name}"), found


def only_moves(eqn: Any) -> bool:
    """Whether the equation does nothing but say where its operand shall lie."""
    return eqn.primitive.name in STATED


def without_types(eqn: Any) -> dict[str, Any]:
    """Parameters to exchange so that the equation can be bound without the mesh that its types name."""
    return {k: None for k in TYPED if isinstance(eqn.params.get(k), NamedSharding)}


def without_mesh(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """A context without the mesh in which the equation was traced, unless its axes are Manual (`shard_map`)."""
    mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
    if mesh is None or not mesh.shape or any(t is AxisType.Manual for t in mesh.axis_types):
        return contextlib.nullcontext()
    return use_abstract_mesh(AbstractMesh((), ()))
