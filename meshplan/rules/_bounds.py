"""The least and the largest value an array of integers or booleans can have, one operation at a time.

Enough to see that a position is in range: literals, counters, `clip`, modulo, comparisons and the
`select(i < 0, i + n, i)` with which JAX normalises every index.
Method: interval arithmetic (Moore 1966); a result that could leave its dtype's range is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from meshplan.rules._rule import Bounds, OpView

_MOVES = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice rev copy copy_p stop_gradient name pvary reshard "
    "relayout sharding_constraint layout_constraint dynamic_slice split reduce_max reduce_min cummax cummin sort "
    "optimization_barrier device_put tile unstack".split()
)
_JOINS = frozenset({"concatenate", "stack", "dynamic_update_slice"})
_BINARY: MappingProxyType[str, Callable[[Bounds, Bounds], Bounds | None]] = MappingProxyType({
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": lambda a, b: _corners(a, b),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "lt": lambda a, b: _decided(a[1] < b[0], a[0] >= b[1]),
    "le": lambda a, b: _decided(a[1] <= b[0], a[0] > b[1]),
    "gt": lambda a, b: _decided(a[0] > b[1], a[1] <= b[0]),
    "ge": lambda a, b: _decided(a[0] >= b[1], a[1] < b[0]),
    "eq": lambda a, b: _decided(a == b and a[0] == a[1], a[1] < b[0] or b[1] < a[0]),
    "ne": lambda a, b: _decided(a[1] < b[0] or b[1] < a[0], a == b and a[0] == a[1]),
    "div": lambda a, b: (a[0] // b[1], a[1] // b[0]) if a[0] >= 0 and b[0] > 0 else None,
})  # fmt: skip


def _corners(a: Bounds, b: Bounds) -> Bounds:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _decided(true: bool, false: bool) -> Bounds:
    return (int(true), int(not false))


def _limits(dtype: str) -> Bounds | None:
    """All values of an integer or boolean dtype."""
    if dtype == "bool":
        return 0, 1
    signed, _, bits = dtype.partition("int")
    if signed not in ("", "u") or not bits.isdigit():
        return None
    n = int(bits)
    return (0, 2**n - 1) if signed else (-(2 ** (n - 1)), 2 ** (n - 1) - 1)


def result_bounds(view: OpView) -> tuple[Bounds | None, ...]:
    """Bounds of every result, from `view.bounds`, literals and the operation itself; None for what is no integer."""
    ins = [view.bounds_of(i) or _limits(a.dtype) for i, a in enumerate(view.operands)]
    return tuple(_of_result(view, ins, r) for r in range(len(view.results)))


def _of_result(view: OpView, ins: Sequence[Bounds | None], r: int) -> Bounds | None:
    limits = _limits(view.results[r].dtype)
    if limits is None:
        return None
    found = _computed(view, ins, r)
    return limits if found is None or found[0] < limits[0] or found[1] > limits[1] else found


def _computed(view: OpView, ins: Sequence[Bounds | None], r: int) -> Bounds | None:
    name = view.primitive
    if name == "iota":
        return 0, max(0, view.results[0].shape[int(view.params["dimension"])] - 1)
    if name in ("argmax", "argmin"):
        return 0, max(0, view.operands[0].shape[int(view.params["axes"][0])] - 1)
    if name in _MOVES:
        return ins[min(r, len(ins) - 1)] if ins else None
    known = [x for x in ins if x is not None]
    if len(known) < len(ins):
        return None
    if name == "convert_element_type":
        return known[0]
    if name in ("rem", "and"):
        return _masked(name, known)
    if name in _BINARY and len(known) == 2:
        return _BINARY[name](known[0], known[1])
    if name == "select_n":
        cases = known[1:][max(0, known[0][0]) : known[0][1] + 1]
        return min(c[0] for c in cases), max(c[1] for c in cases)
    if name == "clamp":
        low, x, high = known
        return min(max(low[0], x[0]), high[0]), min(max(low[1], x[1]), high[1])
    if name in _JOINS:
        taken = known[:2] if name == "dynamic_update_slice" else known
        return min(c[0] for c in taken), max(c[1] for c in taken)
    return None


def _masked(name: str, ins: Sequence[Bounds]) -> Bounds | None:
    """A remainder has its dividend's sign and is smaller than the divisor; `and` with a mask is within the mask."""
    left, right = ins
    if name == "and":
        masks = [x[1] for x in ins if x[0] >= 0]
        return (0, min(masks)) if masks else None
    if right[0] <= 0:
        return None
    most = right[1] - 1
    return (0 if left[0] >= 0 else -min(most, -left[0])), (min(most, left[1]) if left[1] >= 0 else 0)
