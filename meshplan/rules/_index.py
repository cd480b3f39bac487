"""Reading and writing at computed positions.

JAX keeps the index vector in the last dim of the indices. Three kinds of dims matter:
batching dims (shared by operand and indices), window dims (a full slice passes through) and
indexed dims (one row per index). An indexed dim may be split although its rows are chosen at
run time: every shard shifts the indices by its offset, reads or writes what falls into its
part, and leaves out the rest (XLA does the same). For a gather the parts then sum to the
whole (by `or` for booleans); a scatter keeps its part of the result.

All modes permit it: JAX clamps the indices (CLIP) or masks the result with the operand's full
size (FILL_OR_DROP) around the gather, and PROMISE_IN_BOUNDS needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from meshplan.rules._elementwise import is_inexact
from meshplan.rules._rule import Combine, FactorBuilder, OpRule, OpView, RuleFn
from meshplan.rules._shape import scalars

Entry = tuple[int, ...]
_COMPUTED = "a slice at a computed position of a split dim would need rows of other shards"
_UNBOUNDED = (
    "XLA gives wrong numbers for a row written into a split dim at a start out of range, and the start of dim {d} "
    "is not known to lie within 0 and {last}; clamp it: jnp.clip(start, 0, {last})"
)
_ORDERED = "updates that overwrite each other cannot be combined from shards"


def _gather_is_linear(view: OpView) -> bool:
    """Not where a fill value other than 0 or NaN would be counted once per shard."""
    if "FILL" not in str(view.params.get("mode")):
        return True
    value = view.params.get("fill_value")
    if value is None:
        return is_inexact(view.operands[0].dtype)
    return bool(value == 0 or value != value)


def gather(view: OpView) -> OpRule:
    """Embedding lookup, `take`, `take_along_axis`, indexing: see the module's docstring."""
    operand, indices = view.operands[0].shape, view.operands[1].shape
    numbers = view.params["dimension_numbers"]
    sizes = view.params["slice_sizes"]
    builder = FactorBuilder()
    index_entries = [*builder.dims(indices[:-1]), ()]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    hidden = {*numbers.collapsed_slice_dims, *batching}
    entries: list[Entry] = [()] * len(operand)
    windows: list[Entry] = []
    combine: dict[int, Combine] = {}
    reason = ""
    for d, size in enumerate(operand):
        passes = False
        if d in batching:
            entries[d] = index_entries[batching[d]]
        elif sizes[d] == size:
            entries[d] = builder.new(size)
            passes = d not in hidden
        elif sizes[d] == 1 and d in numbers.start_index_map:
            entries[d] = builder.new(size)
            combine |= dict.fromkeys(entries[d], "or" if view.operands[0].dtype == "bool" else "sum")
        else:
            reason = _COMPUTED
        if d not in hidden:
            windows.append(entries[d] if passes else ())
    rest = iter(index_entries[:-1])
    shape = view.results[0].shape
    offsets = dict(zip(numbers.offset_dims, windows, strict=True))
    result = [offsets[d] if d in offsets else next(rest) for d in range(len(shape))]
    return builder.rule(
        [entries, index_entries], [result], combine=combine, anchor=True, whole=reason,
        linear=(0,) if _gather_is_linear(view) else (),
    )  # fmt: skip


@dataclass(slots=True)
class _Scatter:
    """Entries of a scatter while they are found."""

    operand: list[Entry]
    windows: dict[int, Entry] = field(default_factory=dict)
    reason: str = ""


def _scatter_operand(view: OpView, numbers: Any, batch: list[Entry], builder: FactorBuilder) -> _Scatter:
    operand, updates = view.operands[0].shape, view.operands[2].shape
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    windows = iter(numbers.update_window_dims)
    indexed = set(numbers.scatter_dims_to_operand_dims)
    got = _Scatter([()] * len(operand))
    for d, size in enumerate(operand):
        if d in batching:
            got.operand[d] = batch[batching[d]]
            continue
        window = None if d in numbers.inserted_window_dims else next(windows)
        height = 1 if window is None else updates[window]
        if window is not None and height == size:
            got.operand[d] = got.windows[window] = builder.new(size)
        elif height == 1 and d in indexed:
            got.operand[d] = builder.new(size)
        elif size > 1:
            got.reason = _COMPUTED
    return got


