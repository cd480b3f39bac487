"""`mp.plan(..., tables=...)`: a step whose embedding tables are placed by their own planner, the rest by the search."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec

from meshplan._api._plan import Plan
from meshplan._api._planning import answer, find_machine
from meshplan._options import Options
from meshplan.core import ArgumentError, MemoryLimitError, MeshError, MeshShape, format_bytes, format_seconds
from meshplan.embedding import Collection, Considered, EmbeddingPlan, Groups, StepTables, Table
from meshplan.embedding import plan as plan_embedding
from meshplan.embedding._step_cut import StepCut, cut_step
from meshplan.machine import Machine
from meshplan.plan import Explanation, Found, Given, Search, fixed_mesh, gather_pins, names_decide, over, prepare
from meshplan.program import Call, trace

REPLICA, SHARD = "replica", "shard"
GivenTables = StepTables | Mapping[str, Table] | str


@dataclass(frozen=True, kw_only=True)
class PlannedTables:
    """The tables' half of a plan: `plan`, where every table lies, and the step that was cut, to plan it again."""

    plan: EmbeddingPlan
    cut: StepCut = field(repr=False)
    call: Call = field(repr=False)
    given: StepTables = field(repr=False)

    @property
    def told(self) -> str:
        """A note for the dense part's plan."""
        p = self.plan
        return (
            f"this is the dense part of a step with {len(self.cut.lookups)} embedding tables, which are planned beside "
            f"it: {p.groups.replicas} replicas of {p.groups.shards} shards, {format_seconds(p.step_seconds)} and "
            f"{format_bytes(p.peak_bytes)} a device in all."
        )

    def line(self, subject: str) -> Explanation | None:
        """What is said of a table, by its name or the path of its argument; None for anything else."""
        named = {x.table.name: x for x in self.cut.lookups}
        by_path = {x.path: x for x in self.cut.lookups}
        found = named.get(subject) or by_path.get(subject)
        if found is None:
            return None
        split = {s.table: s for s in self.plan.splits}.get(found.table.name)
        kept = [split.hot, split.cold] if split else [found.table.name]
        table = found.table
        lines = [
            f"{table.name}  {table.dtype}[{table.rows}, {table.dim}]  {format_bytes(table.nbytes)}",
            f"argument {found.path}, looked up at {found.source}: {table.bag} ids a bag, "
            f"{'sums of bags' if found.pooled else 'rows'} go on",
        ]
        for x in (x for x in self.plan.lines if x.table in kept):
            head = f"{x.table}: " if split else ""
            lines.append(
                f"{head}{x.scheme} on {x.devices} of {self.plan.groups.shards} devices of a group, "
                f"{format_bytes(x.nbytes)} and {format_seconds(x.seconds)} on the fullest: {x.why}"
            )
        if self.plan.groups.replicas > 1:
            lines.append(f"{self.plan.groups.replicas} replicas, averaged every {self.plan.groups.sync_every} steps")
        return Explanation(subject=subject, text="\n".join(lines))


def plan_with_tables(
    call: Call, tables: GivenTables, machine: Machine | str | None, mesh: Mapping[str, int] | None, pins: Given,
    memory_limit: float | None, options: Options,
) -> Plan:  # fmt: skip
    """The plan of a step with tables: replicas and shards of the groups are the axes of the one mesh.

    For every mesh ("shard", "replica") of the machine the dense part is planned, its batch split as the lookups leave
    it, and the tables are placed in what it leaves of the memory; the mesh with the least seconds in all is taken.
    Raises as `meshplan.plan` and `meshplan.embedding.plan`.
    """
    began = time.perf_counter()
    given, where = as_step_tables(tables), find_machine(machine)
    program = trace(call, rules=options.rules, follow=options.follow_shardings)
    cut = cut_step(call, program, given.leaves)
    if cut.samples % where.devices:
        raise ArgumentError(
            f"tables: the step looks up {cut.samples} bags, which do not divide over the {where.devices} devices of "
            f"'{where.name}'; give a batch that is a multiple of them."
        )
    groups = _groups(given, where, mesh)
    together = over(pins, batch_pins(cut, groups[0].near))
    dense = trace(cut.call, rules=options.rules, follow=options.follow_shardings, cut_names=names_decide(pins))
    search = prepare(dense, where, gather_pins(together, dense), memory_limit, options)
    made = _Choice(given=given, cut=cut, search=search)
    for each in groups:
        made.look(each)
    found, embedding = made.best()
    plan = answer(search, cut.call, found, [f for f, _ in made.tried], together, options, time.perf_counter() - began)
    held = PlannedTables(plan=embedding, cut=cut, call=call, given=given)
    data = replace(plan.data, notes=(*plan.data.notes, held.told))
    return replace(plan, data=data, pins=pins, tables=held, given_mesh=dict(mesh) if mesh is not None else None)


