"""Random programs while they are written: variables, lines, and a writer that keeps the values at hand."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)
MOST_ENTRIES, MOST_DIMS = 3072, 5

PRELUDE = '''\
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

TABLE = np.linspace(-1, 1, 24 * 24, dtype=np.float32).reshape(24, 24)


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda p, t: (soft(p[0]), t[0] * jax.nn.sigmoid(p[0])))


@jax.custom_vjp
def bounded(x):
    return jnp.sin(x)


bounded.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


@jax.custom_vjp
def product(a, b):
    return a @ b


def product_back(saved, g):
    a, b = saved
    return g @ b.T, a.reshape(-1, a.shape[-1]).T @ g.reshape(-1, g.shape[-1])


product.defvjp(lambda a, b: (a @ b, (a, b)), product_back)


def through(x):
    return x + lax.stop_gradient(jnp.tanh(x) - x)
'''


class Skip(Exception):
    """No value at hand suits the line that was to be written."""


@dataclass(frozen=True, slots=True)
class Var:
    """One variable. Integers are in [0, bound). `exact`: bit for bit the same however the program is cut."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    bound: int = 0
    exact: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        return self.dtype in ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Body:
    """A function in front of a line. `takes` are its parameters, which `head` unpacks; `gives` what `tail` returns."""

    head: str
    takes: tuple[Var, ...]
    lines: tuple[Line, ...]
    gives: tuple[Var, ...]
    tail: str


@dataclass(frozen=True, slots=True)
class Line:
    """One statement, or a few with functions of their own in front."""

    text: str
    makes: tuple[Var, ...]
    reads: tuple[Var, ...]
    bodies: tuple[Body, ...] = ()


def free_variables(lines: Iterable[Line], known: Iterable[str] = ()) -> dict[str, Var]:
    """Variables that lines read and none of them makes: the arguments of a program, in the order of their use."""
    made = set(known)
    found: dict[str, Var] = {}
    for line in lines:
        for body in line.bodies:
            inner = free_variables(body.lines, [*made, *(v.name for v in body.takes)])
            given = {v.name: v for v in body.gives}
            defined = {v.name for x in body.lines for v in x.makes} | {v.name for v in body.takes} | made
            found |= inner | {n: v for n, v in given.items() if n not in defined}
        found |= {v.name: v for v in line.reads if v.name not in made}
        made |= {v.name for v in line.makes}
    return found


def count(lines: Iterable[Line]) -> int:
    """Operations as written, those of bodies included."""
    return sum(1 + sum(count(body.lines) for body in line.bodies) for line in lines)


@functools.cache
def namespace() -> dict[str, Any]:
    """What the lines may use."""
    names: dict[str, Any] = {}
    exec(compile(PRELUDE, "<prelude>", "exec"), names)
    return names


@dataclass
class Writer:
    """Writes lines. `inside`: in a function, where no arguments are added and large operations are out of place;
    `halves`: 16-bit floats are allowed."""

    rng: random.Random
    halves: bool = False
    inside: bool = False
    pool: list[Var] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    # drawing

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def below(self, n: int) -> int:
        return self.rng.randrange(n)

    def choice(self, options: Sequence[T]) -> T:
        if not options:
            raise Skip
        return options[self.rng.randrange(len(options))]

    def size(self) -> int:
        """The size of a dim, more often one that meshes of eight divide."""
        return self.choice((*SIZES, 8, 8, 16))

    def shuffled(self, items: Iterable[int]) -> tuple[int, ...]:
        found = list(items)
        self.rng.shuffle(found)
        return tuple(found)

    def axis(self, x: Var) -> int:
        return self.below(len(x.shape))

    def axes(self, x: Var) -> tuple[int, ...]:
        """Some axes, at least one."""
        return tuple(sorted(self.shuffled(range(len(x.shape)))[: 1 + self.below(len(x.shape))]))

    # values

    def pick(self, suits: Callable[[Var], object]) -> Var:
        """A variable, more likely a recent one."""
        found = [v for v in self.pool if suits(v)]
        return self.choice(found[-6:] if self.chance(0.7) else found)

    def float(self, suits: Callable[[Var], object] = lambda v: True) -> Var:
        return self.pick(lambda v: v.floating and suits(v))

    def index(
        self, n: int, suits: Callable[[Var], object] = lambda v: True, shape: tuple[int, ...] | None = None
    ) -> Var:
        """Integers below `n`: at hand, made from some, or an argument."""
        found = [v for v in self.pool if 0 < v.bound <= n and v.size <= 64 and suits(v)]
        if found and self.chance(0.6):
            return self.choice(found[-4:])
        larger = [v for v in self.pool if v.bound > n and v.size <= 64 and suits(v)]
        if larger:
            v = self.choice(larger[-4:])
            return self.emit(f"{v} % {n}", v, bound=n, exact=v.exact)
        if shape is None:
            shape = self.choice(((self.size(),), (self.size(),), (self.choice((2, 4)), self.choice((2, 3, 4)))))
        return self.argument(shape, bound=n)

    def zero(self, x: Var) -> str:
        kind = {"float32": "float32", "bfloat16": "bfloat16", "int32": "int32", "bool": "bool_"}[x.dtype]
        return f"jnp.{kind}(0)"

    def name(self) -> str:
        return f"v{next(self.numbers)}"

    def argument(self, shape: tuple[int, ...], bound: int = 0, dtype: str = "") -> Var:
        if self.inside or math.prod(shape) > MOST_ENTRIES or len(shape) > MOST_DIMS:
            raise Skip
        v = Var(self.name(), tuple(shape), dtype or ("int32" if bound else "float32"), bound, True)
        self.pool.append(v)
        return v

    # lines

    def emit(self, text: str, *reads: Var, bound: int = 0, exact: bool = False) -> Var:
        """A line `name = text`; its shape is what jax says."""
        return self.emit_many(text, (bound,), *reads, exact=exact)[0]

    def emit_many(self, text: str, bounds: Sequence[int], *reads: Var, exact: bool = False) -> list[Var]:
        """A line that makes one variable per bound."""
        reads = tuple({v.name: v for v in reads}.values())
        outs = jax.tree.leaves(infer(text, reads))
        assert len(outs) == len(bounds), text
        for o in outs:
            if math.prod(o.shape) > MOST_ENTRIES or len(o.shape) > MOST_DIMS or not math.prod(o.shape):
                raise Skip
        made = [
            Var(self.name(), o.shape, str(o.dtype), bound if str(o.dtype) == "int32" else 0, exact)
            for o, bound in zip(outs, bounds, strict=True)
        ]
        assert all(v.dtype in ("float32", "bfloat16", "int32", "bool") for v in made), (text, made)
        self.add(Line(f"{', '.join(v.name for v in made)} = {text}", tuple(made), reads))
        return made

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self.pool += line.makes

    def inner(self, takes: Sequence[Var], closed: Sequence[Var] = ()) -> Writer:
        """The writer of a function's body: it sees the parameters and what it closes over."""
        return Writer(self.rng, self.halves, True, [*closed, *takes], [], self.numbers)


def infer(text: str, reads: Sequence[Var]) -> Any:
    """Shapes and dtypes of an expression."""
    names = ", ".join(v.name for v in reads)
    fn = eval(f"lambda {names}: {text}", namespace())
    return jax.eval_shape(fn, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in reads))
