"""Small programs on one TPU core, whose cycles the compiler estimates: what the compute model is fitted to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshplan._api._planning import make_call, make_search
from meshplan._options import Options
from meshplan.core import MeshShape
from meshplan.cost import Chosen, MeshModel

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
TARGETS = {"tpu-v5e": "tpu-v5e:2x2", "tpu-v5p": "tpu-v5p:2x2x1"}


@dataclass(frozen=True)
class Sweep:
    """One program; every third of a kind is held out of the fit."""

    name: str
    kind: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    held: bool = False


def arg(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def chosen_of(fn: Callable[..., Any], args: tuple[Any, ...], target: str) -> Chosen:
    """The program on one device: the only strategy there is."""
    search = make_search(make_call(fn, args, ()), target, {}, None, Options())
    model = MeshModel(search.space, search.machine, MeshShape((("one", 1),)))
    return Chosen(model, [0] * len(model.choices))


def compile_one(sweep: Sweep, device: Any) -> str:
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), sweep.args)
    return jax.jit(sweep.fn).lower(*args).compile().as_text() or ""


def sweeps() -> list[Sweep]:
    """All programs, by kind."""
    every = [
        *_products(), *_beside(), *_attention(), *_convolutions(), *_elementwise(), *_reductions(), *_alone(), *_kept(),
        *_tables(), *_scans(), *_strided(), *_masked(), *_split(),
    ]  # fmt: skip
    seen: dict[str, int] = {}
    out = []
    for s in every:
        seen[s.kind] = seen.get(s.kind, 0) + 1
        out.append(Sweep(s.name, s.kind, s.fn, s.args, held=seen[s.kind] % 3 == 2))
    return out


def _products() -> list[Sweep]:
    """Arithmetic: sizes, dims that do not fill the matrix unit, types, batches."""
    sizes = [
        (4096, 2048, 2048), (8192, 1024, 4096), (2048, 4096, 2048), (2048, 2048, 8192), (1024, 1024, 1024),
        (512, 512, 512), (16384, 200, 1000), (4096, 1000, 3000), (32768, 256, 256), (50000, 128, 384),
        (300, 4096, 2048), (8192, 512, 96), (16384, 64, 2048), (6304, 768, 3072), (6304, 3072, 768),
    ]  # fmt: skip
    out = [Sweep(f"dot_{m}_{k}_{n}", "product", jnp.dot, (arg(m, k), arg(k, n))) for m, k, n in sizes]
    for m, k, n in ((4096, 2048, 2048), (8192, 1024, 1000), (2048, 2048, 4096)):
        out.append(Sweep(f"dot_f32_{m}_{k}_{n}", "product", jnp.dot, (arg(m, k, dtype=F32), arg(k, n, dtype=F32))))
    for b, m, k, n in ((16, 1024, 512, 512), (64, 512, 128, 512), (8, 2048, 256, 1024)):
        out.append(Sweep(f"batched_{b}_{m}_{k}_{n}", "product", jnp.matmul, (arg(b, m, k), arg(b, k, n))))
    weights = lambda x, g: lax.dot_general(x, g, (((0,), (0,)), ((), ())))  # noqa: E731
    for m, k, n in ((8192, 1024, 2048), (16384, 512, 1024), (4096, 2048, 2048)):
        out.append(Sweep(f"weights_{m}_{k}_{n}", "product", weights, (arg(m, k), arg(m, n))))
    return out


def _beside() -> list[Sweep]:
    """Products with elementwise operations before and after them, and sums of what they make."""
    out = []
    for m, k, n in ((4096, 768, 3072), (8192, 1024, 1024), (2048, 2048, 4096)):
        x, w = arg(2, m, k), arg(k, n)
        size = f"_2_{m}_{k}_{n}"
        bias, hidden, row = arg(n), arg(2, m, n), arg(2, m, 1, dtype=F32)
        out += [
            Sweep("bias_gelu" + size, "beside", lambda x, w, b: jax.nn.gelu(x @ w + b), (x, w, bias)),
            Sweep("gelu_before" + size, "beside", lambda x, w: jax.nn.gelu(x) @ w, (x, w)),
            Sweep("silu_gate" + size, "beside", lambda x, w, h: jax.nn.silu(x @ w) * h, (x, w, hidden)),
            Sweep(
                "norm_before" + size, "beside",
                lambda x, w, m, r: ((x.astype(F32) - m) * r).astype(BF16) @ w, (x, w, row, row),
            ),
            Sweep(
                "gelu_back" + size, "beside",
                lambda x, w, h: (lambda d: (d, d.astype(F32).sum((0, 1))))(jax.vjp(jax.nn.gelu, h)[1](x @ w)[0]),
                (x, w, hidden),
            ),
            Sweep(
                "residual_mean" + size, "beside",
                lambda x, w, h: (lambda y: (y, y.astype(F32).mean(-1)))(x @ w + h), (x, w, hidden),
            ),
        ]  # fmt: skip
    return out


def _attention() -> list[Sweep]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=F32) * q.shape[-1] ** -0.5
        return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, -1).astype(v.dtype), v)

    shapes = ((4, 1024, 8, 128), (8, 1024, 16, 64), (16, 512, 12, 64), (32, 197, 12, 64), (2, 2048, 8, 128))
    out = [Sweep("attend_" + "_".join(map(str, s)), "attention", attend, (arg(*s),) * 3) for s in shapes]
    back = jax.grad(lambda q, k, v: attend(q, k, v).astype(F32).sum(), argnums=(0, 1, 2))
    return out + [
        Sweep("attend_back_" + "_".join(map(str, s)), "attention", back, (arg(*s),) * 3) for s in shapes[:4]
    ]


def _conv(stride: int = 1, groups: int = 1) -> Callable[..., Any]:
    return lambda x, w: lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def _convolutions() -> list[Sweep]:
    out = []
    for n, h, i, o, k, stride in (
        (32, 28, 128, 128, 3, 1), (64, 14, 256, 256, 3, 1), (64, 7, 512, 512, 3, 1), (64, 28, 256, 128, 1, 1),
        (32, 56, 64, 64, 3, 1), (64, 28, 128, 256, 3, 2), (64, 16, 128, 128, 3, 1), (16, 32, 256, 256, 3, 1),
        (32, 14, 512, 1024, 1, 1),
    ):  # fmt: skip
        x, w = arg(n, h, h, i), arg(k, k, i, o)
        g = arg(n, h // stride, h // stride, o)
        size = f"_{n}_{h}_{i}_{o}_{k}" + (f"_s{stride}" if stride > 1 else "")
        conv = _conv(stride)
        out.append(Sweep("conv" + size, "convolution", conv, (x, w)))
        out.append(Sweep(
            "conv_weights" + size, "convolution",
            lambda x, g, conv=conv, w=w: jax.linear_transpose(lambda w: conv(x, w), w)(g)[0], (x, g),
        ))
        if stride == 1:
            out.append(Sweep(
                "conv_inputs" + size, "convolution",
                lambda w, g, conv=conv, x=x: jax.linear_transpose(lambda x: conv(x, w), x)(g)[0], (w, g),
            ))
    return out


def _elementwise() -> list[Sweep]:
    def together(*xs: Any) -> Any:
        return sum(xs[1:], xs[0]) * 2

    def adam(p: Any, m: Any, v: Any, g: Any) -> Any:
        g = g.astype(F32)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    out = []
    for shape in ((16384, 4096), (64, 512, 3072), (32, 112, 112, 192)):
        size = "_".join(map(str, shape))
        for dtype, letter in ((F32, "f32"), (BF16, "bf16")):
            x = arg(*shape, dtype=dtype)
            out += [Sweep(f"map{k}_{letter}_{size}", "elementwise", together, (x,) * k) for k in (1, 2, 4)]
            out.append(Sweep(f"gelu_{letter}_{size}", "elementwise", lambda x: jax.nn.gelu(x) + x, (x,)))
        full, half = arg(*shape, dtype=F32), arg(*shape)
        out.append(Sweep(f"adam_{size}", "elementwise", adam, (full, full, full, half)))
        out.append(Sweep(f"narrow_{size}", "elementwise", lambda x: (x * 2).astype(BF16), (full,)))
        out.append(Sweep(f"widen_{size}", "elementwise", lambda x: x.astype(F32) * 2, (half,)))
    return out


def _reductions() -> list[Sweep]:
    def normalise(x: Any, g: Any) -> Any:
        wide = x.astype(F32)
        centred = wide - wide.mean(-1, keepdims=True)
        return (centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * g).astype(x.dtype)

    out = []
    for shape in ((32768, 2048), (64, 1024, 1024), (64, 112, 112, 64)):
        size = "_".join(map(str, shape))
        for dtype, letter in ((F32, "f32"), (BF16, "bf16")):
            x = arg(*shape, dtype=dtype)
            squares = lambda x, axes: jnp.square(x.astype(F32)).sum(axes)  # noqa: E731
            last, rest = (-1,), tuple(range(len(shape) - 1))
            out += [
                Sweep(f"squares_last_{letter}_{size}", "reduce", lambda x, f=squares, a=last: f(x, a), (x,)),
                Sweep(f"squares_rest_{letter}_{size}", "reduce", lambda x, f=squares, a=rest: f(x, a), (x,)),
                Sweep(f"normalise_{letter}_{size}", "reduce", normalise, (x, arg(shape[-1], dtype=F32))),
            ]
    return out


def _alone() -> list[Sweep]:
    out = []
    for shape in ((16384, 4096), (128, 512, 1024)):
        size = "_".join(map(str, shape))
        for dtype, letter in ((F32, "f32"), (BF16, "bf16")):
            x = arg(*shape, dtype=dtype)
            turned = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
            out += [
                Sweep(f"max_{letter}_{size}", "alone", lambda x: x.max(-1), (x,)),
                Sweep(f"exp_{letter}_{size}", "alone", jnp.exp, (x,)),
                Sweep(f"transpose_{letter}_{size}", "transpose", lambda x, t=turned: x.transpose(t), (x,)),
            ]
        out.append(Sweep(f"narrow_alone_{size}", "alone", lambda x: x.astype(BF16), (arg(*shape, dtype=F32),)))
        out.append(Sweep(f"fill_{size}", "alone", lambda x, s=shape: jnp.full(s, x), (arg(dtype=F32),)))
    out += [Sweep(f"small_{n}", "small", lambda x: x * 2 + 1, (arg(8, n, dtype=F32),)) for n in (128, 256, 512, 1024)]
    return out


def _kept() -> list[Sweep]:
    """A narrow array that one kernel makes and another reads: kept on the chip if it is not too large."""

    def step(x: Any) -> Any:
        half = lax.optimization_barrier((x * 2).astype(BF16))
        return (jnp.tanh(half) + half.max(1, keepdims=True)).astype(BF16)

    mebibytes = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112)
    return [Sweep(f"kept_{n}_MiB", "kept", step, (arg(n * 2**20 // 4096, 2048, dtype=F32),)) for n in mebibytes]


def _tables() -> list[Sweep]:
    """Rows looked up in tables with few columns, their gradient, and an update of the whole table."""

    def look_up(table: Any, ids: Any, w: Any) -> Any:
        return table[ids].astype(BF16) @ w

    def update(table: Any, sums: Any, ids: Any, w: Any) -> Any:
        g = jax.grad(lambda t: ((t[ids].astype(BF16) @ w).astype(F32) ** 2).sum())(table)
        sums = sums + g * g
        return table - 0.1 * g * lax.rsqrt(sums + 1e-6), sums

    out = []
    for rows, columns in ((131072, 16), (262144, 32), (65536, 64), (65536, 128)):
        table, ids, w = arg(rows, columns, dtype=F32), arg(8192, dtype=I32), arg(columns, 256)
        size = f"_{rows}_{columns}"
        out.append(Sweep("look_up" + size, "table", look_up, (table, ids, w)))
        out.append(Sweep("table_update" + size, "table", update, (table, table, ids, w)))
    return out


def _scans() -> list[Sweep]:
    """Gradients of layers in a loop: stacked weights, converted; stacked results; sums over turns."""

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, p: Any) -> tuple[Any, None]:
            up, down = (w.astype(BF16) for w in p)
            return x + jax.nn.gelu(x @ up) @ down, None

        return jnp.square(lax.scan(layer, x, params)[0].astype(F32)).mean()

    def recurrent(w: Any, xs: Any) -> Any:
        def turn(h: Any, x: Any) -> tuple[Any, Any]:
            h = jnp.tanh(h @ w.astype(BF16) + x)
            return h, h

        return jnp.square(lax.scan(turn, xs[0], xs)[1].astype(F32)).mean()

    out = []
    for layers, m, d, f in ((4, 4096, 1024, 4096), (2, 8192, 768, 3072), (3, 2048, 2048, 4096)):
        params = arg(layers, d, f, dtype=F32), arg(layers, f, d, dtype=F32)
        out.append(Sweep(f"layers_{layers}_{m}_{d}_{f}", "scan", jax.grad(loss), (params, arg(2, m // 2, d))))
    for turns, b, d in ((64, 128, 2048), (32, 256, 1024), (128, 64, 1024)):
        w = arg(d, d, dtype=F32)
        out.append(Sweep(f"recurrent_{turns}_{b}_{d}", "scan", jax.grad(recurrent), (w, arg(turns, b, d))))
    return out


def _strided() -> list[Sweep]:
    """Every other element taken, elements spread apart, and both in an associative scan."""

    def halves(x: Any) -> Any:
        y = jnp.tanh(x)
        return y[::2] * y[1::2]

    def apart(x: Any, y: Any) -> Any:
        zero = jnp.zeros((), x.dtype)
        rest = [(0, 0, 0)] * (x.ndim - 1)
        return lax.pad(x * 2, zero, [(0, 1, 1), *rest]) + lax.pad(y + 1, zero, [(1, 0, 1), *rest])

    def scan(keep: Any, write: Any) -> Any:
        return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (keep, write))[1]

    out = []
    for n, d in ((512, 65536), (2048, 16384), (1024, 24576)):
        x, half = arg(n, d, dtype=F32), arg(n // 2, d, dtype=F32)
        out.append(Sweep(f"halves_{n}_{d}", "stride", halves, (x,)))
        out.append(Sweep(f"apart_{n}_{d}", "stride", apart, (half, half)))
    for n, d in ((64, 262144), (256, 65536), (512, 49152)):
        x = arg(n, d, dtype=F32)
        out.append(Sweep(f"recurrence_{n}_{d}", "stride", scan, (x, x)))
    return out


def _masked() -> list[Sweep]:
    """Rows looked up by indices of which some may be none, and added up again."""

    def summed(x: Any, senders: Any, receivers: Any) -> Any:
        rows = x.at[senders].get(mode="fill", fill_value=0)
        return jax.ops.segment_sum(rows, receivers, num_segments=x.shape[0])

    out = []
    for nodes, edges, d in ((65536, 524288, 128), (32768, 1048576, 64), (131072, 262144, 256)):
        ids = arg(edges, dtype=I32)
        out.append(Sweep(f"edges_{nodes}_{edges}_{d}", "masked", summed, (arg(nodes, d), ids, ids)))
    return out


def _split() -> list[Sweep]:
    """Images normalised by groups of channels, which lie filled up."""

    def normalise(x: Any, scale: Any) -> Any:
        # held, as sharding constraints do it
        wide = lax.optimization_barrier(x.astype(F32).reshape(*x.shape[:3], 32, -1))
        centred = wide - wide.mean((1, 2, 4), keepdims=True)
        normal = centred * lax.rsqrt(jnp.square(centred).mean((1, 2, 4), keepdims=True) + 1e-5)
        return (normal.reshape(x.shape) * scale).astype(x.dtype)

    return [
        Sweep(f"groups_held_{n}_{h}_{c}", "split", normalise, (arg(n, h, h, c), arg(c, dtype=F32)))
        for n, h, c in ((32, 32, 128), (32, 16, 256), (64, 16, 512))
    ]
