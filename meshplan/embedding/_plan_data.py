"""The answer of the embedding planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshplan.embedding._cost import Pricing
from meshplan.embedding._table import Collection, Groups, Placement, Table

if TYPE_CHECKING:
    from meshplan.embedding._optim import RowOptimizer
    from meshplan.embedding._runtime import Embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A table kept as two: its `hot_rows` first rows, whole on every device, and the others, sharded.

    The plan's tables are then `hot` and `cold`; an id below `hot_rows` goes to the first, any other, less `hot_rows`,
    to the second, and a bag is the sum of both. `hot_share`: the part of the ids that stays at home.
    """

    table: str
    hot: str
    cold: str
    hot_rows: int
    hot_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """One table of a plan: what it takes on the device where it takes most, and why it is kept so.

    `seconds`: of lookup, update and exchange there, each at the rate of the links or memory. `share`: the largest
    part of the table's ids that goes to one device.
    """

    table: str
    scheme: str
    devices: int
    nbytes: int
    seconds: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """Groups that were looked at: seconds of a step, or why they are out of the question."""

    replicas: int
    shards: int
    seconds: float | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """Groups, a placement for every table, and what a step of `batch` samples takes.

    `parts`: seconds by part of a step, each of its slowest device: "ids" and "outputs" (all-to-alls), "lookup",
    "gradients" (all-to-all back, and the gather of "data" tables), "update", "sync" (a step's part of it), "dense".
    `waiting_seconds`: what of it is there only because devices have unequal loads. By device of a group, bytes:
    `weight_bytes`, `sum_bytes` (the optimizer's), `buffer_bytes` (ids and rows that travel). `imbalance`: largest over
    mean of "memory", "lookups" (rows read) and "bytes" (ids and rows sent). `exact`: no placement is better for these
    groups. `bound_seconds`: none for these groups can be below.
    """

    machine: str
    batch: int
    tables: tuple[Table, ...]
    pricing: Pricing
    groups: Groups
    placements: tuple[Placement, ...]
    splits: tuple[Split, ...]
    parts: dict[str, float]
    waiting_seconds: float
    bound_seconds: float
    exact: bool
    memory_limit: int
    weight_bytes: tuple[int, ...]
    sum_bytes: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    imbalance: dict[str, float]
    lines: tuple[TableLine, ...]
    considered: tuple[Considered, ...]
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def queries_per_second(self) -> float:
        return self.batch / self.step_seconds

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Bytes of each device of a group: weights, sums, buffers, and what is reserved for all else."""
        each = zip(self.weight_bytes, self.sum_bytes, self.buffer_bytes, strict=True)
        return tuple(sum(x) + self.pricing.reserved_bytes for x in each)

    @property
    def peak_bytes(self) -> int:
        return max(self.device_bytes)

    @property
    def devices(self) -> int:
        return self.groups.devices

    @property
    def collection(self) -> Collection:
        """The tables that were planned, each whole, in their order."""
        by_hot = {s.hot: s for s in self.splits}
        cold = {s.cold: t for s in self.splits for t in self.tables if t.name == s.cold}
        found: list[Table] = []
        for t in self.tables:
            if t.name in by_hot:
                other = cold[by_hot[t.name].cold]
                rows, hotness = t.rows + other.rows, t.hotness + other.hotness
                found.append(replace(t, name=by_hot[t.name].table, rows=rows, hotness=hotness))
            elif t.name not in cold:
                found.append(t)
        return Collection(tables=tuple(found))

    def embeddings(self, optimizer: RowOptimizer, **more: Any) -> Embeddings:
        """The tables at run time, as they are planned; `more`: other arguments of `Embeddings`.

        Ids, features and saved tables are those of `collection`, also where the plan keeps a table as two.
        """
        from meshplan.embedding._runtime import Embeddings

        return Embeddings(
            self.collection, self.placements, self.groups, optimizer=optimizer, splits=self.splits, **more
        )

    def placement(self, table: str) -> Placement:
        """Where a table is; raises ArgumentError for a name that the plan has not."""
        from meshplan.core import ArgumentError, nearest

        for p in self.placements:
            if p.table == table:
                return p
        raise ArgumentError(f"the plan has no table {table!r}. {nearest(table, [p.table for p in self.placements])}")

    def to_json(self) -> str:
        """The same text for the same plan; `load_embedding_plan` reads it."""
        from meshplan.embedding._plan_json import to_json

        return to_json(self)

    def __str__(self) -> str:
        from meshplan.embedding._plan_text import plan_text

        return plan_text(self)
