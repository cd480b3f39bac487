"""Rules written down as text, in the notation of JAX's `custom_partitioning` sharding rules.

    i j, j k -> i k          reduction_factors=("j",)
    b (h d), ... -> b h d    h=4

Operands left of `->`, results right of it, separated by commas; one factor per dim, several in
brackets for a dim that carries several, major to minor; `...` (or `...1`) at the front stands for any number
of leading dims. As one string, the keyword arguments follow the rule in braces, as Shardy prints them:

    "i j, j k -> i k reduction={j}"      "b (h d) -> b h d {h=4, d=8} need_replication={d}"

A factor of some operand that no result carries must be declared a reduction; without that it
stays whole, since nothing says how parts combine. Factors that need replication stay whole, and
so do permutation factors: shards would have to exchange rows.
Source: Shardy's OpShardingRuleAttr and `jax.experimental.custom_partitioning.SdyShardingRule`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshplan.core import SpecError, nearest
from meshplan.rules._rule import Aval, Combine, OpRule, OpView

_TOKEN = re.compile(r"\s*(?:(\.\.\.\d*)|([A-Za-z]\w*)|([(),])|(\S))")
_CLAUSE = re.compile(r"(?:(reduction|need_replication|permutation)\s*=\s*)?\{([^{}]*)\}")
_UNDECLARED = "factor {} is in no result and is not declared a reduction"
Dim = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A parsed rule, itself a `RuleFn`: applied to an operation it gives the factors their sizes.

    `operands[i]` and `results[i]` hold a tuple of factor names per dim; a dim ("...0",) stands for
    leading dims. `combine` says how a reduction factor combines (default sum).
    """

    text: str
    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    reduction: tuple[str, ...] = ()
    need_replication: tuple[str, ...] = ()
    permutation: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    combine: Mapping[str, Combine] = field(default_factory=dict)

    def __call__(self, view: OpView) -> OpRule:
        return _apply(self, view)


def _error(text: str, what: str) -> SpecError:
    return SpecError(f"sharding rule {text!r}: {what}")


def _parse_side(text: str, side: str) -> tuple[tuple[Dim, ...], ...]:
    """Values of one side of the arrow; an empty side is one scalar."""
    values: list[tuple[Dim, ...]] = []
    dims: list[Dim] = []
    group: list[str] | None = None
    for ellipsis, name, mark, other in (m.groups() for m in _TOKEN.finditer(side)):
        if other:
            raise _error(text, f"unknown character {other!r}; use names, commas, brackets and a leading '...'")
        if ellipsis:
            if dims or group is not None:
                raise _error(text, "'...' must come first among the dims of a value")
            dims.append((f"...{int(ellipsis[3:] or 0)}",))
        elif name and group is not None:
            group.append(name)
        elif name:
            dims.append((name,))
        elif mark == "(":
            if group is not None:
                raise _error(text, "brackets within brackets; write (a b c)")
            group = []
        elif mark == ")":
            if group is None or len(group) < 2:
                raise _error(text, "brackets must open before they close and hold at least two factors")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            raise _error(text, "a comma within brackets; close them first")
        else:
            values.append(tuple(dims))
            dims = []
    if group is not None:
        raise _error(text, "a bracket is never closed")
    return (*values, tuple(dims))


def parse_rule(
    text: str,
    *,
    reduction_factors: Iterable[str] = (),
    need_replication_factors: Iterable[str] = (),
    permutation_factors: Iterable[str] = (),
    combine: Mapping[str, Combine] | None = None,
    **factor_sizes: int,
) -> Notation:
    """A rule from its text; keyword arguments as in JAX, or in braces within the text.

    `combine` maps a reduction factor to "sum", "max", "min", "mul", "and" or "or".
    Raises `SpecError` where the text or the arguments cannot be.
    """
    declared: dict[str, list[str]] = {
        "reduction": list(reduction_factors),
        "need_replication": list(need_replication_factors),
        "permutation": list(permutation_factors),
    }
    sizes = dict(factor_sizes)
    for kind, inside in _CLAUSE.findall(text):
        words = [w for w in re.split(r"[\s,]+", inside) if w]
        if kind:
            declared[kind] += words
            continue
        for word in words:
            name, _, size = word.partition("=")
            if not size.isdigit():
                raise _error(text, f"{word!r} in braces is no size; write {{h=4}}")
            sizes[name] = int(size)
    bare = _CLAUSE.sub("", text)
    sides = bare.split("->")
    if len(sides) != 2:
        raise _error(text, "one '->' must stand between operands and results")
    notation = Notation(
        text=text, operands=_parse_side(text, sides[0]), results=_parse_side(text, sides[1]),
        reduction=tuple(declared["reduction"]), need_replication=tuple(declared["need_replication"]),
        permutation=tuple(declared["permutation"]), sizes=sizes, combine=dict(combine or {}),
    )  # fmt: skip
    _check_names(notation)
    return notation


