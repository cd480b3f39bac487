"""Running one equation on the shards of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshplan.core import _jax
from meshplan.core._spec import Spec

Run = Callable[[Sequence[Any], Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]]], Sequence[Any]]


def bind_on_shards(
    eqn: Any, args: Sequence[Any], run: Run, mesh: Any, ins: Sequence[Spec], outs: Sequence[Spec]
) -> Sequence[Any]:
    """Results of `run(parts, bind)` inside `shard_map` over all of the mesh; `bind(parts, changes)` binds the equation.

    Where a spec leaves an axis out, every shard along it does the same. An unreduced result comes out of the
    shards with a new leading dim, a part in each row, and is summed outside, where XLA chooses the collective.
    """

    def part(*parts: Any) -> tuple[Any, ...]:
        found = run(parts, lambda xs, changes: _jax.bind(eqn, xs, changes))
        return tuple(x[None] if spec.unreduced else x for x, spec in zip(found, outs, strict=True))

    side_by_side = [Spec((s.unreduced, *s.dims)) if s.unreduced else s for s in outs]
    in_specs, out_specs = (tuple(s.partition_spec() for s in side) for side in (ins, side_by_side))
    found = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)
    return [
        jax.lax.reduce(x, x.dtype.type(0), jax.lax.add, (0,)) if spec.unreduced else x
        for x, spec in zip(found, outs, strict=True)
    ]


def bind_over(eqn: Any, args: Sequence[Any], mesh: Any) -> Sequence[Any]:
    """A `shard_map` of the user's, bound again over the devices of `mesh`, whose axes and sizes are its own.

    Its body was traced for its own abstract mesh, which also names the kind of device: that one stays where the mesh
    has no devices (ahead of time).
    """
    own = getattr(eqn.params["mesh"], "abstract_mesh", eqn.params["mesh"])
    same = getattr(mesh, "abstract_mesh", None) == own
    return _jax.bind(eqn, args, {"mesh": mesh if same else own})