def scatter(combine: Combine | None, linear: tuple[int, ...] = ()) -> RuleFn:
    """The rule of a scatter; `combine`: how updates of one position combine, None where they overwrite.

    With a combination, the scattered dims of indices and updates are reduced factors: each
    shard scatters its updates, and the parts combine. The operand must then count once: it is
    unreduced too, or the neutral element on all shards but one (XLA arranges that).
    """

    def rule(view: OpView) -> OpRule:
        numbers = view.params["dimension_numbers"]
        indices, updates = view.operands[1].shape, view.operands[2].shape
        batching = set(numbers.scatter_indices_batching_dims)
        builder = FactorBuilder()
        kept = {d for d in range(len(indices) - 1) if d not in batching} if combine is None else set()
        batch = builder.dims(indices[:-1], whole=kept)
        got = _scatter_operand(view, numbers, batch, builder)
        rest = iter(batch)
        moved = [
            got.windows.get(d, ()) if d in numbers.update_window_dims else next(rest) for d in range(len(updates))
        ]
        reduced: dict[int, Combine] = {}
        if combine is not None:
            reduced = {f: combine for d, entry in enumerate(batch) if d not in batching for f in entry}
        late = any(indices[d] > 1 for d in kept)
        return builder.rule(
            [got.operand, [*batch, ()], moved], [got.operand], combine=reduced, anchor=True, linear=linear,
            flops=view.operands[2].size if combine else 0.0, whole=_ORDERED if late else got.reason,
        )  # fmt: skip

    return rule


def dynamic_slice(view: OpView) -> OpRule:
    """Dims that are taken in full pass through; sliced dims stay whole."""
    operand, result = view.operands[0].shape, view.results[0].shape
    builder = FactorBuilder()
    cut = {d for d, (n, m) in enumerate(zip(operand, result, strict=True)) if n != m}
    factors = builder.dims(operand, whole=cut)
    return builder.rule(
        [factors, *scalars(view, 1)], [factors], linear=(0,), whole=_COMPUTED if cut else ""
    )


def _start_is_inside(view: OpView, d: int) -> bool:
    """Whether the start of dim d of an update is known to leave room for the whole update."""
    bounds = view.bounds_of(2 + d)
    room = view.operands[0].shape[d] - view.operands[1].shape[d]
    return bounds is not None and 0 <= bounds[0] and bounds[1] <= room


def dynamic_update_slice(view: OpView) -> OpRule:
    """Dims that are replaced in full pass through. One row written into a split dim: the shard that has it writes.

    That holds only where the start is known to be in range: `dynamic_update_slice` moves any other
    start, and XLA's shards, each testing whether the row is its own, do not. Linear in operand and update together.
    """
    operand, update = view.operands[0].shape, view.operands[1].shape
    builder = FactorBuilder()
    kept: list[Entry] = [()] * len(operand)
    moved: list[Entry] = [()] * len(operand)
    reasons: list[str] = []
    refused: list[str] = []
    for d, (n, m) in enumerate(zip(operand, update, strict=True)):
        if n == m:
            kept[d] = moved[d] = builder.new(n)
        elif m == 1 and _start_is_inside(view, d):
            kept[d] = builder.new(n)
        elif m == 1:
            refused.append(_UNBOUNDED.format(d=d, last=n - 1))
        else:
            reasons.append(f"the {m} rows written into dim {d} may lie in two shards")
    return builder.rule([kept, moved, *scalars(view, 2)], [kept], linear=(0, 1), whole="; ".join(refused + reasons),
                        refused="; ".join(refused))  # fmt: skip


_SCATTERS: dict[str, RuleFn] = {
    "scatter": scatter(None),
    "scatter-add": scatter("sum", (0, 2)),
    "scatter-sub": scatter("sum", (0, 2)),
    "scatter-mul": scatter("mul"),
    "scatter-min": scatter("min"),
    "scatter-max": scatter("max"),
}

RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    "gather": gather,
    **_SCATTERS,
    **{name.replace("-", "_"): fn for name, fn in _SCATTERS.items()},
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
})  # fmt: skip
