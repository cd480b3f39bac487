"""Tables as pins: ordered patterns (EasyLM, scalax), and rules from names of dims to axes (flax, MaxText)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from meshplan.core import PinError, check_entries
from meshplan.hints import DimNames, Followed, Pin, Resolved, Row, find, is_rules, pin_of, read_rules, resolve, row_text
from meshplan.plan._pins import Alternatives, Pins, Shared, matched_pins, with_stated
from meshplan.program import PIN, Leaf, Program


@dataclass(frozen=True, slots=True)
class Layers:
    """Pins by pattern over a table: where both speak, the patterns win."""

    patterns: Mapping[str, Any]
    table: Sequence[tuple[str, Any]]


_ADVICE = " An axis that the machine does not need may have size 1 in mesh={...}."

Given = Mapping[str, Any] | Sequence[tuple[str, Any]] | Layers


def over(given: Given, more: Mapping[str, Any]) -> Given:
    """Further pins on top of those given; a pattern given before is replaced."""
    if isinstance(given, Mapping):
        return {**given, **more}
    return Layers({**given.patterns, **more}, given.table) if isinstance(given, Layers) else Layers(more, given)


def names_decide(given: Given | None) -> bool:
    """Whether these pins go by names of dims, which values inside the step have too."""
    return is_rules(given.table if isinstance(given, Layers) else given)


def gather_pins(given: Given | None, program: Program) -> Pins:
    """Every pin of the program: the user's, whose form says how to read it, then those that the step states itself.

    A mapping from patterns to specs; a sequence of (pattern, spec), of which the first that is found in a path
    wins; a sequence of (name of a dim, axes) by which arrays with named dims are split. Raises `PinError`.
    """
    if isinstance(given, Layers):
        under, above = gather_pins(given.table, program), _patterns(given.patterns, program)
        return replace(
            under, arguments={**under.arguments, **above.arguments}, results={**under.results, **above.results}
        )
    if given is None or isinstance(given, Mapping):
        pins = _patterns(given or {}, program)
    elif is_rules(given):
        pins = _named(read_rules(given), program)
    else:
        pins = _ordered(given, program)
    return with_stated(pins, program)


def _patterns(given: Mapping[str, Any], program: Program) -> Pins:
    """Patterns over the arguments; one that matches none of them may match results that have no argument's place."""
    args, free = program.args, [r for r in program.results if r.pair < 0]
    paths, others = [leaf.path for leaf in args], [leaf.path for leaf in free]
    of_results = {p for p in given if not _found(p, paths) and _found(p, others)}
    arguments = matched_pins({p: s for p, s in given.items() if p not in of_results}, args, paths)
    results = matched_pins({p: s for p, s in given.items() if p in of_results}, free, others)
    number = [j for j, r in enumerate(program.results) if r.pair < 0]
    return Pins(
        arguments={i: (pin,) for i, pin in arguments.items()}, results={number[j]: (p,) for j, p in results.items()}
    )


def _found(pattern: str, paths: Sequence[str]) -> bool:
    try:
        return bool(find(pattern, paths))
    except PinError:
        return False


def pin_texts(given: Given, program: Program, pins: Pins) -> dict[str, str]:
    """What a plan file remembers: the patterns, or for a table the paths that it pinned, layers of a kind together."""
    if isinstance(given, Mapping):
        return {pattern: str(spec) for pattern, spec in given.items()}
    families: dict[str, dict[str, None]] = {}
    of_leaf = {}
    for i, leaf in enumerate(program.args):
        text = str(pins.arguments[i][0].spec.partition_spec()) if len(pins.arguments.get(i, ())) == 1 else ""
        of_leaf[leaf.path] = text
        families.setdefault(_family(leaf.path), {})[text] = None
    found: dict[str, str] = {}
    for path, text in of_leaf.items():
        alike = len(families[_family(path)]) == 1
        if text:
            found["^" + (_family(path) if alike else re.escape(path))] = text
    return found


def _family(path: str) -> str:
    return "/".join(r"\d+" if entry.isdigit() else re.escape(entry) for entry in path.split("/"))


# ------------------------------------------------------------------------------------------ ordered patterns


def _ordered(given: Sequence[tuple[str, Any]], program: Program) -> Pins:
    rows = []
    for n, row in enumerate(given, 1):
        if not isinstance(row, Sequence) or len(row) != 2 or not isinstance(row[1], PartitionSpec):
            raise PinError(f"row {n} of the pins is {row!r}; write (pattern, PartitionSpec), all rows alike.")
        try:
            rows.append((re.compile(row[0]), row[1]))
        except re.error as error:
            raise PinError(f"row {n}: {row[0]!r} is no regular expression: {error}.") from error
    arguments: dict[int, Alternatives] = {}
    won: dict[int, int] = {}
    for i, leaf in enumerate(program.args):
        if leaf.aval.size <= 1:
            continue
        n = next((n for n, (regex, _) in enumerate(rows) if _searched(regex, leaf.path)), None)
        if n is not None:
            won[n] = won.get(n, 0) + 1
            arguments[i] = (_on_leaf(rows[n][1], i, program, f"row {n + 1}, '{rows[n][0].pattern}'"),)
    if rows and not won:
        find(rows[0][0].pattern, [leaf.path for leaf in program.args])  # raises with the nearest paths
    unused = [f"{n + 1} '{regex.pattern}'" for n, (regex, _) in enumerate(rows) if n not in won]
    notes = (f"rows of the pins that no argument took: {', '.join(unused)}",) if unused else ()
    return Pins(arguments=arguments, notes=notes)


