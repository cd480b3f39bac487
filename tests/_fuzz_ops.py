"""The lines that random programs are made of: for every kind of operation, how to write one on values at hand.

An emitter takes a `Writer` and adds a line (or raises `Skip` where no value at hand suits). Everything is numerically
tame: sums are scaled, products bounded, and what jumps (sort, argmax, comparison) works on values that are bit for bit
the same however a program is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests._fuzz_writer import SIZES, Skip, Var, Writer

Emitter = Callable[[Writer], object]

UNARY = (
    "jnp.tanh({x})", "jnp.sin({x})", "jnp.cos({x})", "jax.nn.sigmoid({x})", "jax.nn.gelu({x})", "jax.nn.silu({x})",
    "jax.nn.relu({x})", "-{x}", "jnp.exp(-{x} * {x})", "jnp.log1p(jnp.abs({x}))", "jnp.sqrt(1.0 + {x} * {x})",
    "lax.rsqrt(1.0 + {x} * {x})", "lax.erf({x})", "jax.nn.softplus({x})", "jnp.clip({x}, -0.7, 0.9)",
    "jnp.where({x} > 0, {x}, 0.1 * {x})", "lax.stop_gradient({x})", "bounded({x})", "soft({x})", "through({x})",
    "checkpoint_name({x}, 'kept')", "lax.optimization_barrier({x})", "lax.integer_pow(jnp.tanh({x}), 3)",
)  # fmt: skip
BINARY = (
    "0.5 * ({x} + {y})", "{x} - 0.5 * {y}", "jnp.tanh({x}) * {y}", "jnp.maximum({x}, {y})", "jnp.minimum({x}, {y})",
    "{x} / (1.0 + {y} * {y})", "jnp.arctan2({x}, 1.0 + jnp.abs({y}))", "jnp.logaddexp({x}, {y})",
    "jnp.where({x} > {y}, {x}, {y})", "jnp.tanh({x} + {y})",
)  # fmt: skip


# --------------------------------------------------------------------------------------------- elementwise


def unary(w: Writer) -> Var:
    x = w.float()
    return w.emit(w.choice(UNARY).format(x=x), x)


def fitting(w: Writer, x: Var) -> tuple[str, Var]:
    """(text, variable) of something that broadcasts against `x` without making it larger."""
    ways: list[tuple[str, Var]] = []
    for y in w.pool:
        if not y.floating or y.name == x.name:
            continue
        if y.shape == x.shape or (y.shape and y.shape == x.shape[len(x.shape) - len(y.shape) :]):
            ways.append((y.name, y))
        for d in range(len(x.shape)):
            if len(y.shape) == len(x.shape) - 1 and y.shape == (*x.shape[:d], *x.shape[d + 1 :]):
                ways.append((f"jnp.expand_dims({y}, {d})", y))
    if ways and w.chance(0.8):
        return w.choice(ways[-6:])
    if w.inside:
        return x.name, x
    y = w.argument(tuple(1 if w.chance(0.2) else n for n in x.shape) if w.chance(0.5) else x.shape[-1:])
    return y.name, y


def binary(w: Writer) -> Var:
    x = w.float()
    text, y = fitting(w, x)
    return w.emit(w.choice(BINARY).format(x=x, y=text), x, y)


def selected(w: Writer) -> Var:
    x = w.float()
    masks = [m for m in w.pool if m.dtype == "bool" and m.shape == x.shape[len(x.shape) - len(m.shape) :]]
    if not masks:
        raise Skip
    mask = w.choice(masks)
    return w.emit(f"jnp.where({mask}, {x}, {w.choice(('0.25', '0.5 * ' + x.name))})", mask, x)


def half(w: Writer) -> Var:
    """To 16 bits and back, where the program is one that may."""
    if not w.halves:
        raise Skip
    x = w.float()
    return w.emit(f"{x}.astype(jnp.{'float32' if x.dtype == 'bfloat16' else 'bfloat16'})", x)


def integers(w: Writer) -> Var:
    """Integer arithmetic; results are below a known bound."""
    n = w.choice(SIZES[2:])
    way = w.choice(("iota", "affine", "sum", "cumulative", "bits", "floor"))
    if way == "iota":
        return w.emit(f"jnp.arange({n}, dtype=jnp.int32)", bound=n, exact=True)
    if way == "floor":
        x = w.float(lambda v: v.exact and v.dtype == "float32")
        return w.emit(f"jnp.floor({x} * 4).astype(jnp.int32) % {n}", x, bound=n)
    x = w.pick(lambda v: v.bound > 0)
    text = {
        "affine": f"({x} * 3 + 1) % {n}", "sum": f"jnp.sum({x}, axis=-1) % {n}",
        "cumulative": f"jnp.cumsum({x}, axis=-1) % {n}", "bits": f"({x} ^ ({x} >> 1)) % {n}",
    }[way]  # fmt: skip
    if way in ("sum", "cumulative") and not x.shape:
        raise Skip
    return w.emit(text, x, bound=n, exact=x.exact)


def booleans(w: Writer) -> Var:
    way = w.choice(("greater", "even", "both", "any", "finite"))
    if way == "greater":
        x = w.float(lambda v: v.exact)
        return w.emit(f"{x} > {w.choice(('0.0', '0.3', '-0.4'))}", x)
    if way == "even":
        x = w.pick(lambda v: v.bound > 0)
        return w.emit(f"{x} % 2 == 0", x)
    if way == "finite":
        x = w.float()
        return w.emit(f"jnp.isfinite({x})", x)
    x = w.pick(lambda v: v.dtype == "bool")
    if way == "any" and x.shape:
        return w.emit(f"jnp.{w.choice(('any', 'all'))}({x}, axis={w.axis(x)})", x)
    return w.emit(f"~{x} | ({x} & True)", x)


# ----------------------------------------------------------------------------------------------- products


def dot(w: Writer) -> Var:
    """Any pairing of dims: batch dims, contracted dims, free dims, in any order."""
    x = w.float(lambda v: v.shape)
    i = w.below(len(x.shape))
    k = x.shape[i]
    others = [y for y in w.pool if y.floating and k in y.shape and y.dtype == x.dtype]
    if others and w.chance(0.5):
        y = w.choice(others[-6:])
    elif w.inside:
        raise Skip
    else:
        y = w.argument((k, w.size()) if w.chance(0.6) else (w.size(), k))
    j = w.choice([d for d, n in enumerate(y.shape) if n == k])
    batch: list[tuple[int, int]] = []
    for a, n in enumerate(x.shape):
        free = [b for b, m in enumerate(y.shape) if m == n and b != j and b not in [q for _, q in batch]]
        if a != i and free and w.chance(0.6):
            batch.append((a, w.choice(free)))
    contract = [(i, j)]
    for a, n in enumerate(x.shape):
        taken_x, taken_y = {p for p, _ in batch + contract}, {q for _, q in batch + contract}
        free = [b for b, m in enumerate(y.shape) if m == n and b not in taken_y]
        if a not in taken_x and free and w.chance(0.2):
            contract.append((a, w.choice(free)))
    numbers = (tuple(zip(*contract, strict=True)), tuple(zip(*batch, strict=True)) if batch else ((), ()))
    scale = 1 / math.sqrt(math.prod(x.shape[a] for a, _ in contract))
    return w.emit(f"lax.dot_general({x}, {y}, {numbers}) * {scale:.4g}", x, y)


def matmul(w: Writer) -> Var:
    x = w.float(lambda v: v.shape and v.dtype == "float32")
    y = w.argument((x.shape[-1], w.size()))
    return w.emit(f"{w.choice(('{0} @ {1}', 'product({0}, {1})'))} * 0.5".format(x, y), x, y)


def attention(w: Writer) -> Var:
    x = w.float(lambda v: len(v.shape) >= 2 and v.dtype == "float32")
    return w.emit(
        f"jax.nn.softmax(jnp.einsum('...qd,...kd->...qk', {x}, {x}), axis=-1) @ {x}", x,
    )  # fmt: skip


def convolution(w: Writer) -> Var:
    x = w.float(lambda v: len(v.shape) in (3, 4) and v.dtype == "float32")
    space = "HW"[: len(x.shape) - 2]
    lhs = w.choice(("N" + space + "C", "NC" + space, space + "NC"))
    sizes = dict(zip(lhs, x.shape, strict=True))
    groups = w.choice([g for g in (1, 1, 2, 3, 4) if sizes["C"] % g == 0])
    batches = w.choice([g for g in (1, 1, 1, 2, 4) if sizes["N"] % g == 0]) if groups == 1 else 1
    rhs = w.choice((space + "IO", "OI" + space))
    outs = w.choice((1, 2, 3)) * groups * batches
    kernel = {"I": sizes["C"] // groups, "O": outs, **{s: min(w.choice((1, 2, 3)), sizes[s]) for s in space}}
    y = w.argument(tuple(kernel[c] for c in rhs))
    ones = (1,) * len(space)
    strides = tuple(w.choice((1, 1, 2)) for _ in space)
    right = tuple(w.choice((1, 2)) if kernel[s] * 2 - 1 <= sizes[s] else 1 for s in space)
    left = tuple(w.choice((1, 1, 1, 2)) for _ in space)
    padding = w.choice(("'SAME'", "'VALID'")) if left == ones else str(tuple((1, 0) for _ in space))
    out = w.choice((lhs, "N" + space + "C"))
    scale = 1 / math.sqrt(math.prod(kernel[c] for c in rhs if c != "O"))
    return w.emit(
        f"lax.conv_general_dilated({x}, {y}, {strides}, {padding}, {left}, {right}, ({lhs!r}, {rhs!r}, {out!r}), "
        f"feature_group_count={groups}, batch_group_count={batches}) * {scale:.4g}", x, y,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ reductions


def reduction(w: Writer) -> Var:
    x = w.float(lambda v: v.shape)
    axes = w.axes(x)
    n = math.prod(x.shape[a] for a in axes)
    keep = w.choice(("", ", keepdims=True"))
    text = w.choice((
        f"jnp.sum({x}, {axes}{keep}) * {1 / math.sqrt(n):.4g}", f"jnp.mean({x}, {axes}{keep})",
        f"jnp.max({x}, {axes}{keep})", f"jnp.min({x}, {axes}{keep})", f"jnp.prod(jnp.cos({x}), {axes}{keep})",
        f"jax.nn.logsumexp({x}, {axes}{keep})", f"jnp.var({x}, {axes}{keep})",
    ))  # fmt: skip
    return w.emit(text, x)


def normalised(w: Writer) -> Var:
    x = w.float(lambda v: v.shape)
    a = w.axis(x)
    text = w.choice((
        f"jax.nn.softmax({x}, axis={a})", f"jax.nn.log_softmax({x}, axis={a}) * 0.3",
        f"{x} * lax.rsqrt(jnp.mean({x} * {x}, {a}, keepdims=True) + 0.1)",
        f"({x} - jnp.mean({x}, {a}, keepdims=True)) * lax.rsqrt(jnp.var({x}, {a}, keepdims=True) + 0.1)",
        f"jax.nn.standardize({x}, axis={a}, epsilon=0.1)",
    ))  # fmt: skip
    return w.emit(text, x)


def window(w: Writer) -> Var:
    x = w.float(lambda v: v.shape and v.dtype == "float32")
    sizes = tuple(min(n, w.choice((1, 1, 2, 3))) for n in x.shape)
    strides = tuple(w.choice((1, 1, 2)) for _ in x.shape)
    start = w.choice(("-jnp.inf, lax.max", "0.0, lax.add"))
    scale = "" if "max" in start else f" * {1 / math.prod(sizes):.4g}"
    return w.emit(f"lax.reduce_window({x}, {start}, {sizes}, {strides}, {w.choice(('SAME', 'VALID'))!r}){scale}", x)


def cumulative(w: Writer) -> Var:
    x = w.float(lambda v: v.shape and v.dtype == "float32")
    a = w.axis(x)
    text = w.choice((
        f"lax.cumsum({x}, {a}, reverse={w.chance(0.5)}) * {1 / math.sqrt(x.shape[a]):.4g}", f"lax.cummax({x}, {a})",
        f"lax.cumprod(jnp.cos({x}), {a})", f"lax.cumlogsumexp({x}, {a})", f"lax.cummin({x}, {a}, reverse=True)",
        f"lax.associative_scan(lambda p, q: 0.5 * (p + q), {x}, axis={a})",
    ))  # fmt: skip
    return w.emit(text, x)


def ordering(w: Writer) -> Var:
    x = w.float(lambda v: v.exact and v.shape and v.dtype == "float32")
    a = w.axis(x)
    way = w.choice(("sort", "argsort", "argmax", "top_k", "pair", "argmin"))
    if way == "sort":
        return w.emit(f"jnp.sort({x}, axis={a}, descending={w.chance(0.3)})", x, exact=True)
    if way == "argsort":
        return w.emit(f"jnp.argsort({x}, axis={a})", x, bound=x.shape[a], exact=True)
    if way in ("argmax", "argmin"):
        return w.emit(f"jnp.{way}({x}, axis={a}).astype(jnp.int32)", x, bound=x.shape[a], exact=True)
    if way == "top_k":
        k = 1 + w.below(x.shape[-1])
        return w.emit_many(f"lax.top_k({x}, {k})", (0, x.shape[-1]), x, exact=True)[0]
    others = [y for y in w.pool if y.shape == x.shape and y.name != x.name]
    if not others:
        raise Skip
    y = w.choice(others)
    return w.emit_many(f"lax.sort(({x}, {y}), dimension={a}, num_keys=1)", (0, y.bound), x, y)[0]


# ---------------------------------------------------------------------------------------------------- shapes


def reshape(w: Writer) -> Var:
    """Dims merged, split, or cut quite differently."""
    x = w.pick(lambda v: v.shape)
    shape = list(x.shape)
    for _ in range(1 + w.below(2)):
        d = w.below(len(shape))
        if w.chance(0.5) and len(shape) > 1 and d + 1 < len(shape):
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        else:
            parts = [p for p in (1, 2, 3, 4, 6, 8) if shape[d] % p == 0]
            p = w.choice(parts)
            shape[d : d + 1] = [p, shape[d] // p]
    if w.chance(0.1):
        shape = [-1, w.choice([p for p in (1, 2, 4, 8) if x.size % p == 0])]
    return w.emit(f"{x}.reshape({', '.join(map(str, shape))})", x, bound=x.bound, exact=x.exact)


def transposed(w: Writer) -> Var:
    x = w.pick(lambda v: len(v.shape) > 1)
    return w.emit(f"jnp.transpose({x}, {w.shuffled(range(len(x.shape)))})", x, bound=x.bound, exact=x.exact)


def broadcast(w: Writer) -> Var:
    x = w.pick(lambda v: v.size <= 256)
    n = w.size()
    d = w.below(len(x.shape) + 1)
    shape = (*x.shape[:d], n, *x.shape[d:])
    text = w.choice((
        f"jnp.broadcast_to(jnp.expand_dims({x}, {d}), {shape})", f"jnp.expand_dims({x}, {d})",
        f"jnp.stack([{x}, {x}], axis={d})",
        f"jnp.repeat({x}, 2, axis={min(d, max(len(x.shape) - 1, 0))})" if x.shape else f"{x}[None]",
        f"jnp.squeeze(jnp.expand_dims({x}, {d}), {d})",
    ))  # fmt: skip
    return w.emit(text, x, bound=x.bound, exact=x.exact)


def cut(w: Writer) -> Var:
    """Slices with strides, flips, rolls, splits, padding."""
    x = w.pick(lambda v: v.shape)
    a = w.axis(x)
    n = x.shape[a]
    way = w.choice(("slice", "pad", "flip", "roll", "index", "split", "interior", "diff"))
    if way == "slice":
        start = w.below(n)
        stop = start + 1 + w.below(n - start)
        at = ":, " * a + f"{start}:{stop}:{w.choice((1, 1, 2, 3))}"
        return w.emit(f"{x}[{at}]", x, bound=x.bound, exact=x.exact)
    if way in ("pad", "interior"):
        middle = w.choice((1, 2)) if way == "interior" else 0
        pads = [(0, 0, 0)] * len(x.shape)
        pads[a] = (w.choice((0, 1, 2, -1)), w.choice((0, 1, 3)), middle)
        return w.emit(f"lax.pad({x}, {w.zero(x)}, {tuple(pads)})", x, bound=x.bound, exact=x.exact)
    if way == "split" and n > 1:
        first = 1 + w.below(n - 1)
        return w.emit_many(f"lax.split({x}, ({first}, {n - first}), {a})", (x.bound, x.bound), x, exact=x.exact)[1]
    if way == "diff" and x.floating and n > 1:
        return w.emit(f"jnp.diff({x}, axis={a})", x)
    text = {
        "flip": f"jnp.flip({x}, {a})", "roll": f"jnp.roll({x}, {w.choice((1, -1, 3))}, axis={a})",
    }.get(way, f"{x}[{':, ' * a}{w.below(n)}]")  # fmt: skip
    return w.emit(text, x, bound=x.bound, exact=x.exact)


def joined(w: Writer) -> Var:
    x = w.float(lambda v: v.shape)
    a = w.axis(x)
    rest = lambda v: (*v.shape[:a], *v.shape[a + 1 :])  # noqa: E731
    others = [
        y for y in w.pool
        if y.dtype == x.dtype and len(y.shape) == len(x.shape) and rest(y) == rest(x)
    ]  # fmt: skip
    y = w.choice(others[-4:])
    listed = w.choice((f"{x}, {y}", f"{y}, {x}", f"{x}, {y}, {x}"))
    return w.emit(f"jnp.concatenate([{listed}], axis={a})", x, y, exact=x.exact and y.exact)


# --------------------------------------------------------------------------------------------------- indexing


def gathered(w: Writer) -> Var:
    x = w.pick(lambda v: v.shape)
    a = w.axis(x)
    n = x.shape[a]
    i = w.index(n)
    colons = ":, " * a
    ways = [
        f"jnp.take({x}, {i}, axis={a}, mode={w.choice(('clip', 'wrap', None))!r})", f"{x}[{colons}{i}]",
        f"jnp.take({x}, {i} + 1, axis={a}, mode='fill', fill_value=0)",
        f"lax.dynamic_index_in_dim({x}, {i}.ravel()[0], {a}, keepdims={w.chance(0.5)})",
        f"lax.dynamic_slice_in_dim({x}, {i}.ravel()[-1], {1 + w.below(n)}, {a})",
    ]
    if a + 1 < len(x.shape) and i.bound <= x.shape[a + 1]:
        ways += [f"{x}[{colons}{i}, {i}]"] * 2
    if len(x.shape) > 1 and len(i.shape) == 1 and i.shape[0] in (1, x.shape[0]) and a == len(x.shape) - 1:
        at = f"{i}.reshape({', '.join(str(m) for m in (i.shape[0], *(1,) * (len(x.shape) - 1)))})"
        ways += [f"jnp.take_along_axis({x}, {at}, axis={a})"] * 3
    return w.emit(w.choice(ways), x, i, bound=x.bound, exact=x.exact and i.exact)


def along(w: Writer) -> Var:
    """`take_along_axis` with an index for every place."""
    x = w.float(lambda v: v.shape)
    a = w.axis(x)
    wanted = [i for i in w.pool if 0 < i.bound <= x.shape[a] and len(i.shape) == len(x.shape)]
    fits = [i for i in wanted if all(d == a or m in (1, x.shape[d]) for d, m in enumerate(i.shape))]
    i = w.choice(fits) if fits else w.argument((*x.shape[:a], w.choice((1, 2, 3)), *x.shape[a + 1 :]), bound=x.shape[a])
    return w.emit(f"jnp.take_along_axis({x}, {i}, axis={a})", x, i, exact=x.exact and i.exact)


def one_hot(w: Writer) -> Var:
    n = w.size()
    i = w.index(n)
    return w.emit(f"jax.nn.one_hot({i}, {n}, axis={w.choice((-1, -1, 0))})", i, exact=i.exact)


def embedded(w: Writer) -> Var:
    n = w.choice((8, 16, 24))
    i = w.index(n)
    table = w.argument((n, w.size()))
    return w.emit(f"{table}[{i}]", table, i, exact=i.exact)


def scattered(w: Writer) -> Var:
    x = w.float(lambda v: v.shape and v.dtype == "float32")
    # gradients of maxima compare: ties, computed twice, are decided by rounding
    still = str(x) if x.exact else f"lax.stop_gradient({x})"
    n = x.shape[0]
    way = w.choice(("segment", "add", "row", "max", "inner", "zeros", "update", "slices", "mul", "drop"))
    if way == "segment":
        i = w.index(w.size(), lambda v: v.shape == (n,), shape=(n,))
        text = w.choice((
            f"jax.ops.segment_sum({x}, {i}, num_segments={i.bound}) * 0.5",
            f"jnp.maximum(jax.ops.segment_max({still}, {i}, num_segments={i.bound}), -1.0)",
        ))  # fmt: skip
        return w.emit(text, x, i)
    if way == "zeros":
        i = w.index(w.size(), lambda v: v.shape == (n,), shape=(n,))
        return w.emit(f"jnp.zeros(({i.bound + 1}, *{x}.shape[1:])).at[{i}].add({x} * 0.3)", x, i)
    if way in ("row", "slices"):
        last = f"{w.below(x.shape[-1])}:"
        at = w.choice((f"{w.below(n)}", f"{w.below(n)}:", "::2", "..., 0", f":, {last}" if len(x.shape) == 2 else last))
        change = w.choice(("set(0.25)", "add(0.5)", "min(0.1)"))
        return w.emit(f"{still if 'min' in change else x}.at[{at}].{change}", x)
    if way == "update":
        starts = ", ".join(w.choice((str(w.below(m)), f"{w.index(m)}.ravel()[0]")) for m in x.shape)
        used = [v for v in w.pool if v.name in starts.replace(".", " ").replace(",", " ").split()]
        sizes = ", ".join(f":{1 + w.below(m)}" for m in x.shape)
        return w.emit(f"lax.dynamic_update_slice({x}, 0.5 * {x}[{sizes}], ({starts},))", x, *used)
    i = w.index(n, lambda v: len(v.shape) == 1)
    if way == "inner" and len(x.shape) > 1:
        i = w.index(x.shape[1], lambda v: len(v.shape) == 1)
        return w.emit(f"{x}.at[:, {i}].add(0.25)", x, i)
    if way == "drop":
        return w.emit(f"{x}.at[{i} + 1].add(0.25, mode='drop')", x, i)
    if way == "mul":  # has no gradient
        return w.emit(f"lax.stop_gradient({x}).at[{i}].multiply(0.7)", x, i)
    if way == "max":
        return w.emit(f"{still}.at[{i}].max({still}[0] * 0.5)", x, i)
    return w.emit(f"{x}.at[{i}].add({x}[0] * 0.5)", x, i)


# ------------------------------------------------------------------------------------------------------ rare


def rare(w: Writer) -> Var:
    """Linear algebra, transforms, random bits, constants."""
    way = w.choice(("cholesky", "triangular", "fft", "normal", "bernoulli", "constant", "constant", "vmap"))
    if way == "constant":
        x = w.float(lambda v: v.shape and v.shape[-1] <= 24)
        return w.emit(f"{x} + jnp.asarray(TABLE[0, :{x.shape[-1]}])", x)
    if way in ("normal", "bernoulli"):
        x = w.float(lambda v: v.dtype == "float32")
        draw = f"jax.random.{way}(jax.random.key({w.below(9)}), shape={x.shape})"
        return w.emit(f"jnp.where({draw}, {x}, 0.5)" if way == "bernoulli" else f"jnp.tanh({draw}) * {x}", x)
    if way == "fft":
        x = w.float(lambda v: v.shape and v.dtype == "float32")
        return w.emit(f"jnp.fft.rfft({x}, axis={w.axis(x)}).real * {1 / math.sqrt(max(x.shape)):.4g}", x)
    if way == "vmap":
        x = w.float(lambda v: len(v.shape) > 1 and v.dtype == "float32")
        i = w.index(x.shape[1], lambda v: v.shape == (x.shape[0],), shape=(x.shape[0],))
        return w.emit(f"jax.vmap(lambda r, k: lax.dynamic_slice_in_dim(r, k, 1, 0) * r)({x}, {i})", x, i)
    x = w.float(lambda v: len(v.shape) > 1 and v.dtype == "float32" and v.shape[-1] <= 8)
    n = x.shape[-1]
    square = f"(jnp.einsum('...ij,...ik->...jk', {x}, {x}) * {1 / x.shape[-2]:.4g} + jnp.eye({n}))"
    if way == "cholesky":
        return w.emit(f"jnp.linalg.cholesky({square})", x)
    return w.emit(f"lax.linalg.triangular_solve(jnp.tril({square}), {x}, lower=True)", x)


SIMPLE: Sequence[tuple[Emitter, int]] = (
    (unary, 12), (binary, 14), (selected, 3), (half, 2), (integers, 5), (booleans, 3), (dot, 12), (matmul, 4),
    (reduction, 7), (normalised, 4), (cumulative, 2), (ordering, 4), (reshape, 8), (transposed, 5), (broadcast, 5),
    (cut, 8), (joined, 4), (gathered, 7), (along, 2), (one_hot, 2), (scattered, 7),
)  # fmt: skip
LARGE: Sequence[tuple[Emitter, int]] = (
    (attention, 3), (convolution, 5), (window, 3), (embedded, 3), (rare, 4),
)  # fmt: skip