def _check_names(rule: Notation) -> None:
    """Every declared factor occurs, in one kind only, and compound factors have sizes."""
    dims = [d for value in (*rule.operands, *rule.results) for d in value]
    names = {name for d in dims for name in d}
    single = {d[0] for d in dims if len(d) == 1}
    special = [*rule.reduction, *rule.need_replication, *rule.permutation]
    for name in [*special, *rule.sizes, *rule.combine]:
        if name not in names:
            raise _error(rule.text, f"factor {name!r} is declared but not used. {nearest(name, sorted(names))}")
    for name in special:
        if special.count(name) > 1:
            raise _error(rule.text, f"factor {name!r} is declared twice; it is of one kind only")
    kept = {name for value in rule.results for d in value for name in d}
    for name in rule.reduction:
        if name in kept:
            raise _error(rule.text, f"factor {name!r} is declared a reduction, but a result carries it")
    for name in rule.combine:
        if name not in rule.reduction:
            raise _error(rule.text, f"combine names {name!r}, which is not among the reduction factors")
    unsized = sorted(n for d in dims if len(d) > 1 for n in d if n not in single and n not in rule.sizes)
    if unsized:
        raise _error(rule.text, f"factor {unsized[0]!r} is only used in brackets; give its size, {unsized[0]}=...")


def _expand(rule: Notation, value: tuple[Dim, ...], aval: Aval, where: str) -> tuple[Dim, ...]:
    """One entry per dim: a leading '...' becomes as many factors as the value has dims left."""
    if not value or not value[0][0].startswith("..."):
        if len(value) != len(aval.shape):
            raise _error(rule.text, f"{where} has {len(aval.shape)} dims {aval.shape}, the rule writes {len(value)}")
        return value
    group, rest = value[0][0], value[1:]
    lead = len(aval.shape) - len(rest)
    if lead < 0:
        raise _error(rule.text, f"{where} has {len(aval.shape)} dims {aval.shape}, the rule writes {len(rest)} or more")
    return (*((f"{group}:{i}",) for i in range(lead)), *rest)


def _sizes(rule: Notation, values: list[tuple[tuple[Dim, ...], Aval, str]]) -> dict[str, int]:
    sizes = dict(rule.sizes)
    for dims, aval, where in values:
        for dim, size in zip(dims, aval.shape, strict=True):
            if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
                raise _error(
                    rule.text, f"factor {dim[0]!r} is {sizes[dim[0]]} elsewhere and {size} in {where} {aval.shape}"
                )
    for dims, aval, where in values:
        for dim, size in zip(dims, aval.shape, strict=True):
            made = math.prod(sizes[f] for f in dim)
            if made != size:
                raise _error(rule.text, f"({' '.join(dim)}) makes {made}, the dim of {where} is {size}")
    return sizes


def _apply(rule: Notation, view: OpView) -> OpRule:
    """The factors of the rule with the sizes of one operation. Raises `SpecError` where they do not fit."""
    for kind, written, found in (("operands", rule.operands, view.operands), ("results", rule.results, view.results)):
        if len(written) != len(found):
            raise _error(rule.text, f"{view.primitive} has {len(found)} {kind}, the rule writes {len(written)}")
    places = [(w, a, f"operand {i}") for i, (w, a) in enumerate(zip(rule.operands, view.operands, strict=True))]
    places += [(w, a, f"result {i}") for i, (w, a) in enumerate(zip(rule.results, view.results, strict=True))]
    values = [(_expand(rule, written, aval, where), aval, where) for written, aval, where in places]
    sizes = _sizes(rule, values)
    count = len(view.operands)
    kept = {f for dims, _, _ in values[count:] for d in dims for f in d}
    undeclared = sorted(sizes.keys() - kept - set(rule.reduction))
    still = {*rule.need_replication, *rule.permutation, *undeclared}
    seen = dict.fromkeys(f for dims, _, _ in values for d in dims for f in d)
    order = [f for f in seen if f not in still and sizes[f] > 1]
    index = {f: i for i, f in enumerate(order)}

    def entries(dims: tuple[Dim, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(_splittable(d, index, sizes) for d in dims)

    reasons = [_UNDECLARED.format(f) for f in undeclared]
    reasons += [f"factor {f} is declared to need replication" for f in rule.need_replication]
    reasons += [f"permutation factor {f}: shards would exchange rows" for f in rule.permutation]
    return OpRule(
        sizes=tuple(sizes[f] for f in order), operands=tuple(entries(v[0]) for v in values[:count]),
        results=tuple(entries(v[0]) for v in values[count:]), anchor=True, whole="; ".join(reasons),
        combine={index[f]: rule.combine.get(f, "sum") for f in rule.reduction if f in index},
    )  # fmt: skip


def _splittable(dim: Dim, index: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Factors of a dim up to the first that stays whole: what is minor to it cannot be cut in blocks."""
    found: list[int] = []
    for name in dim:
        if sizes[name] == 1:
            continue
        if name not in index:
            break
        found.append(index[name])
    return tuple(found)
