"""Lines of random programs that have functions in front: loops, branches, rematerialised and batched functions."""

from __future__ import annotations

from collections.abc import Sequence

from tests._fuzz_ops import LARGE, SIMPLE, Emitter
from tests._fuzz_writer import Body, Line, Skip, Var, Writer, count

INNER = (2, 6)  # lines of a body, from and to
DEEPEST = 2


def write(w: Writer, target: int, table: Sequence[tuple[Emitter, int]]) -> None:
    """Add lines until there are `target` operations, as far as the values at hand allow."""
    emitters, weights = zip(*table, strict=True)
    for _ in range(20 * target):
        if count(w.lines) >= target:
            return
        try:
            w.rng.choices(emitters, weights)[0](w)
        except Skip:
            continue


def body(w: Writer, inner: Writer, depth: int) -> None:
    table = [*SIMPLE, *(nesting(depth + 1) if depth < DEEPEST else ())]
    write(inner, w.rng.randrange(*INNER), table)


def names(variables: Sequence[Var]) -> str:
    """`a, b,`: a tuple in any context."""
    return "".join(f"{v}, " for v in variables).rstrip()


def parameter(w: Writer, v: Var, shape: tuple[int, ...] | None = None) -> Var:
    """The parameter that `v`, or a piece of it, becomes in a function."""
    return Var(w.name(), v.shape if shape is None else shape, v.dtype, v.bound, v.exact)


def closures(w: Writer, most: int = 2) -> list[Var]:
    return [w.choice(w.pool) for _ in range(w.below(most + 1))] if w.pool else []


def like(inner: Writer, v: Var) -> Var:
    """A value of the shape of `v` that the body makes."""
    made = [u for line in inner.lines for u in line.makes if u.shape == v.shape and u.dtype == v.dtype]
    if made and inner.chance(0.7):
        return made[-1]
    if inner.chance(0.1):
        return v
    u = inner.float()
    return inner.emit(f"jnp.tanh(0.7 * {v} + 0.3 * jnp.mean({u})).astype(jnp.{v.dtype})", v, u)


def some(w: Writer, least: int, most: int, **limits: int) -> list[Var]:
    """Different 32-bit float variables of no more than a few entries."""
    found = [v for v in w.pool if v.dtype == "float32" and v.size <= limits.get("size", 512)]
    if len(found) < least:
        raise Skip
    k = min(len(found), least + w.below(most - least + 1))
    return [found[i] for i in w.shuffled(range(len(found)))[:k]]


def results(inner: Writer, most: int) -> list[Var]:
    """Some of the values that the body makes."""
    made = [v for line in inner.lines for v in line.makes]
    if not made:
        raise Skip
    return made[-1 - inner.below(most) :]


def scanned(w: Writer, depth: int) -> None:
    """Carries, scanned operands (or none), stacked results; closures are constants of the loop."""
    lead = w.pick(lambda v: v.shape and 1 <= v.shape[0] <= 8)
    n = lead.shape[0]
    rows = [v for v in w.pool if v.shape and v.shape[0] == n and v.name != lead.name]
    xs = ([lead] if w.chance(0.9) else []) + ([w.choice(rows)] if rows and w.chance(0.4) else [])
    inits = some(w, 1, 2) if w.chance(0.85) else []
    carries, pieces = [parameter(w, v) for v in inits], [parameter(w, v, v.shape[1:]) for v in xs]
    carries = [Var(c.name, c.shape, c.dtype) for c in carries]
    inner = w.inner([*carries, *pieces], closures(w))
    body(w, inner, depth)
    back = [like(inner, c) for c in carries]
    stacked = [v for v in results(inner, 2) if v.size * n <= 2048 and len(v.shape) < 4]
    if not back and not stacked:
        raise Skip
    fn = f"body{next(w.numbers)}"
    finals = [parameter(w, c) for c in carries]
    stacks = [Var(w.name(), (n, *v.shape), v.dtype, v.bound, False) for v in stacked]
    end = w.choice(("", ", reverse=True", ", unroll=2" if n % 2 == 0 else ""))
    w.add(Line(
        f"({names(finals)}), ({names(stacks)}) = lax.scan({fn}, ({names(inits)}), ({names(xs)}), length={n}{end})",
        (*finals, *stacks), tuple({v.name: v for v in (*inits, *xs)}.values()),
        (Body(
            f"def {fn}(carry, x):\n    ({names(carries)}), ({names(pieces)}) = carry, x", (*carries, *pieces),
            tuple(inner.lines), (*back, *stacked), f"return ({names(back)}), ({names(stacked)})",
        ),),
    ))  # fmt: skip


