"""Factors of a group of operations, joined as the group grows.

Every operation brings its own factors. When two operations share a value, the factors
of its dims are the same factors: `unify` joins them, splitting one into a major and a
minor part where a reshape cuts a dim in two. What a failed join has done is undone with a snapshot.
"""

from __future__ import annotations

from meshplan.rules import Dims

Part = tuple[int, ...]


class FactorTable:
    """Sizes of factors and which were joined or split; ids stay valid, `leaves` resolves them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: dict[int, Part] = {}  # a factor that was joined (one part) or split (two or more)

    def new(self, size: int) -> int:
        """The id of a fresh factor."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def absorb(self, other: FactorTable) -> int:
        """Append all factors of another table; returns the offset of its ids."""
        offset = len(self.sizes)
        self.sizes += other.sizes
        self.parts.update({k + offset: tuple(p + offset for p in v) for k, v in other.parts.items()})
        return offset

    def leaves(self, factors: Part) -> Part:
        """The factors in their finest present form, major to minor."""
        if not self.parts or not any(f in self.parts for f in factors):
            return factors
        out: list[int] = []
        for f in factors:
            out += self.leaves(self.parts[f]) if f in self.parts else (f,)
        return tuple(out)

    def unify(self, left: Part, right: Part) -> bool:
        """Make two sequences of factors the same; False where their sizes do not nest.

        After a failure some of the factors may be joined: `restore` a snapshot.
        """
        a, b = list(self.leaves(left)), list(self.leaves(right))
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if x == y:
                continue
            m, n = self.sizes[x], self.sizes[y]
            if m == n:
                self.parts[y] = (x,)
                a, b = list(self.leaves(tuple(a))), list(self.leaves(tuple(b)))
                continue
            big, small = (x, n) if m > n else (y, m)
            if not small or self.sizes[big] % small:  # an empty dim is no part of another
                return False
            major, minor = self.new(small), self.new(self.sizes[big] // small)
            self.parts[big] = (major, minor)
            # look again at both halves against the other side
            a = list(self.leaves((x, *a)))
            b = list(self.leaves((y, *b)))
        return not a and not b

    def snapshot(self) -> tuple[int, dict[int, Part]]:
        """What `restore` needs to forget all that follows."""
        return len(self.sizes), dict(self.parts)

    def restore(self, saved: tuple[int, dict[int, Part]]) -> None:
        """Back to a snapshot, which may be used once; ids given out since are void."""
        del self.sizes[saved[0] :]
        self.parts = saved[1]

    def resolve(self, dims: Dims) -> Dims:
        """The dims in factors of their finest present form."""
        return tuple(self.leaves(d) for d in dims)


def shifted(dims: Dims, offset: int) -> Dims:
    """The dims with every factor's number raised."""
    return tuple(tuple(f + offset for f in d) for d in dims)


def repeats(dims: Dims) -> set[int]:
    """Factors that occur on more than one place of one array."""
    seen: set[int] = set()
    twice: set[int] = set()
    for d in dims:
        for f in d:
            (twice if f in seen else seen).add(f)
    return twice
