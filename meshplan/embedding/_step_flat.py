"""A traced step as one list of equations, calls opened, and what depends on what in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshplan.core import _jax

Atom = Any  # the number of a value, or a literal
_SAME = frozenset({"name", "convert_element_type", "copy", "copy_p", "sharding_constraint", "optimization_barrier"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One equation: numbers of the values that it reads (or literals) and makes."""

    eqn: Any
    ins: tuple[Atom, ...]
    outs: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(a for a in self.ins if isinstance(a, int))


@dataclass(slots=True, kw_only=True)
class Flat:
    """`lines` in the order of the step; `avals` of every value; `constants` closed over; results may be literals."""

    lines: list[Line] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    outputs: tuple[Atom, ...] = ()
    maker: dict[int, int] = field(default_factory=dict)

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(self.avals[atom].shape) if isinstance(atom, int) else tuple(atom.aval.shape)

    def made_by(self, atom: Atom) -> Line | None:
        """The line that makes a value, those that leave it as it is passed over; None for inputs and literals."""
        while isinstance(atom, int) and atom in self.maker:
            line = self.lines[self.maker[atom]]
            if line.name not in _SAME or len(line.outs) > 1:
                return line
            atom = line.ins[0]
        return None

    def root(self, atom: Atom) -> Atom:
        """The value that another is but a copy, a cast or another name of."""
        while isinstance(atom, int) and atom in self.maker:
            line = self.lines[self.maker[atom]]
            if line.name not in _SAME or len(line.outs) > 1:
                break
            atom = line.ins[0]
        return atom

    def readers(self) -> dict[int, list[Line]]:
        """Lines by the values that they read, through lines that leave a value as it is."""
        found: dict[int, list[Line]] = {}
        for line in self.lines:
            if line.name in _SAME and len(line.outs) == 1:
                continue
            for value in {r for a in line.reads if isinstance(r := self.root(a), int)}:
                found.setdefault(value, []).append(line)
        return found

    def needed(self, results: Iterable[Atom], given: Iterable[int]) -> tuple[list[int], set[int]]:
        """(numbers of the lines, the values read) that the results are made from, where `given` values are at hand."""
        held, lines, read = set(given), set(), set()
        todo = [a for a in results if isinstance(a, int)]
        while todo:
            value = todo.pop()
            if value in read:
                continue
            read.add(value)
            number = self.maker.get(value)
            if value in held or number is None or number in lines:
                continue
            lines.add(number)
            todo += self.lines[number].reads
        return sorted(lines), read

    def run(self, lines: Sequence[int], known: Mapping[int, Any]) -> dict[int, Any]:
        """Values after these lines, from those known; a known value is not made again."""
        env = {**self.constants, **known}

        def read(atom: Atom) -> Any:
            return env[atom] if isinstance(atom, int) else atom.val

        for number in lines:
            line = self.lines[number]
            made = _jax.bind(line.eqn, [read(a) for a in line.ins], {})
            for value, result in zip(line.outs, made, strict=True):
                env.setdefault(value, result)
        return env


def flatten(closed: Any, shapes: Iterable[tuple[int, ...]]) -> Flat:
    """The lines of a closed jaxpr. Rematerialised blocks are opened where they touch an array of one of the shapes."""
    flat, wanted = Flat(), set(shapes)

    def walk(body: Any, args: Sequence[Atom]) -> list[Atom]:
        jaxpr, consts = _jax.open_jaxpr(body)
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = flat.value(var.aval)
            flat.constants[env[var]] = const

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [read(a) for a in eqn.invars]
            inner = _jax.call_body(eqn)
            if inner is None and _jax.is_remat(eqn) and _touches(eqn, wanted):
                inner = eqn.params["jaxpr"]
            if inner is not None:
                env.update(zip(eqn.outvars, walk(inner, _jax.call_operands(eqn, ins)), strict=True))
                continue
            outs = tuple(flat.value(v.aval) for v in eqn.outvars)
            flat.maker.update(dict.fromkeys(outs, len(flat.lines)))
            flat.lines.append(Line(eqn=eqn, ins=tuple(ins), outs=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    jaxpr, _ = _jax.open_jaxpr(closed)
    flat.inputs = tuple(flat.value(v.aval) for v in jaxpr.invars)
    flat.outputs = tuple(walk(closed, flat.inputs))
    return flat


def _touches(eqn: Any, shapes: set[tuple[int, ...]]) -> bool:
    return any(tuple(getattr(v.aval, "shape", ())) in shapes for v in (*eqn.invars, *eqn.outvars))
