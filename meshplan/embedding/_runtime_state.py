"""Tables and sums as arrays over a mesh ("replica", "shard")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import register_dataclass

from meshplan.core import MeshError
from meshplan.embedding._optim import RowOptimizer, Sums
from meshplan.embedding._route import GROUP, REPLICA
from meshplan.embedding._route_layout import Layout
from meshplan.embedding._runtime_split import Origin
from meshplan.embedding._runtime_update import piece_table
from meshplan.embedding._table import Groups

BY_DEVICE = P(REPLICA, GROUP)
BY_BATCH = P((REPLICA, GROUP))


@register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingState:
    """Packed tables [M, N, rows, width], one array for each width and dtype, every device holding one [rows, width].

    `sums`: the optimizer's, f32 [M, N, rows] or [M, N, rows, width], beside each pack. `late`: corrections that the
    next step adds to the sums (empty unless they are synced late). `noise`: running means of squared gradients
    f32 [2, tables], for an estimated moment scale. `count`: steps done.
    """

    packs: tuple[jax.Array, ...]
    sums: tuple[Sums, ...]
    late: tuple[Sums, ...]
    noise: jax.Array
    count: jax.Array


def embedding_mesh(groups: Groups, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh ("replica", "shard") with Auto axes over the devices (default: all of jax's).

    `near` groups have the replicas of a shard on neighbouring devices, others the shards of a group. Raises MeshError
    where the number of devices is not that of the groups.
    """
    found = list(jax.devices() if devices is None else devices)
    m, n = groups.replicas, groups.shards
    if len(found) != m * n:
        raise MeshError(f"groups of {m} replicas x {n} shards need {m * n} devices, {len(found)} were given.")
    array = np.empty(len(found), dtype=object)
    array[:] = found
    grid = array.reshape(n, m).T if groups.near else array.reshape(m, n)
    return Mesh(grid, (REPLICA, GROUP), axis_types=(AxisType.Auto,) * 2)


def check_mesh(mesh: Mesh, groups: Groups) -> None:
    """Raises MeshError where the mesh's axes are not those of the groups."""
    wanted = {REPLICA: groups.replicas, GROUP: groups.shards}
    if dict(mesh.shape) != wanted:
        raise MeshError(f"the mesh has axes {dict(mesh.shape)}, the groups need {wanted}; `embedding_mesh` makes it.")


def sum_shapes(layout: Layout, optimizer: RowOptimizer, pack: int) -> dict[str, tuple[int, ...]]:
    """Local shapes of the optimizer's sums beside a pack."""
    p = layout.packs[pack]
    return {**dict.fromkeys(optimizer.per_row, (p.rows,)), **dict.fromkeys(optimizer.per_entry, (p.rows, p.width))}


def new_state(
    key: jax.Array, layout: Layout, optimizer: RowOptimizer, mesh: Mesh, late: bool, origins: Sequence[Origin],
    widths: Sequence[float],
) -> EmbeddingState:  # fmt: skip
    """Entries uniform within +-widths[table] of each kept table, the same for any placement and split."""
    numbers = range(len(layout.packs))

    def local(key: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[Sums, ...]]:
        packs = tuple(_uniform(key, layout, n, origins, widths)[None, None] for n in numbers)
        sums = tuple(
            {k: jnp.full((1, 1, *s), optimizer.initial_sum) for k, s in sum_shapes(layout, optimizer, n).items()}
            for n in numbers
        )
        return packs, sums

    made = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=BY_DEVICE, check_vma=False)
    packs, sums = jax.jit(made)(key)
    return EmbeddingState(
        packs=packs, sums=sums, late=jax.tree.map(jnp.zeros_like, sums) if late else (),
        **small_state(len(layout.tables), mesh),
    )  # fmt: skip


def small_state(tables: int, mesh: Mesh, noise: np.ndarray | None = None, count: int = 0) -> dict[str, jax.Array]:
    """The arrays that every device keeps whole."""
    whole = NamedSharding(mesh, P())
    held = np.zeros((2, tables), np.float32) if noise is None else noise
    return {"noise": jax.device_put(held, whole), "count": jax.device_put(np.int32(count), whole)}


def _uniform(
    key: jax.Array, layout: Layout, pack: int, origins: Sequence[Origin], widths: Sequence[float]
) -> jax.Array:
    p, here = layout.packs[pack], jax.lax.axis_index(GROUP)
    held = {k: jnp.asarray(v)[here] for k, v in piece_table(layout, pack).items()}
    rows = jnp.arange(p.rows, dtype=jnp.int32)
    piece = jnp.searchsorted(held["start"], rows, side="right") - 1
    table = held["table"][piece]
    row = rows - held["start"][piece] + held["row"][piece] + jnp.asarray([o.first for o in origins], jnp.int32)[table]
    columns = held["column"][piece][:, None] + jnp.arange(p.width, dtype=jnp.int32)
    half = jnp.asarray(widths, jnp.float32)[table]
    table = jnp.asarray([o.table for o in origins], jnp.int32)[table]

    def entry(table: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, table), row), column)
        return jax.random.uniform(own, (), jnp.float32, -1, 1)

    drawn = jax.vmap(jax.vmap(entry, (None, None, 0)))(table, row, columns) * half[:, None]
    used = rows < jnp.asarray(p.used, jnp.int32)[here]
    return jnp.where(used[:, None], drawn, 0).astype(p.dtype)
