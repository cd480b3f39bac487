"""Operations whose inside is not read: kernels, calls of other libraries, `shard_map`.

A kernel splits as its author says: `custom_partitioning` carries its rule; rules for `pallas_call`
and `ffi_call` are given by the user, for one kernel ("ffi_call:target", "pallas_call:name") or for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshplan.core import MeshShape
from meshplan.rules._notation import Notation, parse_rule
from meshplan.rules._rule import Dims, Fixed, OpRule, OpView, RuleFn

_ELLIPSIS = "\u2026"  # JAX's own mark for leading dims


def rule_names(view: OpView) -> tuple[str, ...]:
    """Names under which a rule of the user's for this operation is looked up, the most special first."""
    kernel = kernel_name(view.primitive, view.params)
    return (f"{view.primitive}:{kernel}", view.primitive) if kernel else (view.primitive,)


def kernel_name(primitive: str, params: Mapping[str, Any]) -> str:
    """What tells one kernel from another: the target of `ffi_call`, the name of a `pallas_call`; '' for others."""
    if primitive == "ffi_call":
        return str(params.get("target_name") or "")
    if primitive == "pallas_call":
        body = params.get("jaxpr")
        debug = getattr(getattr(body, "jaxpr", body), "debug_info", None)
        return str(params.get("name") or getattr(debug, "func_name", "") or "")
    return ""


def custom_partitioning(view: OpView) -> OpRule | None:
    """The rule that `def_partition(sharding_rule=...)` was given; none where it was given a function or nothing."""
    rule = view.params.get("sharding_rule")
    if isinstance(rule, str):
        return parse_rule(rule)(view)
    return _notation(rule)(view) if hasattr(rule, "operand_mappings") else None


def _notation(rule: Any) -> Notation:
    """JAX's `SdyShardingRule` as ours."""
    operands, results = (
        tuple(tuple(_dim(d) for d in value) for value in side) for side in (rule.operand_mappings, rule.result_mappings)
    )
    return Notation(
        text=str(rule), operands=operands, results=results, reduction=tuple(rule.reduction_factors),
        need_replication=tuple(rule.need_replication_factors), permutation=tuple(rule.permutation_factors),
        sizes=dict(rule.factor_sizes),
    )  # fmt: skip


def _dim(mapping: Any) -> tuple[str, ...]:
    if not isinstance(mapping, str):
        return tuple(mapping)
    if mapping.startswith((_ELLIPSIS, "...")):
        return (f"...{mapping.lstrip(_ELLIPSIS + '.') or 0}",)
    return (mapping,)


def fixed_specs(view: OpView) -> Fixed | None:
    """The specs that a `shard_map` demands, and the axes of its mesh that it takes over; None for other operations.

    Its inside is not read. It runs over its own mesh alone: `mesh_of`.
    """
    if view.primitive != "shard_map":
        return None
    mesh = view.params["mesh"]
    manual = view.params.get("manual_axes") or view.params.get("newly_manual_axes") or frozenset(mesh.axis_names)
    axes = tuple((str(name), int(size)) for name, size in mesh.shape.items() if name in manual)
    sides = []
    for specs, avals in ((view.params["in_specs"], view.operands), (view.params["out_specs"], view.results)):
        sides.append(tuple(_axes_of(spec, len(a.shape)) for spec, a in zip(specs, avals, strict=True)))
    return Fixed(axes, sides[0], sides[1])


def fixed_rule(fixed: Fixed) -> OpRule:
    """A factor per mesh axis: it is in the dims that the axis splits, and to be split by that axis alone."""
    sizes = {name: size for name, size in fixed.axes if size > 1}
    factor = {name: f for f, name in enumerate(sizes)}

    def dims(axes: tuple[tuple[str, ...], ...]) -> Dims:
        return tuple(tuple(factor[a] for a in entry if a in factor) for entry in axes)

    return OpRule(
        sizes=tuple(sizes.values()), operands=tuple(map(dims, fixed.operands)),
        results=tuple(map(dims, fixed.results)), anchor=True, opaque=True,
    )


def mesh_of(view: OpView) -> MeshShape:
    """The mesh that a `shard_map` was written for."""
    return MeshShape.of({str(name): int(size) for name, size in view.params["mesh"].shape.items()})


def _axes_of(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """Axes per dim of a PartitionSpec, filled up to the array's rank."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in tuple(spec)]
    return tuple(entries) + ((),) * (rank - len(entries))


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({"custom_partitioning": custom_partitioning})
