"""Rules that collide on an array: which dim loses the axis in the plan, and what the other ways would cost."""

from __future__ import annotations

from dataclasses import replace

from meshplan.core import Spec, format_bytes, format_seconds
from meshplan.hints import Resolved, row_text
from meshplan.plan._pins import Alternatives, Pins, Place, Shared, agrees
from meshplan.plan._search import Found, Search

MOST_PRICED = 3  # collisions whose other ways are solved for; the rest is told without seconds


def collision_notes(search: Search, found: Found) -> tuple[str, ...]:
    """A sentence for every kind of array on which the rules collide: who wants the axis, who gets it, the cost."""
    notes = []
    for k, shared in enumerate(search.pins.shared):
        node, place = _example(search, shared)
        spec = found.chosen.spec(node, place.dims)
        notes.append(_told(search, found, shared, place, spec, priced=k < MOST_PRICED))
    return tuple(notes)


def _example(search: Search, shared: Shared) -> tuple[int, Place]:
    """The largest of the arrays, at its node."""
    at = ((node, place) for node, places in search.pins.at.items() for place in places if place.pins is shared.pins)
    return max(at, key=lambda found: found[1].aval.nbytes)


def _told(search: Search, found: Found, shared: Shared, place: Place, spec: Spec, *, priced: bool) -> str:
    resolved, mesh = shared.resolved, found.mesh
    more = f" and {shared.count - 1} more" if shared.count > 1 else ""
    names = " ".join(name or "_" for name in resolved.names)
    parts = [f"rules collide on {shared.where}{more} ({names})"]
    local = place.aval.nbytes / spec.shards(mesh)
    for axis, dims in resolved.contested:
        wanting = " and ".join(f"'{resolved.names[d]}' ({_row(resolved, d, shared)})" for d in dims)
        winner = next((d for d in dims if axis in spec.dims[d]), None)
        losing = ", ".join(f"'{resolved.names[d]}'" for d in dims if d != winner)
        to = f"'{resolved.names[winner]}'" if winner is not None else "neither"
        lost = f"{losing} loses it: {format_bytes(local)} on each device"
        lost += f", with it too {format_bytes(local / mesh.size(axis))}" if mesh.size(axis) > 1 else ""
        parts.append(f"axis '{axis}' is wanted by {wanting}; the plan gives it to {to}, {lost}")
    text = ": ".join((parts[0], "; ".join(parts[1:]))) + f". Split as {spec}"
    others = _others(search, found, shared, spec) if priced else []
    if others:
        return f"{text}, the step takes {format_seconds(found.prediction.step_seconds)}; {', '.join(others)}"
    return text


def _row(resolved: Resolved, d: int, shared: Shared) -> str:
    return row_text(shared.rows, resolved.rows[d] or resolved.passed[d][0])


def _others(search: Search, found: Found, shared: Shared, spec: Spec) -> list[str]:
    """What the step would take with each of the other ways to share the axes out."""
    told = []
    for pin in shared.pins:
        if agrees(spec, pin, found.mesh) or not all(a in found.mesh.names for a in pin.axes):
            continue
        forced = replace(search, pins=only(search.pins, shared, (pin,)))
        other = forced.at(found.mesh, None, [], exact=False)
        if other is not None:
            order = " (the table's order)" if pin is shared.pins[0] else ""
            fits = "" if other.feasible else ", which does not fit"
            told.append(f"as {pin.spec}{order} {format_seconds(other.prediction.step_seconds)}{fits}")
    return told


def only(pins: Pins, shared: Shared, left: Alternatives) -> Pins:
    """The pins with fewer alternatives where these rules collide."""
    at = {
        node: tuple(replace(p, pins=left) if p.pins is shared.pins else p for p in places)
        for node, places in pins.at.items()
    }
    return replace(pins, at=at)
