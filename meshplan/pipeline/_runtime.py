"""The gradient of a loss over a pipeline of stages: one program for all devices, a scan over ticks.

The stages and the axes that split the batch are manual axes of one `shard_map`; all other axes stay the compiler's.
Each tick a stage switches to its slot's work, then an activation goes one stage on and a gradient one stage back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshplan.pipeline._runtime_pack import Packed, Packing
from meshplan.pipeline._runtime_packets import Packets
from meshplan.pipeline._runtime_ticks import COLUMNS, IDLE, KINDS, Ticks
from meshplan.pipeline._stages_parts import Parts

STAGE = "stage"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A loss cut into parts and laid out over ticks on a mesh. `data`: the axes that split the batch; `batch_dims`:
    for each leaf of the batch whether its first dim is split."""

    mesh: Mesh
    data: tuple[str, ...]
    parts: Parts
    packing: Packing
    ticks: Ticks
    activations: Packets
    gradients: Packets
    batch_dims: tuple[bool, ...]

    @property
    def replicas(self) -> int:
        """Devices that share a stage's batch."""
        return int(np.prod([self.mesh.shape[axis] for axis in self.data], dtype=int))

    @property
    def micro_batches(self) -> int:
        return self.ticks.schedule.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    """What a tick's work reads and writes on one device. `weights` and `sums` without the dim of stages."""

    weights: Packed
    sums: Packed
    results: tuple[Any, ...]
    activations: tuple[Any, ...]
    gradients: tuple[Any, ...]
    batch: tuple[Any, ...]


def gradient(program: Program, packed: Packed, batch: Sequence[Any]) -> tuple[list[Any], Packed]:
    """(the loss's results, the gradient by stage) of the whole batch; inside jit."""
    split = tuple(PartitionSpec(program.data) if is_split else PartitionSpec() for is_split in program.batch_dims)
    whole, by_stage = PartitionSpec(), PartitionSpec(STAGE)
    packing = Packed(slots=by_stage, shared=whole)  # type: ignore[arg-type]
    run = jax.shard_map(
        lambda stage, given, leaves: _local(program, stage[0], given, leaves), mesh=program.mesh,
        in_specs=(by_stage, packing, split), out_specs=(whole, packing), check_vma=False,
        axis_names={STAGE, *program.data},
    )
    stages = jnp.arange(program.packing.stages, dtype=jnp.int32)
    return run(stages, constrained(program, packed), tuple(batch))