def counted(w: Writer, depth: int) -> None:
    """`fori_loop`; the counter may index."""
    inits = some(w, 1, 2)
    trips = w.choice((1, 2, 3, 5))
    counter = Var(w.name(), (), "int32", trips, True)
    carries = [Var(w.name(), v.shape, v.dtype) for v in inits]
    inner = w.inner([*carries, counter], closures(w))
    body(w, inner, depth)
    back = [like(inner, c) for c in carries]
    fn, finals = f"body{next(w.numbers)}", [parameter(w, c) for c in carries]
    w.add(Line(
        f"({names(finals)}) = lax.fori_loop(0, {trips}, {fn}, ({names(inits)}))", tuple(finals), tuple(inits),
        (Body(
            f"def {fn}({counter}, carry):\n    ({names(carries)}) = carry", (*carries, counter), tuple(inner.lines),
            tuple(back), f"return ({names(back)})",
        ),),
    ))  # fmt: skip


def looped(w: Writer, depth: int) -> None:
    """`while_loop`, which has no gradient: nothing differentiable enters."""
    inits = some(w, 1, 2)
    limit = w.choice((1, 2, 4))
    counter = Var(w.name(), (), "int32", limit, True)
    carries = [Var(w.name(), v.shape, v.dtype) for v in inits]
    inner = w.inner([*carries, counter])
    body(w, inner, depth)
    back = [like(inner, c) for c in carries]
    fn, test, finals = f"body{next(w.numbers)}", f"more{next(w.numbers)}", [parameter(w, c) for c in carries]
    end = w.choice((f"return {counter} < {limit}", f"return ({counter} < {limit}) & (jnp.sum({carries[0]}) < 1e4)"))
    head = f"def {{}}(carry):\n    ({names([counter, *carries])}) = carry"
    w.add(Line(
        f"({names([Var('_', ()), *finals])}) = lax.while_loop({test}, {fn}, (jnp.int32(0), "
        f"*lax.stop_gradient(({names(inits)}))))", tuple(finals), tuple(inits),
        (
            Body(head.format(test), (*carries, counter), (), (), end),
            Body(
                head.format(fn), (*carries, counter), tuple(inner.lines), tuple(back),
                f"return ({counter} + 1, {names(back)})",
            ),
        ),
    ))  # fmt: skip


def branched(w: Writer, depth: int) -> None:
    """`cond` or `switch` on a value that does not depend on rounding; all branches give the same shapes."""
    ins = some(w, 1, 3)
    flags = [v for v in w.pool if v.dtype == "bool" and v.size <= 64]
    k = w.choice((2, 2, 3))
    if k == 2 and flags and w.chance(0.6):
        v = w.choice(flags)
        at, call = v, f"lax.cond(jnp.any({v})"
    else:
        at = w.index(k)
        call = f"lax.switch({at}.ravel()[0]" if k > 2 else f"lax.cond({at}.ravel()[0] == 1"
    bodies, fns = [], []
    for _ in range(k):
        takes = [parameter(w, v) for v in ins]
        inner = w.inner(takes, closures(w))
        body(w, inner, depth)
        gives = [like(inner, v) for v in takes[:2]]
        fns.append(f"branch{next(w.numbers)}")
        bodies.append(Body(
            f"def {fns[-1]}({', '.join(v.name for v in takes)}):", tuple(takes), tuple(inner.lines), tuple(gives),
            f"return ({names(gives)})",
        ))  # fmt: skip
    outs = [Var(w.name(), v.shape, v.dtype) for v in ins[:2]]
    listed = f"[{', '.join(fns)}]" if k > 2 else ", ".join(fns)
    reads = tuple({v.name: v for v in (at, *ins)}.values())
    text = f"({names(outs)}) = {call}, {listed}, {', '.join(v.name for v in ins)})"
    w.add(Line(text, tuple(outs), reads, tuple(bodies)))


