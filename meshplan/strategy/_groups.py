"""Operations gathered into groups that share one strategy.

A dot, convolution, gather or the like (an *anchor*) decides alone. Everything else follows:
it joins the group of its largest operand as long as no anchor lies between them, so that a
chain of elementwise operations, reductions and reshapes is one decision with one joint set
of factors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.program import CROSSINGS, Op, Program
from meshplan.rules import Dims
from meshplan.strategy._factors import FactorTable, Part, repeats, shifted

Snapshot = tuple[int, dict[int, Part], set[int]]


@dataclass(slots=True)
class Draft:
    """A group while it grows. `operands[(op, k)]` and `results[value]` are dims in factors of `table`."""

    table: FactorTable = field(default_factory=FactorTable)
    ops: list[int] = field(default_factory=list)
    operands: dict[tuple[int, int], Dims] = field(default_factory=dict)
    results: dict[int, Dims] = field(default_factory=dict)
    depth: int = 0
    place: tuple[int, int] = (0, 0)
    anchor: bool = False
    free: bool = True  # made of literals alone: any device can compute any piece
    inputs: dict[int, Dims] = field(default_factory=dict)  # dims of a value from outside at its first use
    whole: set[int] = field(default_factory=set)  # factors that some operation inside wants unsplit

    def snapshot(self) -> Snapshot:
        """What `restore` needs to undo joins of factors and marks of whole ones."""
        return (*self.table.snapshot(), set(self.whole))

    def restore(self, saved: Snapshot) -> None:
        """Back to a snapshot; factors made since are forgotten."""
        self.table.restore(saved[:2])
        self.whole = set(saved[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One decision. Factors are numbered 0..len(sizes)-1; `whole` are those no axis may split.

    `operands[(op, k)]`: dims of operand k of an operation; `results[value]`: dims of a result;
    `reduced[op]`: factors the operation sums away, with how they combine.
    """

    ops: tuple[int, ...]
    sizes: tuple[int, ...]
    operands: dict[tuple[int, int], Dims]
    results: dict[int, Dims]
    reduced: dict[int, tuple[tuple[int, ...], str]]
    whole: frozenset[int]
    anchor: bool
    free: bool
    region: int
    scope: int


def is_anchor(op: Op) -> bool:
    """Whether the operation decides for itself; those that cross a region's edge and those without a rule do too."""
    return op.rule.anchor or op.primitive in CROSSINGS or not op.ruled


