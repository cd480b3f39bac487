"""Repeated layers shown once: paths that differ in numbers alone and agree in what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PathGroup(Generic[T]):
    """`pattern` has `*` where the members' numbers differ: `state/params/layers/*/mlp/up`."""

    pattern: str
    members: tuple[T, ...]

    @property
    def first(self) -> T:
        return self.members[0]

    @property
    def label(self) -> str:
        return self.pattern if len(self.members) == 1 else f"{self.pattern} x {len(self.members)}"


def grouped(items: Iterable[T], path: Callable[[T], str], same: Callable[[T], Hashable]) -> tuple[PathGroup[T], ...]:
    """Groups in the order of their first members; members of one group agree in `same`."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        numberless = tuple("*" if part.isdigit() else part for part in path(item).split("/"))
        groups.setdefault((numberless, same(item)), []).append(item)
    return tuple(PathGroup(common_pattern([path(m) for m in members]), tuple(members)) for members in groups.values())


def common_pattern(paths: Iterable[str]) -> str:
    """Entries that all paths share as they are, `*` for the others; the paths have equally many entries."""
    columns = zip(*(p.split("/") for p in paths), strict=True)
    return "/".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


@dataclass(frozen=True, slots=True)
class Family(Generic[T]):
    """A group and the groups that mirror it below other roots, as an optimizer's moments mirror parameters.

    `mirrors` are the last entries of those roots: ("mu", "nu").
    """

    group: PathGroup[T]
    others: tuple[PathGroup[T], ...] = ()
    mirrors: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[T, ...]:
        return (*self.group.members, *(m for g in self.others for m in g.members))


def families(
    groups: Iterable[PathGroup[T]], shape: Callable[[T], Hashable], same: Callable[[T], Hashable],
    rank: Callable[[T], int] = lambda _: 0,
) -> tuple[Family[T], ...]:
    """Groups with their mirrors: subtrees that hold the same paths and shapes, members that agree in `same`.

    The root with the least `rank` below it, then the shortest, stands for its mirrors; families come in the
    order of the groups that stand for them.
    """
    listed = list(groups)
    below: dict[str, list[PathGroup[T]]] = {}
    for g in listed:
        for root in _roots(g):
            below.setdefault(root, []).append(g)
    alike: dict[Hashable, list[str]] = {}
    for root, members in below.items():
        leaves = frozenset((g.pattern[len(root) :], shape(g.first)) for g in members)
        alike.setdefault(leaves, []).append(root)

    def place(root: str) -> tuple[int, int]:
        return min(rank(g.first) for g in below[root]), root.count("/")

    order = {root: (min(roots, key=place), place(root)) for roots in alike.values() if len(roots) > 1 for root in roots}
    rows: dict[Hashable, list[tuple[tuple[int, int], int, str]]] = {}
    for i, g in enumerate(listed):
        root = next((r for r in _roots(g) if r in order), "")
        key = (order[root][0], g.pattern[len(root) :], same(g.first)) if root else i
        rows.setdefault(key, []).append((order[root][1] if root else (0, 0), i, root))
    found = []
    for row in rows.values():
        (_, at, _), *others = sorted(row)
        mirrors = tuple(root.split("/")[-1] for _, _, root in others)
        found.append((at, Family(listed[at], tuple(listed[i] for _, i, _ in others), mirrors)))
    return tuple(family for _, family in sorted(found, key=lambda pair: pair[0]))


def _roots(group: PathGroup[Any]) -> list[str]:
    """`a`, `a/b` for `a/b/c`."""
    parts = group.pattern.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