def constrained(program: Program, packed: Packed) -> Packed:
    """The weights where they belong."""
    from jax.sharding import NamedSharding

    def lies(array: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(array, NamedSharding(program.mesh, PartitionSpec(*spec)))

    packing = program.packing
    return Packed(
        slots=tuple(lies(a, STAGE, None, *s.spec) for a, s in zip(packed.slots, packing.slots, strict=True)),
        shared=tuple(lies(a, *spec) for a, spec in zip(packed.shared, packing.shared_specs, strict=True)),
    )


def _local(program: Program, stage: Any, packed: Packed, batch: Sequence[Any]) -> tuple[list[Any], Packed]:
    """One device's share."""
    ticks, stages = program.ticks, program.packing.stages
    weights = Packed(slots=tuple(a[0] for a in packed.slots), shared=packed.shared)
    micros = tuple(
        _micro_batches(leaf, program.micro_batches) if split else leaf
        for leaf, split in zip(batch, program.batch_dims, strict=True)
    )
    codes = np.unique(ticks.table[:, :, 0])
    table = ticks.table.copy()
    table[:, :, 0] = np.searchsorted(codes, table[:, :, 0])
    branches = [_work(program, int(code)) for code in codes]
    onward = [(k, (k + 1) % stages) for k in range(stages)]
    back = [(b, a) for a, b in onward]

    def tick(state: Any, row: Any) -> tuple[Any, None]:
        sums, results, kept, kept_gradients = state
        mine = row[stage]
        slotted = (weights, sums, results, kept, kept_gradients, micros)
        sums, results, packet, packet_back = lax.switch(mine[0], branches, mine, slotted)
        arrived = [lax.ppermute(x, STAGE, onward) for x in packet]
        arrived_back = [lax.ppermute(x, STAGE, back) for x in packet_back]
        kept = _keep(kept, arrived, mine[COLUMNS.index("keep_activation")])
        kept_gradients = _keep(kept_gradients, arrived_back, mine[COLUMNS.index("keep_gradient")])
        return (sums, results, kept, kept_gradients), None

    # One place more than is needed, where what nobody waits for goes.
    start = (
        jax.tree.map(_zeros, weights), _no_results(program.parts), program.activations.empty(ticks.activations + 1),
        program.gradients.empty(ticks.gradients + 1),
    )
    (sums, results, _, _), _ = lax.scan(tick, start, jnp.asarray(table))
    everyone = (STAGE, *program.data)
    wanted = _results(program.parts)
    results = [lax.psum(x, everyone).astype(aval.dtype) for x, aval in zip(results, wanted, strict=True)]
    slots = tuple(_summed(x, program.data, w.dtype)[None] for x, w in zip(sums.slots, weights.slots, strict=True))
    shared = tuple(_summed(x, everyone, w.dtype) for x, w in zip(sums.shared, weights.shared, strict=True))
    return results, Packed(slots=slots, shared=shared)


def _work(program: Program, code: int) -> Callable[[Any, Any], Any]:
    """What a device does in a slot: (sums, results, packet for the next stage, packet for the one before)."""
    nothing, no_gradient = program.activations.empty, program.gradients.empty
    at, kind = divmod(code - 1, len(KINDS))

    def idle(mine: Any, slotted: Any) -> Any:
        _, sums, results, *_ = slotted
        return sums, results, nothing(), no_gradient()

    def forward(mine: Any, slotted: Any) -> Any:
        weights, sums, results, kept, _, micros = slotted
        outs = program.parts.run(
            at, program.packing.weights(at, weights), _micro_batch(program, micros, mine[1]),
            _crossing(program, at, kept, mine[2]),
        )
        values = dict(zip(program.parts.parts[at].outs, outs, strict=True))
        return sums, results, program.activations.fill(at, values), no_gradient()

    def backward(mine: Any, slotted: Any) -> Any:
        weights, sums, results, kept, kept_gradients, micros = slotted
        found, of_weights, of_ins = _pulled_back(
            program, at, program.packing.weights(at, weights), _micro_batch(program, micros, mine[1]),
            _crossing(program, at, kept, mine[2]), lambda: program.gradients.take(at, kept_gradients, mine[3]),
            wanted=KINDS[kind], splits=program.ticks.schedule.splits_backward,
        )
        if of_weights is not None:
            sums = program.packing.add(at, sums, of_weights)
            results = tuple(r + f for r, f in zip(results, found, strict=True)) if found else results
        packet = program.gradients.fill(at - 1, of_ins) if at and of_ins is not None else no_gradient()
        return sums, results, nothing(), packet

    return idle if code == IDLE else forward if KINDS[kind] == "forward" else backward


def _pulled_back(
    program: Program, at: int, weights: list[Any], batch: list[Any], ins: list[Any],
    arrived: Callable[[], dict[int, Any]], wanted: str, splits: bool,
) -> tuple[list[Any], list[Any] | None, dict[int, Any] | None]:
    """(the last part's results as they are summed, gradients of the weights, of what crossed in by value).

    The part is computed anew from what crossed into it. Where backwards are `splits`, each of the two parts computes
    what is wanted of it alone.
    """
    parts = program.parts
    part, last = parts.parts[at], at == len(parts.parts) - 1
    moves = [k for k, v in enumerate(part.ins) if jnp.issubdtype(parts.traced.avals[v].dtype, jnp.inexact)]
    share = 1.0 / (program.micro_batches * program.replicas)

    def outs(some: list[Any], moving: list[Any]) -> tuple[list[Any], list[Any]]:
        given = list(ins)
        for k, array in zip(moves, moving, strict=True):
            given[k] = array
        found = parts.run(at, some, batch, given)
        if last:
            return [found[0]], found
        return [x for x, v in zip(found, part.outs, strict=True) if v in program.gradients.places[at]], []

    moving = [ins[k] for k in moves]
    if splits and wanted == "backward":
        out, pull, found = jax.vjp(lambda m: outs(weights, m), moving, has_aux=True)
    elif splits:
        out, pull, found = jax.vjp(lambda w: outs(w, moving), weights, has_aux=True)
    else:
        out, pull, found = jax.vjp(outs, weights, moving, has_aux=True)
    if last:
        given = [jnp.full((), share, out[0].dtype)]
    else:
        gradients = arrived()
        given = [gradients[v] for v in part.outs if v in gradients]
    pulled = pull(given)
    of_weights = pulled[0] if not splits or wanted == "weight" else None
    of_moving = pulled[-1] if not splits or wanted == "backward" else None
    of_ins = None if of_moving is None else {part.ins[k]: g for k, g in zip(moves, of_moving, strict=True)}
    return [_shared_out(x, share) for x in found], of_weights, of_ins


def _shared_out(x: Any, share: float) -> Any:
    """A micro-batch's part of a result: of the mean where it is real, else of the sum."""
    return x.astype(jnp.float32) * share if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _crossing(program: Program, at: int, kept: Sequence[Any], place: Any) -> list[Any]:
    if not at:
        return []
    found = program.activations.take(at - 1, kept, place)
    return [found[v] for v in program.parts.parts[at].ins]


def _micro_batch(program: Program, micros: Sequence[Any], at: Any) -> list[Any]:
    return [leaf[at] if split else leaf for leaf, split in zip(micros, program.batch_dims, strict=True)]


def _micro_batches(leaf: Any, many: int) -> Any:
    return leaf.reshape((many, leaf.shape[0] // many, *leaf.shape[1:]))


def _keep(buffers: Sequence[Any], packet: Sequence[Any], place: Any) -> tuple[Any, ...]:
    """What arrived, in its place; -1 is the last place."""
    return tuple(
        lax.dynamic_update_index_in_dim(b, x, jnp.where(place < 0, b.shape[0] - 1, place), 0)
        for b, x in zip(buffers, packet, strict=True)
    )


def _results(parts: Parts) -> list[Any]:
    return [parts.traced.avals[a] if isinstance(a, int) else jax.typeof(a) for a in parts.traced.results]


def _no_results(parts: Parts) -> tuple[Any, ...]:
    return tuple(
        jnp.zeros(a.shape, jnp.float32 if jnp.issubdtype(a.dtype, jnp.inexact) else a.dtype) for a in _results(parts)
    )


def _zeros(weight: Any) -> Any:
    """Where gradients are summed: no narrower than f32."""
    return jnp.zeros(weight.shape, jnp.promote_types(weight.dtype, jnp.float32))


def _summed(x: Any, axes: Sequence[str], dtype: Any) -> Any:
    return (lax.psum(x, tuple(axes)) if axes else x).astype(dtype)
