"""From a jaxpr to the flat program: one walk over equations, calls and regions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshplan.core import _jax, _jax_pins
from meshplan.hints import Pin, pin_of_sharding, tagged_names
from meshplan.program._program import CARRY, MERGE, PIN, SLICE, STACK, Block, Key, Op, Region, Value, runs_of
from meshplan.rules import Aval, Bounds, OpRule, OpView, result_bounds

RuleFor = Callable[[OpView], tuple[OpRule, bool]]
Atom = int | np.ndarray  # a value id or a literal


class Walker:
    """Collects values and operations while walking nested jaxprs."""

    def __init__(self, rule_for: RuleFor, follow: bool = True, cut_names: bool = False) -> None:
        self.rule_for = rule_for
        self.follow = follow  # shardings written in the step are pins
        self.cut_names = cut_names  # values with names can be pinned
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = [Region("top", 1.0, -1, ())]
        self.names: dict[int, tuple[str | None, ...]] = {}
        self.pins: dict[int, Pin] = {}
        self.states_shardings = False
        self.ignored_constraints = 0  # `with_sharding_constraint` of the user's: the plan's specs take their place
        self.opened: dict[str, int] = {}  # calls whose name or metadata the compiler will not see, by their names
        self.scopes = 0
        self.blocks: list[Block] = []
        self._avals: dict[Any, Aval] = {}
        self._views: dict[Any, tuple[OpView, OpRule, bool]] = {}
        self.bounds: dict[int, Bounds] = {}  # least and largest value of integer values, where anything is known

    # values

    def aval(self, jax_aval: Any) -> Aval:
        """jax's abstract value as ours; tokens and the like are scalars."""
        key = (getattr(jax_aval, "shape", ()), str(getattr(jax_aval, "dtype", "token")))
        found = self._avals.get(key)
        if found is None:
            shape = tuple(int(d) for d in key[0])
            found = self._avals[key] = Aval(shape, key[1], _itemsize(jax_aval))
        return found

    def new_value(self, aval: Aval, **about: Any) -> int:
        """The id of a new value; `about` are further fields of `Value`."""
        self.values.append(Value(aval, **about))
        return len(self.values) - 1

    def constant(self, array: Any) -> Atom:
        """A closed-over array as a constant value; a plain scalar as a literal."""
        if np.ndim(array) == 0 and not hasattr(array, "aval"):
            return np.asarray(array)
        aval = Aval(tuple(np.shape(array)), str(array.dtype), _itemsize(array))
        return self.new_value(aval, constant=True)

    # operations

    def add(
        self, key: Key, primitive: str, atoms: Sequence[Atom], out_avals: Sequence[Aval], params: Mapping[str, Any],
        region: int, scope: int, eqn: Any = None,
    ) -> tuple[int, ...]:
        """A new operation with new values for its results; returns these. `eqn`: where source and stack come from."""
        view, rule, ruled = self._view(primitive, atoms, tuple(out_avals), params)
        index = len(self.ops)
        results = tuple(self.new_value(a, op=index) for a in out_avals)
        operands = tuple(a if isinstance(a, int) else None for a in atoms)
        if any(a.dtype == "bool" or "int" in a.dtype for a in out_avals):
            known = result_bounds(replace(view, bounds=self._bounds(atoms)))
            self.bounds.update((v, b) for v, b in zip(results, known, strict=True) if b is not None)
        self.ops.append(Op(
            index=index, key=key, primitive=primitive, operands=operands, results=results, view=view, rule=rule,
            region=region, scope=scope, count=runs_of(self.regions, region), ruled=ruled,
            source=_jax.source_line(eqn) if eqn is not None else "",
            stack=_jax.name_stack(eqn) if eqn is not None else "",
        ))
        return results

    def _view(
        self, primitive: str, atoms: Sequence[Atom], outs: tuple[Aval, ...], params: Mapping[str, Any]
    ) -> tuple[OpView, OpRule, bool]:
        ins = tuple(self.values[a].aval if isinstance(a, int) else _literal_aval(a) for a in atoms)
        constants = tuple(None if isinstance(a, int) else a for a in atoms)
        # scalars of literals do not change a rule, except as indices: keep integers in the key
        ints = tuple(None if c is None or c.dtype.kind not in "iu" else c.tobytes() for c in constants)
        bounds = self._bounds(atoms) if primitive == "dynamic_update_slice" else ()  # alone asks for a position's range
        key: Any = (primitive, ins, outs, ints, _params_key(params), bounds)
        found = self._views.get(key)
        if found is None:
            view = OpView(primitive, ins, outs, dict(params), constants, bounds)
            found = self._views[key] = (view, *self.rule_for(view))
        return found

    def _bounds(self, atoms: Sequence[Atom]) -> tuple[Bounds | None, ...]:
        return tuple(self.bounds.get(a) if isinstance(a, int) else None for a in atoms)

    # the walk

    def walk(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Atom], prefix: Key, region: int, scope: int
    ) -> list[Atom]:
        """Values of the jaxpr's results, given those of its arguments."""
        env: dict[Any, Atom] = {}
        env.update(zip(jaxpr.constvars, (self.constant(c) for c in consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Atom:
            if isinstance(atom, _jax.Literal):
                return _literal(atom)
            return env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            outs = self.equation(eqn, [read(a) for a in eqn.invars], (*prefix, i), region, scope)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: Any, atoms: list[Atom], key: Key, region: int, scope: int) -> Sequence[Atom]:
        """Add what one equation does: calls opened in place, loops and branches as regions; returns its results."""
        body = _jax.call_body(eqn)
        if body is None and _jax.is_remat(eqn):
            if (region, scope) == (0, 0):
                self.blocks.append(Block(key, tuple(a if isinstance(a, int) else None for a in atoms)))
            body, self.scopes = eqn.params["jaxpr"], self.scopes + 1
            scope = self.scopes
        if body is not None:
            inner, consts = _jax.open_jaxpr(body)
            if eqn.primitive.name in _jax.TOLD_CALLS:
                name = _jax.told_name(eqn)
                self.opened[name] = self.opened.get(name, 0) + 1
            return self.walk(inner, consts, _jax.call_operands(eqn, atoms), key, region, scope)
        opener = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(eqn.primitive.name)
        if opener is not None:
            return opener(eqn, atoms, key, region, scope)
        outs = [self.aval(v.aval) for v in eqn.outvars]
        pin = self._stated(eqn)
        if pin is not None and _jax_pins.only_moves(eqn) and isinstance(atoms[0], int):
            results = self.add(key, PIN, atoms, outs, {}, region, scope, eqn)
            self.pins[results[0]] = pin
            return results
        results = self.add(key, eqn.primitive.name, atoms, outs, eqn.params, region, scope, eqn)
        return self._annotated(eqn, results, pin, key, region, scope)

    def _stated(self, eqn: Any) -> Pin | None:
        """The pin that the equation states for its first result, where it is one to follow."""
        stated = _jax_pins.stated_sharding(eqn)
        self.states_shardings |= stated is not None or _jax_pins.only_moves(eqn)
        if stated is None:
            self.ignored_constraints += _jax.constraint_sharding(eqn) is not None
            return None
        if not self.follow:
            self.ignored_constraints += 1
            return None
        aval = self.aval(eqn.outvars[0].aval)
        where = f"{stated[0]} at {_jax.source_line(eqn) or 'an unknown line'}"
        return pin_of_sharding(stated[1], len(aval.shape), where) if aval.size > 1 else None

    def _annotated(
        self, eqn: Any, results: tuple[int, ...], pin: Pin | None, key: Key, region: int, scope: int
    ) -> tuple[int, ...]:
        """The results with the names and the pin that the user wrote on the first; below the key: (-4, 0) for a pin."""
        name = _jax.user_name(eqn)
        dims = tagged_names(name) if name is not None else None
        aval = self.values[results[0]].aval if results else None
        if aval is not None and aval.size > 1 and (pin is not None or (dims is not None and self.cut_names)):
            results = (*self.add((*key, -4, 0), PIN, [results[0]], [aval], {}, region, scope, eqn), *results[1:])
        if pin is not None:
            self.pins[results[0]] = pin
        if dims is not None:
            self.names[results[0]] = dims
        return results

    def enter(self, kind: str, trips: float, region: int, key: Key, known: bool = True) -> int:
        """The number of a new region inside `region`."""
        self.regions.append(Region(kind, trips, region, key, known))
        return len(self.regions) - 1

    def carry(self, inits: Sequence[Atom], key: Key, region: int) -> list[int]:
        """Carry-in values; their loop-back operand is filled in by `close`."""
        ids = []
        for k, init in enumerate(inits):
            aval = self.values[init].aval if isinstance(init, int) else _literal_aval(init)
            ids += self.add((*key, -1, k), CARRY, [init], [aval], {}, region, 0)
        return ids

    def close(self, carries: Sequence[int], outs: Sequence[Atom]) -> None:
        """Tell the carries what comes back to them at the end of the body."""
        for value, out in zip(carries, outs, strict=True):
            op = self.ops[self.values[value].op]
            back = out if isinstance(out, int) else None
            self.ops[op.index] = replace(op, operands=(*op.operands, back))

    def scan(self, eqn: Any, atoms: list[Atom], key: Key, region: int, scope: int) -> Sequence[Atom]:
        """A region with a carry per carried value, a slice per scanned operand, a stack per stacked result.

        Keys below the equation's: (-1, k) carries, (-2, k) slices, (-3, k) stacks; lower/ finds them by these.
        """
        n_consts, n_carry = _jax.scan_counts(eqn.params)
        body, consts = _jax.open_jaxpr(eqn.params["jaxpr"])
        length = int(eqn.params["length"])
        inner = self.enter("scan", length, region, key)
        carries = self.carry(atoms[n_consts : n_consts + n_carry], key, inner)
        slices: list[Atom] = []
        for k, stacked in enumerate(atoms[n_consts + n_carry :]):
            aval = self.aval(body.invars[n_consts + n_carry + k].aval)
            slices += self.add((*key, -2, k), SLICE, [stacked], [aval], {}, inner, scope, eqn)
            if isinstance(stacked, int) and stacked in self.bounds:
                self.bounds[slices[-1]] = self.bounds[stacked]  # type: ignore[index]
        counters = _counters(body, atoms[n_consts : n_consts + n_carry], n_consts, length)
        self.bounds.update((carries[k], inside) for k, (inside, _) in counters.items())
        outs = self.walk(body, consts, [*atoms[:n_consts], *carries, *slices], key, inner, scope)
        self.bounds.update((carries[k], after) for k, (_, after) in counters.items())
        self.close(carries, outs[:n_carry])
        stacks = []
        for k, out in enumerate(outs[n_carry:]):
            aval = self.aval(eqn.outvars[n_carry + k].aval)
            stacks += self.add((*key, -3, k), STACK, [out], [aval], {}, inner, scope, eqn)
        return [*carries, *stacks]

    def while_loop(self, eqn: Any, atoms: list[Atom], key: Key, region: int, scope: int) -> Sequence[Atom]:
        """A region of the trips that can be read off the loop, else one. Keys: (-1, k) carries, 0 condition, 1 body."""
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, cond_consts = _jax.open_jaxpr(eqn.params["cond_jaxpr"])
        body, body_consts = _jax.open_jaxpr(eqn.params["body_jaxpr"])
        inits = atoms[n_cond + n_body :]
        trips = _trip_count(cond, body, inits, n_cond, n_body)
        inner = self.enter("while", 1.0 if trips is None else trips, region, key, known=trips is not None)
        carries = self.carry(inits, key, inner)
        self.walk(cond, cond_consts, [*atoms[:n_cond], *carries], (*key, 0), inner, scope)
        counters = _counters(body, inits, n_body, trips)
        self.bounds.update((carries[k], inside) for k, (inside, _) in counters.items())
        outs = self.walk(body, body_consts, [*atoms[n_cond : n_cond + n_body], *carries], (*key, 1), inner, scope)
        self.bounds.update((carries[k], after) for k, (_, after) in counters.items())
        self.close(carries, outs)
        return carries

    def cond(self, eqn: Any, atoms: list[Atom], key: Key, region: int, scope: int) -> Sequence[Atom]:
        """A region per branch, priced as if all ran; results merge outside. Keys: (b,) branch b, (-3, k) merges."""
        branches = []
        for b, branch in enumerate(eqn.params["branches"]):
            inner = self.enter("branch", 1.0, region, key)
            jaxpr, consts = _jax.open_jaxpr(branch)
            branches.append(self.walk(jaxpr, consts, atoms[1:], (*key, b), inner, scope))
        results: list[Atom] = []
        for k, outs in enumerate(zip(*branches, strict=True)):
            aval = self.aval(eqn.outvars[k].aval)
            results += self.add((*key, -3, k), MERGE, list(outs), [aval], {}, region, scope, eqn)
        return results


def _itemsize(aval: Any) -> int:
    try:
        return int(np.dtype(aval.dtype).itemsize)
    except TypeError:  # extended dtypes (typed random keys)
        return int(getattr(aval.dtype, "itemsize", 8))


def _literal(atom: Any) -> Atom:
    return np.asarray(atom.val)


def _literal_aval(array: Any) -> Aval:
    return Aval(tuple(np.shape(array)), str(array.dtype), int(array.dtype.itemsize))


def _params_key(params: Mapping[str, Any]) -> Any:
    entries = []
    for k in sorted(params):
        v = params[k]
        try:
            hash(v)
        except TypeError:
            v = repr(v)
        entries.append((k, v))
    return tuple(entries)


def _counters(body: Any, inits: Sequence[Atom], before: int, trips: float | None) -> dict[int, tuple[Bounds, Bounds]]:
    """Carries that start at a literal and grow by one: their bounds in the body, and with the value after the loop.

    `before`: operands of the body before its carries. Without a known number of trips none is bounded.
    """
    found = {}
    made = {eqn.outvars[0]: eqn for eqn in body.eqns if eqn.primitive.name == "add"}
    for k, init in enumerate(inits):
        eqn = None if isinstance(body.outvars[k], _jax.Literal) else made.get(body.outvars[k])
        if trips is None or isinstance(init, int) or init.dtype.kind not in "iu" or init.ndim or eqn is None:
            continue
        step = eqn.invars[1]
        if eqn.invars[0] is body.invars[before + k] and isinstance(step, _jax.Literal) and step.val == 1:
            first, last = int(init), int(init) + int(trips)
            found[k] = (first, max(first, last - 1)), (first, last)
    return found


def _trip_count(cond: Any, body: Any, inits: Sequence[Atom], n_cond: int, n_body: int) -> float | None:
    """Trips of `fori_loop`'s shape: i from a literal, `lt i n` with a literal n, `add i step`."""
    if not cond.eqns or cond.eqns[-1].primitive.name != "lt":
        return None
    left, right = cond.eqns[-1].invars
    if cond.eqns[-1].outvars[0] is not cond.outvars[0] or not isinstance(right, _jax.Literal):
        return None
    carried = list(cond.invars[n_cond:])
    if left not in carried:
        return None
    k = carried.index(left)
    start, out, counter = inits[k], body.outvars[k], body.invars[n_body + k]
    for eqn in body.eqns:
        if eqn.primitive.name == "add" and eqn.outvars[0] is out and eqn.invars[0] is counter:
            step = eqn.invars[1]
            if isinstance(step, _jax.Literal) and not isinstance(start, int) and step.val > 0:
                return float(max(0, math.ceil((right.val - start.item()) / step.val)))
    return None
