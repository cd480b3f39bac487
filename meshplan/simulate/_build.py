"""Many tasks, one call each or a whole loop at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshplan.core import ProblemError, nearest
from meshplan.simulate._task import TASK_KINDS, Ints, TaskKind, Tasks


class TaskList:
    """Tasks being written down; `add` gives each the id that later ones come after."""

    __slots__ = ("_after", "_after_ptr", "_columns", "_texts", "_use_bytes", "_use_ptr", "_uses")

    def __init__(self) -> None:
        self._columns: list[tuple[int, float, int, int, int, int, int]] = []
        self._texts: list[tuple[str, str, str]] = []
        self._after_ptr, self._use_ptr = [0], [0]
        self._after: list[int] = []
        self._uses: list[int] = []
        self._use_bytes: list[float] = []

    def __len__(self) -> int:
        return len(self._columns)

    def add(
        self, kind: TaskKind, *, seconds: float = 0.0, uses: Iterable[int] = (), use_bytes: Sequence[float] = (),
        after: Iterable[int] = (), device: int = 0, nbytes: int = 0, allocates: int = 0, frees: int = 0,
        name: str = "", source: str = "", detail: str = "", peer: int = -1,
    ) -> int:
        """Add one task and return its id; arguments as in `Task`, `after` may name ids still to come.

        Raises ProblemError for an unknown kind, or `use_bytes` of another length than `uses`.
        """
        if kind not in TASK_KINDS:
            raise ProblemError(f"task '{name}' has kind '{kind}', which is none. {nearest(kind, TASK_KINDS)}")
        used = len(self._uses)
        self._uses.extend(uses)
        used = len(self._uses) - used
        if use_bytes and len(use_bytes) != used:
            raise ProblemError(
                f"task '{name}' uses {used} resources and moves bytes over {len(use_bytes)}; give bytes for every use."
            )
        self._use_bytes.extend(use_bytes or [0.0] * used)
        self._after.extend(after)
        self._after_ptr.append(len(self._after))
        self._use_ptr.append(len(self._uses))
        self._columns.append((TASK_KINDS.index(kind), seconds, device, peer, nbytes, allocates, frees))
        self._texts.append((name, source, detail))
        return len(self._columns) - 1

    def build(self) -> Tasks:
        """The tasks as arrays; raises ProblemError as `Tasks` does."""
        columns = list(zip(*self._columns, strict=True)) or [()] * 7
        kind, device, peer, nbytes, allocates, frees = (
            np.array(columns[k], dtype=np.int64) for k in (0, 2, 3, 4, 5, 6)
        )
        names, sources, details = list(zip(*self._texts, strict=True)) or [()] * 3
        return Tasks(
            kind=kind, seconds=np.array(columns[1], dtype=np.float64), device=device, peer=peer, nbytes=nbytes,
            allocates=allocates, frees=frees,
            after_ptr=np.array(self._after_ptr, dtype=np.int64), after=np.array(self._after, dtype=np.int64),
            use_ptr=np.array(self._use_ptr, dtype=np.int64), uses=np.array(self._uses, dtype=np.int64),
            use_bytes=np.array(self._use_bytes, dtype=np.float64),
            names=tuple(names), sources=tuple(sources), details=tuple(details),
        )


def _joined_pointers(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part) for part in parts]))])


def concatenate(parts: Sequence[Tasks]) -> Tasks:
    """These tasks one list after the other, ids counted on; no dependences between the lists are added."""
    if not parts:
        return TaskList().build()
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    after = [part.after + start for part, start in zip(parts, starts, strict=True)]
    arrays = {
        field: np.concatenate([getattr(part, field) for part in parts])
        for field in ("kind", "seconds", "device", "peer", "nbytes", "allocates", "frees", "uses", "use_bytes")
    }
    return Tasks(
        **arrays, after=np.concatenate(after), after_ptr=_joined_pointers([part.after_ptr for part in parts]),
        use_ptr=_joined_pointers([part.use_ptr for part in parts]),
        names=tuple(name for part in parts for name in part.names),
        sources=tuple(source for part in parts for source in part.sources),
        details=tuple(detail for part in parts for detail in part.details),
    )


def repeat(tasks: Tasks, times: int, carried: Iterable[tuple[int, int]] = ()) -> Tasks:
    """The tasks of a loop: `times` copies, one after the other in the order of ids.

    `carried`: (earlier, later) ids within one copy: `later` of each copy comes after `earlier`
    of the copy before. Raises ProblemError for ids that are not there.
    """
    if times < 0:
        raise ProblemError(f"a loop of {times} turns cannot be; give 0 or more.")
    copies = concatenate([tasks] * times)
    pairs = np.array(list(carried), dtype=np.int64).reshape(-1, 2)
    if not len(pairs) or times < 2:
        return copies
    if pairs.min() < 0 or pairs.max() >= len(tasks):
        raise ProblemError(
            f"a loop of {len(tasks)} tasks carries from task {pairs[:, 0].tolist()} to {pairs[:, 1].tolist()}; "
            f"give ids from 0 to {len(tasks) - 1}."
        )
    turns = np.arange(1, times)[:, None] * len(tasks)
    own = np.repeat(np.arange(len(copies)), np.diff(copies.after_ptr))
    later = np.concatenate([own, (turns + pairs[:, 1]).ravel()])
    earlier = np.concatenate([copies.after, (turns - len(tasks) + pairs[:, 0]).ravel()])
    order = np.argsort(later, kind="stable")
    pointers = np.concatenate([[0], np.cumsum(np.bincount(later, minlength=len(copies)))])
    fields = {field: getattr(copies, field) for field in Tasks.__slots__}
    return Tasks(**{**fields, "after": earlier[order], "after_ptr": pointers})
