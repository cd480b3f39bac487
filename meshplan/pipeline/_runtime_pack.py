"""Parameters by stage: arrays with a leading dim of stages, so that a device keeps its own stage's weights alone.

Weights of one shape, dtype and spec share a slot: an array [stages, most such weights of a stage, *shape]. The rows
of a stacked parameter have a slot of their own, which is the parameter reshaped where the stages hold equally many
layers. A weight that several stages need (tied embeddings) is shared: every stage keeps it whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshplan.pipeline._stages_parts import Parts, Weight

Entry = tuple[int, int | None]  # a leaf, or a row of one


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """`entries[stage]`: what the stage keeps there; `shape`, `dtype` and `spec` of one."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    entries: tuple[tuple[Entry, ...], ...]

    @property
    def count(self) -> int:
        return max(map(len, self.entries))

    @property
    def reshaped(self) -> int | None:
        """The stacked parameter that the slot is a reshape of, if it is."""
        flat = [entry for entries in self.entries for entry in entries]
        even = len({len(entries) for entries in self.entries}) == 1
        return flat[0][0] if even and [row for _, row in flat] == list(range(len(flat))) else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Parameters, gradients or moments by stage: `slots` [stages, n, *shape] each, `shared` as they are."""

    slots: tuple[Any, ...]
    shared: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Where every parameter lies: in `slots`, or in `shared` (numbers of leaves; `shared_specs` theirs).

    `places[leaf or row]`: (slot, place in it) on the stage that keeps it.
    """

    parts: Parts
    stages: int
    slots: tuple[WeightSlot, ...]
    shared: tuple[int, ...]
    shared_specs: tuple[PartitionSpec, ...]
    places: Mapping[Entry, tuple[int, int]]

    def pack(self, params: Any) -> Packed:
        """A pytree like the parameters, by stage; what no stage has in a slot is zero."""
        leaves = jax.tree.leaves(params)
        return Packed(
            slots=tuple(self._slot(slot, leaves) for slot in self.slots), shared=tuple(leaves[k] for k in self.shared)
        )

    def unpack(self, packed: Packed) -> Any:
        """`pack` the other way round."""
        traced = self.parts.traced
        leaves: list[Any] = [None] * traced.leaves
        rows: dict[int, dict[int, Any]] = {}
        for k, leaf in enumerate(self.shared):
            leaves[leaf] = packed.shared[k]
        for slot, array in zip(self.slots, packed.slots, strict=True):
            if slot.reshaped is not None:
                leaves[slot.reshaped] = array.reshape((-1, *slot.shape))
                continue
            for stage, entries in enumerate(slot.entries):
                for place, (leaf, row) in enumerate(entries):
                    if row is None:
                        leaves[leaf] = array[stage, place]
                    else:
                        rows.setdefault(leaf, {})[row] = array[stage, place]
        for leaf, found in rows.items():
            leaves[leaf] = jnp.stack([found[row] for row in sorted(found)])
        return jax.tree.unflatten(traced.params_tree, leaves)

    def weights(self, at: int, local: Packed) -> list[Any]:
        """What part `at` takes, from its stage's arrays [n, *shape]."""
        return [self._weight(weight, local) for weight in self.parts.parts[at].weights]

    def add(self, at: int, local: Packed, gradients: Sequence[Any]) -> Packed:
        """The stage's sums with the gradients of what part `at` takes."""
        slots, shared = list(local.slots), list(local.shared)
        for weight, gradient in zip(self.parts.parts[at].weights, gradients, strict=True):
            if weight.leaf in self.shared:
                k = self.shared.index(weight.leaf)
                at_rows = shared[k] if weight.rows is None else shared[k][jnp.asarray(weight.rows)]
                summed = at_rows + gradient.astype(at_rows.dtype)
                shared[k] = summed if weight.rows is None else shared[k].at[jnp.asarray(weight.rows)].set(summed)
                continue
            slot, place, many = self._where(weight)
            added = gradient.astype(slots[slot].dtype)
            slots[slot] = slots[slot].at[place if many is None else slice(place, place + many)].add(added)
        return Packed(slots=tuple(slots), shared=tuple(shared))

    def _weight(self, weight: Weight, local: Packed) -> Any:
        if weight.leaf in self.shared:
            whole = local.shared[self.shared.index(weight.leaf)]
            return whole if weight.rows is None else whole[jnp.asarray(weight.rows)]
        slot, place, many = self._where(weight)
        return local.slots[slot][place if many is None else slice(place, place + many)]

    def _where(self, weight: Weight) -> tuple[int, int, int | None]:
        """(slot, first place, how many rows if any)."""
        if weight.rows is None:
            return (*self.places[weight.leaf, None], None)
        return (*self.places[weight.leaf, weight.rows[0]], len(weight.rows))

    def _slot(self, slot: WeightSlot, leaves: Sequence[Any]) -> Any:
        if slot.reshaped is not None:
            return leaves[slot.reshaped].reshape((self.stages, slot.count, *slot.shape))
        first = next(entry for entries in slot.entries for entry in entries)
        empty = jnp.zeros(slot.shape, leaves[first[0]].dtype)
        rows = []
        for entries in slot.entries:
            row = [leaves[leaf] if at is None else leaves[leaf][at] for leaf, at in entries]
            rows.append(jnp.stack(row + [empty] * (slot.count - len(row))))
        return jnp.stack(rows)


def make_packing(parts: Parts, stages: int, specs: Sequence[PartitionSpec]) -> Packing:
    """Where the parameters lie when part q runs on stage q % stages. `specs`: by leaf, over the other axes."""
    avals = parts.traced.avals
    users: dict[int, list[tuple[int, Weight]]] = {leaf: [] for leaf in range(parts.traced.leaves)}
    for at, part in enumerate(parts.parts):
        for weight in part.weights:
            users[weight.leaf].append((at % stages, weight))
    groups: dict[Any, list[list[Entry]]] = {}
    shared = []
    for leaf, uses in users.items():
        aval, spec = avals[leaf], tuple(specs[leaf])
        if _is_shared(aval.shape, uses):
            shared.append(leaf)
        elif uses[0][1].rows is None:
            group = groups.setdefault((aval.shape, aval.dtype, spec, None), [[] for _ in range(stages)])
            group[uses[0][0]].append((leaf, None))
        else:
            group = groups.setdefault((aval.shape[1:], aval.dtype, spec[1:], leaf), [[] for _ in range(stages)])
            for stage, weight in uses:
                group[stage] += [(leaf, row) for row in weight.rows or ()]
    slots = tuple(
        WeightSlot(shape=shape, dtype=dtype, spec=PartitionSpec(*spec), entries=tuple(map(tuple, entries)))
        for (shape, dtype, spec, _), entries in groups.items()
    )
    return Packing(
        parts=parts, stages=stages, slots=slots, shared=tuple(shared),
        shared_specs=tuple(PartitionSpec(*specs[leaf]) for leaf in shared),
        places={
            entry: (k, place) for k, slot in enumerate(slots) for entries in slot.entries
            for place, entry in enumerate(entries)
        },
    )


def _is_shared(shape: Sequence[int], uses: Sequence[tuple[int, Weight]]) -> bool:
    """Whether several stages need it, or some of it is nobody's."""
    if not uses:
        return True
    if any(weight.rows is None for _, weight in uses):
        return len({stage for stage, _ in uses}) > 1 or any(weight.rows is not None for _, weight in uses)
    rows = [row for _, weight in uses for row in weight.rows or ()]
    return sorted(rows) != list(range(shape[0]))