def called(w: Writer, depth: int) -> None:
    """A function that is rematerialised, jitted, or both."""
    ins = some(w, 1, 3, size=3072)
    takes = [parameter(w, v) for v in ins]
    inner = w.inner(takes, closures(w))
    body(w, inner, depth)
    gives = results(inner, 2)
    fn = f"call{next(w.numbers)}"
    outs = [Var(w.name(), v.shape, v.dtype, v.bound, v.exact) for v in gives]
    wrap = w.choice((
        "@jax.checkpoint", "@jax.checkpoint", "@jax.jit", "@jax.checkpoint\n@jax.jit",
        "@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)",
        "@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('kept'))",
    ))  # fmt: skip
    w.add(Line(
        f"({names(outs)}) = {fn}({', '.join(v.name for v in ins)})", tuple(outs), tuple(ins),
        (Body(
            f"{wrap}\ndef {fn}({', '.join(v.name for v in takes)}):", tuple(takes), tuple(inner.lines), tuple(gives),
            f"return ({names(gives)})",
        ),),
    ))  # fmt: skip


def batched(w: Writer, depth: int) -> None:
    """`vmap` over one dim of some arrays, others whole."""
    lead = w.float(lambda v: v.shape and v.dtype == "float32")
    a = w.axis(lead)
    n = lead.shape[a]
    ins, axes = [lead], [a]
    for v in some(w, 1, 2):
        at = [d for d, m in enumerate(v.shape) if m == n]
        ins.append(v)
        axes.append(w.choice(at) if at and w.chance(0.7) else None)  # type: ignore[arg-type]
    shapes = [v.shape if d is None else (*v.shape[:d], *v.shape[d + 1 :]) for v, d in zip(ins, axes, strict=True)]
    takes = [parameter(w, v, s) for v, s in zip(ins, shapes, strict=True)]
    inner = w.inner(takes)
    body(w, inner, depth)
    gives = [v for v in results(inner, 2) if v.size * n <= 2048 and len(v.shape) < 4]
    if not gives:
        raise Skip
    fn = f"one{next(w.numbers)}"
    outs = [Var(w.name(), (n, *v.shape), v.dtype, v.bound, v.exact) for v in gives]
    w.add(Line(
        f"({names(outs)}) = jax.vmap({fn}, in_axes={tuple(axes)})({', '.join(v.name for v in ins)})", tuple(outs),
        tuple({v.name: v for v in ins}.values()),
        (Body(
            f"def {fn}({', '.join(v.name for v in takes)}):", tuple(takes), tuple(inner.lines), tuple(gives),
            f"return ({names(gives)})",
        ),),
    ))  # fmt: skip


def nesting(depth: int) -> Sequence[tuple[Emitter, int]]:
    """Emitters of lines with functions, `depth` functions deep."""
    kinds = ((scanned, 4), (counted, 2), (looped, 2), (branched, 3), (called, 4), (batched, 2))
    return [(lambda w, k=kind: k(w, depth), weight) for kind, weight in kinds]


def table() -> Sequence[tuple[Emitter, int]]:
    """Everything that a program's own lines may be."""
    return [*SIMPLE, *LARGE, *nesting(0)]