class Grouper:
    """Puts a program's operations into groups, one after the other.

    `sums` are additions that decide for themselves, with the conversions `between` them and what they add.
    """

    def __init__(self, program: Program, sums: frozenset[int], between: frozenset[int] = frozenset()) -> None:
        self.program = program
        self.sums, self.between = sums, between
        self.drafts: list[Draft | None] = []
        self.group_of: list[int] = []  # of every operation
        self.depth_of: list[int] = []
        self.free_of: list[bool] = []

    def build(self) -> tuple[list[Group], list[int]]:
        """(groups in the order of their last operations, the group of every operation)."""
        for op in self.program.ops:
            self.place(op)
        self.merge_feeders()
        kept = [i for i, d in enumerate(self.drafts) if d is not None]
        kept.sort(key=lambda i: self.drafts[i].ops[-1])  # type: ignore[union-attr]
        number = {old: new for new, old in enumerate(kept)}
        groups = [self.finish(self.drafts[i]) for i in kept]  # type: ignore[arg-type]
        return groups, [number[g] for g in self.group_of]

    # placing one operation

    def place(self, op: Op) -> None:
        """Put an operation into a group that is there, or into one of its own.

        Groups of one depth (anchors on the longest way from the arguments) can be joined without a cycle.
        """
        values = self.program.values
        depth, free = 0, not is_anchor(op)
        for operand in op.operands:
            if operand is None:
                continue
            made = values[operand].op
            if made < 0:
                free = False
            elif made < op.index:
                free = free and self.free_of[made]
                depth = max(depth, self.depth_of[made] + (is_anchor(self.program.ops[made]) or made in self.sums))
        alone = is_anchor(op) or op.index in self.sums
        self.depth_of.append(depth)
        self.free_of.append(free)
        target = -1 if alone else self.find_group(op, depth)
        if target < 0:
            self.drafts.append(Draft(depth=depth, place=(op.region, op.scope), anchor=alone))
            target = len(self.drafts) - 1
            self.enter(op, target)
        self.group_of.append(target)
        if op.index in self.sums:
            for made in dict.fromkeys(values[v].op for v in op.operands if v is not None):
                if made in self.between:
                    self.merge(self.group_of[made], target, op)

    def find_group(self, op: Op, depth: int) -> int:
        """The group of the largest operand where the operation fits in; other groups join it."""
        candidates: list[tuple[bool, int, int]] = []
        for operand in op.operands:
            made = self.program.values[operand].op if operand is not None else -1
            if made < 0 or self.program.values[operand].aval.size == 1:  # type: ignore[index]
                continue
            group = self.group_of[made]
            draft = self.drafts[group]
            assert draft is not None
            if draft.anchor or draft.depth != depth or draft.place != (op.region, op.scope):
                continue
            if (op.index in self.between) != (draft.ops[-1] in self.between):
                continue
            candidates.append((draft.free, -self.program.values[operand].aval.size, group))  # type: ignore[index]
        ordered = list(dict.fromkeys(group for _, _, group in sorted(candidates)))
        for group in ordered:
            if self.enter(op, group):
                for other in ordered:
                    if other != group and not self.drafts[other].free:  # type: ignore[union-attr]
                        self.merge(other, group, op)
                return group
        return -1

    def enter(self, op: Op, group: int) -> bool:
        """Add the operation's factors to the group's, joined through the values they share."""
        draft = self.drafts[group]
        assert draft is not None
        saved = draft.snapshot()
        offset = len(draft.table.sizes)
        for size in op.rule.sizes:
            draft.table.new(size)
        for k, operand in enumerate(op.operands[: len(op.rule.operands)]):
            inside = draft.results.get(operand) if operand is not None else None
            if inside is not None and not self.join(draft, inside, shifted(op.rule.operands[k], offset)):
                draft.restore(saved)
                return False
        draft.ops.append(op.index)
        draft.free = draft.free and self.free_of[op.index]
        for k, operand in enumerate(op.operands):
            if operand is not None:
                dims = shifted(op.rule.operands[min(k, len(op.rule.operands) - 1)], offset)
                draft.operands[op.index, k] = dims
                if operand not in draft.results:
                    self.join_input(draft, operand, dims)
        for value, dims in zip(op.results, op.rule.results, strict=True):
            draft.results[value] = shifted(dims, offset)
        return True

    def join_input(self, draft: Draft, value: int, dims: Dims) -> None:
        """A value read twice is read in one spec, unless its dims play different parts (x and its transpose)."""
        first = draft.inputs.setdefault(value, dims)
        if first is dims:
            return
        saved = draft.snapshot()
        joined = self.join(draft, first, dims)
        if not joined or any(repeats(draft.table.resolve(d)) for d in draft.operands.values()):
            draft.restore(saved)

    @staticmethod
    def join(draft: Draft, left: Dims, right: Dims) -> bool:
        """Make the dims of one value the same factors; False, with the draft half joined, where they cannot be."""
        table = draft.table
        for a, b in zip(left, right, strict=True):
            a, b = table.leaves(a), table.leaves(b)
            if a == b:
                continue
            if not a or not b:
                draft.whole.update(a or b)
                continue
            if not table.unify(a, b):
                return False
        return not repeats(table.resolve(right))

    # merging whole groups

    def merge(self, source: int, target: int, op: Op) -> None:
        """Join group `source` into `target` through the operands that `op` takes from it, if the dims allow."""
        links = [
            ((op.index, k), operand) for k, operand in enumerate(op.operands)
            if operand is not None and operand in self.drafts[source].results  # type: ignore[union-attr]
        ]
        self.merge_through(source, target, links)

    def merge_through(self, source: int, target: int, links: list[tuple[tuple[int, int], int]]) -> bool:
        """Join group `source` into `target` through (use there, value of the source); False where the dims forbid."""
        a, b = self.drafts[source], self.drafts[target]
        assert a is not None and b is not None
        saved = b.snapshot()
        offset = b.table.absorb(a.table)
        for use, value in links:
            if not self.join(b, b.operands[use], shifted(a.results[value], offset)):
                b.restore(saved)
                return False
        b.ops = sorted(a.ops + b.ops)
        b.free = b.free and a.free
        b.whole.update(f + offset for f in a.whole)
        b.operands.update({k: shifted(d, offset) for k, d in a.operands.items()})
        for value, dims in a.inputs.items():
            if value not in b.results:
                self.join_input(b, value, shifted(dims, offset))
        b.results.update({v: shifted(d, offset) for v, d in a.results.items()})
        for index in a.ops:
            if index < len(self.group_of):
                self.group_of[index] = target
        self.drafts[source] = None
        return True

    def merge_feeders(self) -> None:
        """A chain whose results go into one other chain only decides together with it."""
        results = {leaf.value for leaf in self.program.results}
        for group in range(len(self.drafts) - 1, -1, -1):
            draft = self.drafts[group]
            if draft is None or draft.anchor or any(v in results for v in draft.results):
                continue
            uses = [(use, v) for v in draft.results for use in self.program.consumers[v]]
            outside = [(use, v) for use, v in uses if self.group_of[use[0]] != group]
            targets = {self.group_of[use[0]] for use, _ in outside}
            if len(targets) != 1:
                continue
            (target,) = targets
            other = self.drafts[target]
            if other is None or other.anchor or other.place != draft.place:
                continue
            if all(self.program.values[v].aval.size == 1 for _, v in outside):
                continue  # a scalar ties no dims: a sum over many arrays must not make one decision of them
            self.merge_through(group, target, outside)

    # the frozen form

    def finish(self, draft: Draft) -> Group:
        """The draft with its factors numbered in the order of their use; repeated ones stay whole."""
        table = draft.table
        operands = {k: table.resolve(d) for k, d in draft.operands.items()}
        results = {v: table.resolve(d) for v, d in draft.results.items()}
        used: dict[int, int] = {}
        whole = set(table.leaves(tuple(sorted(draft.whole))))
        for dims in (*operands.values(), *results.values()):
            for d in dims:
                for f in d:
                    used.setdefault(f, len(used))
            whole |= repeats(dims)
        renumber = lambda dims: tuple(tuple(used[f] for f in d) for d in dims)  # noqa: E731
        reduced = {}
        for index in draft.ops:
            op = self.program.ops[index]
            gone = self.reduced_factors(op, operands, results)
            if gone:
                reduced[index] = (tuple(used[f] for f in gone), next(iter(op.rule.combine.values()), "sum"))
        first = self.program.ops[draft.ops[0]]
        return Group(
            ops=tuple(draft.ops), sizes=tuple(table.sizes[f] for f in used),
            operands={k: renumber(d) for k, d in operands.items()},
            results={v: renumber(d) for v, d in results.items()},
            reduced=reduced, whole=frozenset(used[f] for f in whole if f in used), anchor=draft.anchor, free=draft.free,
            region=first.region, scope=first.scope,
        )

    @staticmethod
    def reduced_factors(op: Op, operands: dict[tuple[int, int], Dims], results: dict[int, Dims]) -> list[int]:
        """Factors of the operation's operands that none of its results carries."""
        if op.rule.opaque:
            return []
        kept = {f for v in op.results for d in results[v] for f in d}
        gone: list[int] = []
        for k in range(len(op.operands)):
            for d in operands.get((op.index, k), ()):
                gone += [f for f in d if f not in kept and f not in gone]
        return gone
