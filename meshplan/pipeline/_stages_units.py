"""A plain loss function as a row of units: its equations with calls opened and loops over stacked layers unrolled.

A value that depends on both the parameters and the batch is an activation: it is computed once and crosses from part
to part. Everything else (casts of weights, masks, positions) is computed again wherever it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshplan.core import ArgumentError, TraceError, _jax

OPENED = frozenset({"jit", "pjit", "closed_call", "core_call", "call"})
Atom = Any  # an int, the id of a value, or a constant array


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Trip `index` of a scan over stacked parameters: `xs` are the ids of what is stacked, `consts` and `carry` how
    many operands come before them."""

    scan: int
    index: int
    xs: tuple[int, ...]
    consts: int
    carry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One equation, or one trip of a scan: values `ins` to values `outs`; `flops` of one run.

    A trip's `ins` are the constants and the carry. Without an equation a unit stacks its operands (`stack`), or hands
    its operand on.
    """

    ins: tuple[Atom, ...]
    outs: tuple[int, ...]
    eqn: Any = None
    trip: Trip | None = None
    stack: bool = False
    flops: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """The units of a loss in order. Values 0 .. leaves - 1 are the parameters, the next `batch_leaves` the batch.

    `avals[id]`; `active[id]`: depends on parameters and batch; `results`: the loss and then what else it returns.
    """

    units: tuple[Unit, ...]
    avals: tuple[Any, ...]
    active: tuple[bool, ...]
    leaves: int
    batch_leaves: int
    results: tuple[Atom, ...]
    names: tuple[str, ...]
    params_tree: Any
    batch_tree: Any
    aux_tree: Any


def trace_units(loss: Callable[..., Any], params: Any, batch: Any, has_aux: bool = False) -> Traced:
    """The units of `loss(params, batch)`, traced at the shapes given.

    Raises TraceError where it does not trace, and ArgumentError where it does not give a real scalar or a parameter
    is no real array.
    """
    shapes = jax.tree.map(_shape, (params, batch))
    try:
        closed, out = jax.make_jaxpr(loss, return_shape=True)(*shapes)
    except Exception as error:
        raise TraceError(f"the loss does not trace on one micro-batch: {error}") from error
    value, aux = out if has_aux and isinstance(out, tuple) and len(out) == 2 else (out, None)
    if getattr(value, "shape", None) != () or not jnp.issubdtype(getattr(value, "dtype", int), jnp.floating):
        raise ArgumentError(
            f"the loss gives {value} and has to give one real number{' and what goes with it' if has_aux else ''}; "
            "return the mean over the micro-batch, and give has_aux=True where more than that is returned."
        )
    leaves, params_tree = jax.tree_util.tree_flatten_with_path(shapes[0])
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ArgumentError(
                f"params{jax.tree_util.keystr(path)} is {leaf.dtype} and has no gradient; pass it with the batch."
            )
    batch_leaves, batch_tree = jax.tree.flatten(shapes[1])
    walker = _Walker(len(leaves), len(batch_leaves))
    jaxpr, consts = _jax.open_jaxpr(closed)
    ids = [walker.new(v.aval, uses) for v, uses in zip(jaxpr.invars, walker.given(), strict=True)]
    results = walker.walk(jaxpr, consts, ids)
    return Traced(
        units=tuple(walker.units), avals=tuple(walker.avals), active=tuple(all(uses) for uses in walker.uses),
        leaves=len(leaves), batch_leaves=len(batch_leaves), results=tuple(results),
        names=tuple("params" + jax.tree_util.keystr(path) for path, _ in leaves), params_tree=params_tree,
        batch_tree=batch_tree, aux_tree=jax.tree.structure(aux),
    )


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))


class _Walker:
    """Collects units while it walks nested jaxprs. `uses[id]`: (of a parameter, of the batch)."""

    def __init__(self, leaves: int, batch_leaves: int) -> None:
        self.units: list[Unit] = []
        self.avals: list[Any] = []
        self.uses: list[tuple[bool, bool]] = []
        self.leaves, self.batch_leaves = leaves, batch_leaves
        self.scans = 0

    def given(self) -> list[tuple[bool, bool]]:
        return [(True, False)] * self.leaves + [(False, True)] * self.batch_leaves

    def new(self, aval: Any, uses: tuple[bool, bool]) -> int:
        self.avals.append(_jax.abstract(aval))
        self.uses.append(uses)
        return len(self.avals) - 1

    def walk(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Atom]) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Atom:
            return _constant(atom.val) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(a) for a in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, atoms: list[Atom]) -> Sequence[Atom]:
        if eqn.primitive.name in OPENED:
            inner, consts = _jax.open_jaxpr(_jax.call_body(eqn))
            return self.walk(inner, consts, atoms)
        if eqn.primitive.name == "scan" and self._over_layers(eqn, atoms):
            return self._scan(eqn, atoms)
        flops = eqn_flops(eqn)
        return self.add(atoms, [v.aval for v in eqn.outvars], eqn=eqn, flops=flops, source=_jax.source_line(eqn))

    def add(self, atoms: Sequence[Atom], outs: Sequence[Any], also: Sequence[int] = (), **about: Any) -> list[int]:
        """A new unit; `also`: further values that it reads."""
        reads = [self.uses[a] for a in (*atoms, *also) if isinstance(a, int)]
        uses = (any(u[0] for u in reads), any(u[1] for u in reads))
        ids = [self.new(aval, uses) for aval in outs]
        self.units.append(Unit(ins=tuple(atoms), outs=tuple(ids), **about))
        return ids

    def _over_layers(self, eqn: Any, atoms: Sequence[Atom]) -> bool:
        """Whether the scan runs over stacked parameters and hands something on from trip to trip."""
        consts, carry = _jax.scan_counts(eqn.params)
        xs = atoms[consts + carry :]
        return carry > 0 and any(isinstance(x, int) and self.uses[x] == (True, False) for x in xs)

    def _scan(self, eqn: Any, atoms: list[Atom]) -> list[Atom]:
        consts, carry = _jax.scan_counts(eqn.params)
        fixed, state, xs = atoms[:consts], atoms[consts : consts + carry], atoms[consts + carry :]
        length, number = eqn.params["length"], self.scans
        self.scans += 1
        body, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
        flops = sum(eqn_flops(inner) for inner in body.eqns)
        # What is stacked and no parameter (a constant, the batch's) is one more value that trips take a row of.
        stacked = [x if isinstance(x, int) else self.add([x], [jax.typeof(x)])[0] for x in xs]
        outs = [v.aval for v in body.outvars]
        rows: list[list[int]] = []
        order = range(length)[:: -1 if eqn.params.get("reverse") else 1]
        for index in order:
            trip = Trip(scan=number, index=index, xs=tuple(stacked), consts=consts, carry=carry)
            found = self.add(
                [*fixed, *state], outs, stacked, eqn=eqn, trip=trip, flops=flops, source=_jax.source_line(eqn)
            )
            state = found[:carry]
            rows.append(found[carry:])
        if eqn.params.get("reverse"):
            rows.reverse()
        whole = [v.aval for v in eqn.outvars[carry:]]
        return [*state, *(self.add([r[k] for r in rows], [aval], stack=True)[0] for k, aval in enumerate(whole))]


def _constant(value: Any) -> Atom:
    """A constant as an array, so that no integer is taken for a value's id."""
    return value if hasattr(value, "dtype") else np.asarray(value)


def eqn_flops(eqn: Any) -> float:
    """Floating-point operations of one equation: products and convolutions exactly, of all else one an element."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contract)
    if name == "conv_general_dilated":
        kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(out) * math.prod(kernel) / max(features, 1)
    inner = [_jax.open_jaxpr(body)[0] for body in inner_jaxprs(eqn)]
    if inner:
        trips = eqn.params.get("length", 1) if name == "scan" else 1
        each = [sum(eqn_flops(e) for e in body.eqns) for body in inner]
        return float(trips * (max(each) if name == "cond" else sum(each)))
    return float(sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars))


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The bodies that an equation runs (a custom derivative's own rules left out)."""
    found = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns") or hasattr(getattr(each, "jaxpr", None), "eqns"):
                found.append(each)
    return found
