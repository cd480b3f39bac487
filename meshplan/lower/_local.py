"""Operations that XLA gathers although every shard could do its own part: run on the shards.

The partitioner knows no way to split some operations along dims that do not matter to them (the batch of
a Fourier transform, the rows of a top_k), and gathers the operand. Where the rule says that
every shard's part is the operation itself on the operands' parts, it is bound inside `shard_map` instead, and nothing
moves. Parts that still have to be added come out side by side, so that XLA adds them as it adds those of a dot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.core import Axes, MeshShape, Spec
from meshplan.cost import runs_on_shards
from meshplan.lower._local_forms import FORMS, Bind, itself, the_users
from meshplan.program import Op
from meshplan.rules import Dims, OpRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Specs of an operation's operands and results on the shards; `results` are unreduced where parts are to be added.

    `run(parts, bind)`: what a shard makes of its parts; `bind(parts, changes)` binds the operation there.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    run: Callable[[Sequence[Any], Bind], Sequence[Any]]


def needs_shards(op: Op) -> bool:
    """Whether XLA would gather what the operation reads: some primitives, and kernels that the user gave a rule for."""
    return runs_on_shards(op.view) or op.rule.on_shards is not None or (op.primitive == "ffi_call" and op.ruled)


def local_form(
    op: Op, operands: Sequence[Spec | None], results: Sequence[Spec | None], mesh: MeshShape
) -> Local | None:
    """How `op` runs on shards when it reads and leaves arrays in these specs (None: not known).

    None where XLA does as well by itself, where nothing is split, or a split is not one of the rule's factors.
    """
    if not needs_shards(op):
        return None
    axes = _factor_axes(op.rule, operands, results, mesh)
    if axes is None or not any(axes.values()):
        return None
    partial = tuple(f for f in op.rule.reduced_factors() if axes.get(f))
    if any(op.rule.combine.get(f, "sum") != "sum" for f in partial):
        return None
    unreduced = tuple(a for f in partial for a in axes[f])
    form = the_users if op.rule.on_shards else FORMS.get(op.primitive, itself)
    return Local(
        operands=tuple(_spec(dims, axes) for dims in op.rule.operands),
        results=tuple(_spec(dims, axes, unreduced) for dims in op.rule.results),
        run=functools.partial(form, op, {f: a for f, a in axes.items() if a}, mesh),
    )


def _factor_axes(
    rule: OpRule, operands: Sequence[Spec | None], results: Sequence[Spec | None], mesh: MeshShape
) -> dict[int, Axes] | None:
    """The axes that split each factor; None where the specs contradict each other or split what has no factor."""
    exchanged = [p for halo in rule.halos for p in halo.operands], [p for halo in rule.halos for p in halo.results]
    found: dict[int, Axes] = {}
    for side, values, specs in ((0, rule.operands, operands), (1, rule.results, results)):
        for i, (dims, spec) in enumerate(zip(values, specs, strict=True)):
            if spec is None:
                continue
            if any(axes and (i, d) in exchanged[side] for d, axes in enumerate(spec.dims)):
                return None
            for f, axes in axes_of_factors(dims, spec, rule.sizes, mesh):
                if f < 0 or found.setdefault(f, axes) != axes:
                    return None
    return found


def axes_of_factors(dims: Dims, spec: Spec, sizes: Sequence[int], mesh: MeshShape) -> Iterator[tuple[int, Axes]]:
    """(factor, the axes that split it) for an array's dims, major factors first; (-1, axes) for what none takes."""
    for entry, axes in zip(dims, spec.dims, strict=True):
        left = list(axes)
        for f in entry:
            taken: list[str] = []
            while left and sizes[f] % mesh.size([*taken, left[0]]) == 0:
                taken.append(left.pop(0))
            yield f, tuple(taken)
        if left:
            yield -1, tuple(left)


def _spec(dims: Dims, axes: Mapping[int, Axes], unreduced: Axes = ()) -> Spec:
    return Spec(tuple(tuple(a for f in entry for a in axes.get(f, ())) for entry in dims), unreduced)