def plan_tables_again(old: Plan, held: PlannedTables, pins: Given) -> Plan:
    """The plan of the same step and tables with other pins."""
    made = plan_with_tables(
        held.call, held.given, old.machine, old.given_mesh, pins, old.data.memory_limit, old.options
    )
    return made.with_workload(old.data.workload)


def as_step_tables(tables: GivenTables) -> StepTables:
    """What was given as `StepTables`. Raises ArgumentError for anything else."""
    if isinstance(tables, StepTables):
        return tables
    if tables == "find" or isinstance(tables, Mapping):
        return StepTables(leaves=tables)  # pyright: ignore[reportArgumentType]
    told = "a Collection" if isinstance(tables, Collection) else repr(tables)
    raise ArgumentError(
        f"tables is {told}; give {{'path of an argument': mp.embedding.Table(...)}}, 'find', or an "
        "mp.embedding.StepTables."
    )


def batch_pins(cut: StepCut, near: bool) -> dict[str, PartitionSpec]:
    """Features and their gradients are split by batch over all devices, as lookups give and updates take them."""
    spec = PartitionSpec((SHARD, REPLICA) if near else (REPLICA, SHARD))  # in the mesh's order
    names = [re.escape(x.table.name) for x in cut.lookups]
    return {f"{cut.features}/{n}": spec for n in names} | {f"{cut.place}/{n}": spec for n in names}


def _groups(given: StepTables, machine: Machine, mesh: Mapping[str, int] | None) -> list[Groups]:
    """Of every mesh of the machine, or of the one that is given: "replica" last has near replicas."""
    n = machine.devices
    if mesh is None:
        sizes, near = [(m, n // m) for m in range(1, n + 1) if n % m == 0], given.near
    else:
        shape = fixed_mesh(mesh, machine).to_dict()
        if set(shape) != {REPLICA, SHARD}:
            raise MeshError(
                f"mesh {dict(mesh)!r}: tables lie in groups of one mesh with axes 'replica' and 'shard'; give "
                f"{{'shard': {n}, 'replica': 1}} or other sizes with that product."
            )
        sizes, near = [(shape[REPLICA], shape[SHARD])], list(shape)[-1] == REPLICA
    return [Groups(replicas=m, shards=k, near=near, sync_every=given.sync_every) for m, k in sizes]


def mesh_of(groups: Groups) -> MeshShape:
    """The mesh of the groups, outermost axis first."""
    sizes = {SHARD: groups.shards, REPLICA: groups.replicas}
    return MeshShape.of(sizes if groups.near else dict(reversed(sizes.items())))


@dataclass(slots=True, kw_only=True)
class _Choice:
    """Meshes as they are looked at: dense part and tables together."""

    given: StepTables
    cut: StepCut
    search: Search
    tried: list[tuple[Found, EmbeddingPlan | None]] = field(default_factory=list)
    considered: list[Considered] = field(default_factory=list)
    refused: list[MemoryLimitError] = field(default_factory=list)

    def look(self, groups: Groups) -> None:
        try:
            found, _ = self.search.best([mesh_of(groups)])
        except MemoryLimitError as error:
            self.out(groups, error, "the dense part alone does not fit")
            return
        pricing = self.given.pricing
        pricing = replace(
            pricing, dense_seconds=pricing.dense_seconds + self.search.seconds(found),
            reserved_bytes=pricing.reserved_bytes + self.beside(found),
        )
        try:
            placed = plan_embedding(
                self.cut.collection, self.search.machine, self.cut.samples, groups=groups, pricing=pricing,
                memory_limit=int(self.search.limit), hot_rows=self.given.hot_rows,
            )
            self.considered += placed.considered
        except MemoryLimitError as error:
            self.out(groups, error, f"does not fit beside {format_bytes(pricing.reserved_bytes)} of the dense part")
            placed = None
        self.tried.append((found, placed))

    def out(self, groups: Groups, error: MemoryLimitError, why: str) -> None:
        self.refused.append(error)
        self.considered.append(Considered(replicas=groups.replicas, shards=groups.shards, seconds=None, why=why))

    def beside(self, found: Found) -> int:
        """Bytes of the dense part's peak, without the features, which the tables' buffers count."""
        import numpy as np

        bags = self.cut.call.args[-1].values()
        held = sum(int(np.prod(b.shape)) * b.dtype.itemsize for b in bags) // self.search.machine.devices
        return max(0, int(found.prediction.peak_bytes) - held)

    def best(self) -> tuple[Found, EmbeddingPlan]:
        """The mesh with the least seconds. Raises MemoryLimitError where none fits."""
        fitting = [(f, e) for f, e in self.tried if e is not None]
        if not fitting:
            raise self.refused[0]
        found, placed = min(fitting, key=lambda x: x[1].step_seconds)
        return found, replace(placed, considered=tuple(self.considered))