def _searched(regex: re.Pattern[str], path: str) -> bool:
    """Found anywhere in the path, or in an end of it, so that `^` may stand for any level."""
    return any(regex.search(path[start:]) for start in [0, *(i + 1 for i, c in enumerate(path) if c == "/")])


def _on_leaf(wanted: PartitionSpec, i: int, program: Program, row: str) -> Pin:
    """The spec on one leaf; on a factored moment, those entries whose dims it has of its parameter."""
    leaf = program.args[i]
    where = f"{row} on '{leaf.path}'"
    ndim, followed = len(leaf.aval.shape), program.follows.get(i)
    if followed is not None and _differs(followed, leaf, program):
        whole = pin_of(wanted, len(program.args[followed.parameter].aval.shape), where)
        return Pin(dims=tuple(whole.dims[d] if d is not None else () for d in followed.dims), where=where)
    check_entries(tuple(wanted), ndim, where)
    return pin_of(wanted, ndim, where)


def _differs(followed: Followed, leaf: Leaf, program: Program) -> bool:
    return leaf.aval.shape != program.args[followed.parameter].aval.shape


# ------------------------------------------------------------------------------------------- rules by names


@dataclass(slots=True)
class _Kind:
    """Arrays of equal names, which the rules treat alike: their pins, and where they are."""

    resolved: Resolved
    pins: Alternatives
    places: list[str]


def _named(rows: Sequence[Row], program: Program) -> Pins:
    kinds: dict[DimNames, _Kind] = {}
    arguments: dict[int, Alternatives] = {}
    values: dict[int, Alternatives] = {}
    of_value = {leaf.value: i for i, leaf in enumerate(program.args)}
    for v, names in program.names.items():
        value = program.values[v]
        pinnable = v in of_value or (value.op >= 0 and program.ops[value.op].primitive == PIN)
        if not pinnable or value.aval.size <= 1 or not any(row[0] in names for row in rows):
            continue
        place = f"'{value.path}'" if v in of_value else f"the value named at {program.ops[value.op].source}"
        kind = kinds.get(names) or kinds.setdefault(names, _kind(names, rows, place))
        kind.places.append(place)
        (arguments if v in of_value else values)[of_value.get(v, v)] = kind.pins
    if not kinds:
        named = sorted({n for names in program.names.values() for n in names if n})
        raise PinError(
            f"no array of the step has a dim that the rules name ({', '.join(dict.fromkeys(r[0] for r in rows))}). "
            f"Named dims are: {', '.join(named) or 'none; name them with mp.dims, mp.params or the framework'}."
        )
    notes = tuple(filter(None, (rules_note(kind, rows) for kind in kinds.values())))
    shared = tuple(
        Shared(resolved=k.resolved, rows=tuple(rows), where=k.places[0], count=len(k.places), pins=k.pins)
        for k in kinds.values() if k.resolved.contested
    )
    return Pins(arguments=arguments, values=values, notes=notes, shared=shared)


def _kind(names: DimNames, rows: Sequence[Row], place: str) -> _Kind:
    found = resolve(names, rows)
    where = f"the rules on {place} ({_dims_text(names)})"
    pins = tuple(Pin(dims=dims, where=where, any_order=True, advice=_ADVICE) for dims in found.choices or (found.dims,))
    return _Kind(found, pins, [])


def rules_note(kind: _Kind, rows: Sequence[Row]) -> str:
    """Which rows won on arrays of these names, where more than one could have; '' where the table leaves no doubt."""
    found, places = kind.resolved, kind.places
    if found.contested:
        return ""  # told with its cost once the plan is known
    parts = []
    for d, name in enumerate(found.names):
        if name is None or not (found.passed[d] or found.unused[d]):
            continue
        said = [f"'{name}' takes {row_text(rows, found.rows[d])}"]
        said += [f"{row_text(rows, n)} is passed over, its axis is taken" for n in found.passed[d]]
        said += [f"{row_text(rows, n)} is not needed" for n in found.unused[d]]
        parts.append("; ".join(said))
    if not parts:
        return ""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"rules on {places[0]}{more} ({_dims_text(found.names)}): {', '.join(parts)}"


def _dims_text(names: DimNames) -> str:
    return " ".join(name or "_" for name in names)
