"""One traced operation, or several, for every primitive that a rule covers: what proofs and searches run on.

Shapes are small on purpose: what takes the time is one compilation for every shape of every primitive.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name


@dataclass(frozen=True, slots=True)
class Case:
    """`name` is the primitive; `factors` how many its rule has, None where no test counts them;
    `exact`: the arguments are the operands (matrices, keys, group sizes), else random ones of their shapes are."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    factors: int | None = None
    exact: bool = False
    halos: int = 0


_R = np.random.default_rng(2)


def _private(name: str) -> Any:
    """What jax's public modules do not name: "module:attribute" below `jax._src`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"jax._src.{module}"), attribute)


def _newer(name: str) -> Any:
    """A function of `jax.lax` that only newer versions have."""
    return getattr(lax, name)


def _ones(*shape: int) -> Any:
    return jnp.ones(shape)


def _one_device(kind: str) -> Any:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:1])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None))


def _with_layout(x: Any) -> Any:
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout((1, 0)))


# ------------------------------------------------------------------------------------------- elementwise

_X, _I, _U = _ones(2, 1), jnp.ones((2, 1), jnp.int32), jnp.ones((2, 1), jnp.uint32)
_B, _C = jnp.ones((2, 1), bool), jnp.ones((2, 1), jnp.complex64)
_UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 "
    "expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh"
).split()
_BINARY = "add atan2 div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub zeta".split()
_INTEGER = "shift_left shift_right_arithmetic shift_right_logical bitwise_and bitwise_or bitwise_xor".split()
_BOUND = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor"}

ELEMENTWISE = [
    *[Case(name, getattr(lax, name), (_X,)) for name in _UNARY],
    *[Case(name, getattr(lax, name), (_X, _X)) for name in _BINARY],
    *[Case(_BOUND.get(name, name), getattr(lax, name), (_U, _U)) for name in _INTEGER],
    *[Case(name, lambda x, f=name: _newer(f)(x), (_X,)) for name in ("log2", "one_minus_square")],
    Case("polynomial", lambda x: _newer("polynomial")(x, [1.0, 5.0, 2.0]), (_X,)),
    Case("add_any", lambda x: _private("ad_util:add_any_p").bind(x, x), (_X,)),
    Case("shard_alike", lambda x, y: _private("shard_alike:shard_alike")(x, y), (_X, _X)),
    Case("xla_metadata_value", lambda x: _private("xla_metadata:set_xla_metadata")(x, a="b"), (_X,)),
    Case("sharding_constraint", lambda x: lax.with_sharding_constraint(x, _one_device("Auto")), (_X,)),
    Case("reshard", lambda x: jax.sharding.reshard(x, _one_device("Explicit")), (_X,)),
    Case("layout_constraint", lambda x: _with_layout(x), (_ones(2, 3),)),
    Case("clamp", lambda x: lax.clamp(0.2, x, 0.7), (_X,)),
    Case("mul", lax.mul, (_ones(2, 3), _ones(2, 3))),
    Case("clamp", lax.clamp, (_X, _X, _X)),
    Case("integer_pow", lambda x: lax.integer_pow(x, 3), (_X,)),
    Case("not", lax.bitwise_not, (_B,)),
    Case("clz", lax.clz, (_U,)),
    Case("population_count", lax.population_count, (_U,)),
    Case("mulhi", lambda x, y: lax.mulhi(x, y), (_U, _U)),
    Case("real", lax.real, (_C,)),
    Case("imag", lax.imag, (_C,)),
    Case("conj", lax.conj, (_C,)),
    Case("complex", lax.complex, (_X, _X)),
    Case("polygamma", lax.polygamma, (_X, _X)),
    Case("regularized_incomplete_beta", lax.betainc, (_X, _X, _X)),
    Case("igamma_grad_a", lax.igamma_grad_a, (_X, _X)),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 7), (_X,)),
    Case("convert_element_type", lambda x: x.astype(jnp.bfloat16), (_X,)),
    Case("convert_element_type", lambda x: x.astype(jnp.float32), (_I,)),
    Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (_X,)),
    Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int8), (_X,)),
    Case("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (jnp.ones((3, 4), jnp.int8),)),
    Case("select_n", lax.select_n, (_B, _X, _X)),
    Case("select_n", lambda x: lax.select_n(jnp.array(True), x, x), (_X,)),
    Case("stop_gradient", lax.stop_gradient, (_X,)),
    Case("copy", jnp.copy, (_X,)),
    Case("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), (_X, _C)),
    Case("name", lambda x: checkpoint_name(x, "kept"), (_X,)),
    Case("device_put", lambda x, y: jax.device_put((x, y)), (_X, _C)),
    Case("eq_to", lambda x, y: lax.eq_to_p.bind(x, y), (_X, _X)),
    Case("le_to", lambda x, y: lax.le_to_p.bind(x, y), (_X, _X)),
    Case("lt_to", lambda x, y: lax.lt_to_p.bind(x, y), (_X, _X)),
    Case("tie", lambda x, y: _private("lax.lax:tie_p").bind(x, y), (_X, _ones(3, 2))),
]

# ------------------------------------------------------------------------------------------------ shapes

_M, _T = _ones(4, 6), _ones(2, 3, 4)

SHAPES = [
    Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)), (_M,), 3),
    Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 3), (0, 1)), (_M[:, :1],), 2),
    Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 2), ()), (_ones(),), 2),
    Case("iota", lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), (), 2),
    Case("iota", lambda: lax.iota(jnp.float32, 6), (), 1),
    Case("empty", lambda: lax.empty((4, 2), jnp.float32), (), 2),
    Case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), (_T,), 3),
    Case("squeeze", lambda x: lax.squeeze(x, (1,)), (_T[:, :1],), 2),
    Case("reshape", lambda x: x.reshape(24), (_T,), 3),
    Case("rev", lambda x: lax.rev(x, (1,)), (_M,), 1, halos=1),
    Case("slice", lambda x: lax.slice(x, (0, 1), (4, 5), (1, 2)), (_M,), 2),
    Case("slice", lambda x: lax.slice(x, (0, 0), (2, 6)), (_M,), 1, halos=1),
    Case("slice", lambda x: lax.slice(x, (1, 0), (3, 6)), (_M,), 2),
    Case("slice", lambda x: x[:, 1::2], (_M,), 2),
    Case("slice", lambda x: lax.slice(x, (1, 0), (4, 6)), (_M,), 1),
    Case("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1))), (_M,), 2),
    Case("pad", lambda x, v: lax.pad(x, v, ((-1, 0, 0), (0, 0, 0))), (_M, _ones()), 1),
    Case("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 1))), (_M,), 2),
    Case("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (6, 6, 0))), (_M,), 1, halos=1),
    Case("pad", lambda x: lax.pad(x, 0.0, ((2, -2, 0), (-3, 0, 0))), (_M,), 0, halos=2),
    Case("concatenate", lambda x, y: lax.concatenate([x, y], 1), (_M, _M[:, :2]), 1),
    Case("split", lambda x: lax.split(x, (2, 4), 1), (_M,), 1),
    Case("reshape", lambda x: lax.reshape(x, (6, 4), (1, 0)), (_M,), 2),
    Case("reshape", lambda x: x.reshape(4, 2, 3), (_M,), 3),
    Case("reshape", lambda x: x.reshape(6, 4), (_T,), 3),
    Case("reshape", lambda x: x.reshape(8, 3), (_M,), 3),
    Case("reshape", lambda x: x.reshape(1, 4, 1, 6), (_M,), 2),
    Case("reshape", lambda x: x.reshape(8, 3), (_ones(6, 4),), 1),
    Case("reshape", lambda x: x.reshape(2, 12), (_T,), 3),
    Case("tile", lambda x: lax.tile(x, (2, 1)), (_M,), 3),
    Case("tile", lambda x: lax.tile(x, (3, 2)), (_M,), 4),
    Case("stack", lambda x, y: jnp.stack([x, y], 1), (_M, _M), 2),
    Case("unstack", lambda x: jnp.unstack(x, axis=1), (_T,), 2),
]

# ---------------------------------------------------------------------------------- dots and reductions

_DOTS = ["ij,jk->ik", "bij,bjk->bik", "bqhd,bkhd->bhqk", "i,i->", "ij,kl->ikjl", "abij,jbka->abik"]
SIZES = {"b": 2, "i": 4, "j": 6, "k": 3, "q": 2, "h": 2, "d": 4, "l": 2, "a": 2}
_GROUPS = jnp.array([3, 0, 2, 2])
_RAGGED = lax.RaggedDotDimensionNumbers


def _einsum(text: str) -> Case:
    terms = text.split("->")[0].split(",")
    operands = tuple(_ones(*[SIZES[c] for c in term]) for term in terms)
    return Case("dot_general", lambda x, y: jnp.einsum(text, x, y), operands, len({*terms[0], *terms[1]}))


def _ragged(lhs: tuple[int, ...], rhs: tuple[int, ...], sizes: Any, numbers: Any, factors: int) -> Case:
    args = (_R.normal(size=lhs).astype(np.float32), _R.normal(size=rhs).astype(np.float32), sizes)
    fn = lambda x, y, g: lax.ragged_dot_general(x, y, g, numbers)  # noqa: E731
    return Case("ragged_dot_general", fn, args, factors, exact=True)


def _scaled_dot(*operands: Any) -> Any:
    numbers = (((2,), (2,)), ((0,), (0,)))
    return _private("lax.scaled_dot:scaled_dot_p").bind(
        *operands, dimension_numbers=numbers, preferred_element_type=np.dtype(jnp.bfloat16)
    )


DOTS = [
    *[_einsum(text) for text in _DOTS],
    Case("scaled_dot", _scaled_dot, (_ones(2, 4, 8), _ones(2, 6, 8), _ones(2, 4, 4), _ones(2, 6, 2)), 4),
    _ragged((8, 4), (4, 4, 6), _GROUPS, _RAGGED((((1,), (1,)), ((), ())), [0], [0]), 4),
    _ragged((8, 4), (8, 6), _GROUPS, _RAGGED((((0,), (0,)), ((), ())), [0], []), 4),
    _ragged((8, 4, 2), (8, 2, 6), _GROUPS, _RAGGED((((2,), (1,)), ((0,), (0,))), [0], []), 4),
    _ragged((2, 8, 4), (4, 2, 4, 6), _GROUPS, _RAGGED((((2,), (2,)), ((0,), (1,))), [1], [0]), 5),
    _ragged((2, 8, 4), (4, 4, 6), jnp.stack([_GROUPS, _GROUPS + 1]), _RAGGED((((2,), (1,)), ((), ())), [1], [0]), 5),
]

REDUCTIONS = [
    Case("reduce_sum", lambda x: x.sum((0, 2)), (_T,), 3),
    Case("reduce_prod", lambda x: x.prod(1), (_T,), 3),
    Case("reduce_max", lambda x: x.max((1, 2)), (_T,), 3),
    Case("reduce_min", lambda x: x.min(0), (_T,), 3),
    Case("reduce_and", lambda x: (x > 0.5).all(1), (_T,), 3),
    Case("reduce_or", lambda x: (x > 0.5).any((0, 1)), (_T,), 3),
]
UNCOMBINED = [
    Case("argmax", lambda x: lax.argmax(x, 1, jnp.int32), (_T,), 2),
    Case("argmin", lambda x: lax.argmin(x, 1, jnp.int32), (_T,), 2),
    Case("reduce_xor", lambda x: lax.reduce_xor(x.astype(jnp.uint32), (1,)), (_T,), 2),
    Case("reduce", lambda x: lax.reduce(x, jnp.float32(1), lambda a, b: a * b + 1, (1,)), (_T,), 2),
]

# ---------------------------------------------------------------------------- convolutions and windows


def _conv(x: tuple[int, ...], w: tuple[int, ...], factors: int, halos: int = 0, **options: Any) -> Case:
    padding = options.pop("padding", "SAME")
    strides = options.pop("strides", (1,) * (len(x) - 2))
    fn = lambda a, b: lax.conv_general_dilated(a, b, strides, padding, **options)  # noqa: E731
    return Case("conv_general_dilated", fn, (_ones(*x), _ones(*w)), factors, halos=halos)


CONVOLUTIONS = {
    "plain": _conv((2, 4, 6), (6, 4, 3), 3, 1),
    "strided": _conv((2, 4, 8), (6, 4, 3), 3, 1, strides=(2,)),
    "strided_valid": _conv((2, 4, 6), (6, 4, 3), 3, 1, strides=(2,), padding="VALID"),
    "valid": _conv((2, 4, 8), (6, 4, 3), 3, 1, padding="VALID"),
    "dilated_window": _conv((2, 4, 8), (6, 4, 3), 3, 1, rhs_dilation=(2,)),
    "transposed": _conv((2, 4, 4), (6, 4, 3), 3, 1, lhs_dilation=(2,), padding=[(1, 2)]),
    "transposed_patches": _conv((2, 4, 4), (6, 4, 2), 4, lhs_dilation=(2,), padding=[(1, 1)]),
    "pointwise": _conv((2, 4, 6, 3), (2, 4, 1, 1), 5),
    "pointwise_strided": _conv((2, 4, 6), (2, 4, 1), 4, strides=(2,)),
    "patches": _conv((2, 8, 6, 3), (4, 2, 3, 5), 5, dimension_numbers=("NHWC", "HWIO", "NHWC"), strides=(4, 2),
                     padding=[(0, 0), (0, 0)]),
    "channels_last": _conv((2, 4, 6, 4), (3, 3, 4, 6), 3, 2, dimension_numbers=("NHWC", "HWIO", "NHWC")),
    "depthwise": _conv((2, 4, 6), (8, 1, 3), 3, 1, feature_group_count=4),
    "groups_of_several": _conv((2, 4, 6), (6, 2, 3), 4, 1, feature_group_count=2),
    "batch_groups": _conv((4, 6, 6), (8, 6, 3), 3, 1, batch_group_count=4),
    "batch_groups_of_several": _conv((8, 6, 5), (4, 6, 3), 3, 1, batch_group_count=4),
}  # fmt: skip
_W = _ones(2, 8, 4)
_POOL = ((1, 2, 1), (1, 2, 1))


def max_pool(x: Any) -> Any:
    """Windows of two rows that do not overlap."""
    return lax.reduce_window(x, -jnp.inf, lax.max, *_POOL, "VALID")


def _overlapping(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 2, 1), "SAME")


def _tangent(pool: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.jvp(pool, (x,), (x,))[1]


def _select_and_scatter(source: Any, x: Any) -> Any:
    bound = _private("lax.windowed_reductions:_select_and_scatter")
    return bound(x, lax.ge, *_POOL, ((0, 0),) * 3, source, jnp.float32(0), lax.add)


WINDOWS = [
    Case("reduce_window_max", max_pool, (_W,), 3),
    Case("reduce_window_max", _overlapping, (_W,), 2, halos=1),
    Case("reduce_window_min", lambda x: lax.reduce_window(x, jnp.inf, lax.min, *_POOL, "SAME"), (_W,), 3),
    Case(
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME"), (_W,), 2, halos=1,
    ),
    Case(
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), [(0, 0), (4, 0), (0, 0)], None, (1, 2, 1)),
        (_W,), 2, halos=1,
    ),
    Case("reduce_window", lambda x: lax.reduce_window(x, jnp.float32(1), lax.mul, *_POOL, "VALID"), (_W,), 3),
    Case("select_and_scatter_add", jax.grad(lambda x: (max_pool(x) ** 2).sum()), (_W,), 3),
    Case("select_and_scatter_add", jax.grad(lambda x: (_overlapping(x) ** 2).sum()), (_W,), 2),
    Case("select_and_scatter", lambda s, x: _select_and_scatter(s, x), (max_pool(_W), _W), 3),
    Case("select_and_gather_add", _tangent(max_pool), (_W,), 3),
    Case("select_and_gather_add", _tangent(_overlapping), (_W,), 2, halos=1),
]  # fmt: skip

# -------------------------------------------------------------------------------------- along one dim

_L = _ones(2, 6, 4)
ALONG = [
    Case("cumsum", lambda x: lax.cumsum(x, 1), (_L,), 2),
    Case("cumsum", lambda x: lax.cumsum(x, 0, reverse=True), (_L,), 2),
    Case("cumprod", lambda x: lax.cumprod(x, 1), (_L,), 2),
    Case("cummax", lambda x: lax.cummax(x, 1), (_L,), 2),
    Case("cummin", lambda x: lax.cummin(x, 2), (_L,), 2),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (_L,), 2),
    Case("sort", lambda x: lax.sort(x, dimension=1), (_L,), 2),
    Case("sort", lambda x: lax.sort((x, -x), dimension=2, num_keys=1), (_L,), 2),
    Case("top_k", lambda x: lax.top_k(x, 2), (_L,), 2),
    Case("approx_top_k", lambda x: lax.approx_max_k(x, 2), (_L,), 2),
    Case("fft", lambda x: jnp.fft.rfft(x), (_L,), 2),
    Case("fft", lambda x: jnp.fft.fft2(x), (_L,), 1),
    Case("fft", lambda x: jnp.fft.irfft(x), (_L,), 2),
]

# --------------------------------------------------------------------------------------------- matrices

_A = _R.normal(size=(2, 3, 3)).astype(np.float32)
_SPD = (_A @ _A.transpose(0, 2, 1) + 3 * np.eye(3)).astype(np.float32)
_TALL = _R.normal(size=(2, 4, 3)).astype(np.float32)
_ROW = _R.normal(size=(2, 3)).astype(np.float32)


def _matrix(name: str, fn: Callable[..., Any], *args: Any, factors: int = 1) -> Case:
    return Case(name, fn, tuple(jnp.asarray(a) for a in args), factors, exact=True)


MATRICES = [
    _matrix("cholesky", lambda a: lax.linalg.cholesky(a, symmetrize_input=False), _SPD),
    _matrix("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), _SPD, _A, factors=2),
    _matrix("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b), _SPD, _TALL, factors=2),
    _matrix("lu", lax.linalg.lu, _A),
    _matrix("qr", lambda a: lax.linalg.qr(a, full_matrices=False), _TALL),
    _matrix("geqrf", lambda a: _private("lax.linalg:geqrf")(a), _TALL),
    _matrix("geqp3", lambda a, p: _private("lax.linalg:geqp3")(a, p), _TALL, np.zeros((2, 3), np.int32)),
    _matrix(
        "cholesky_update", lambda r, w: _private("lax.linalg:cholesky_update")(r, w), np.eye(3), _ROW[0], factors=0
    ),
    _matrix("eigh", lambda a: lax.linalg.eigh(a, symmetrize_input=False), _SPD),
    _matrix("eig", lax.linalg.eig, _A),
    _matrix("svd", lambda a: lax.linalg.svd(a, full_matrices=False), _TALL),
    _matrix("schur", lax.linalg.schur, _A),
    _matrix("hessenberg", lax.linalg.hessenberg, _A),
    _matrix("householder_product", lax.linalg.householder_product, _A, _ROW),
    _matrix("ormqr", lambda a, t, c: _private("lax.linalg:ormqr")(a, t, c), _A, _ROW, _A, factors=2),
    _matrix("tridiagonal", lax.linalg.tridiagonal, _SPD),
    _matrix("tridiagonal_solve", lax.linalg.tridiagonal_solve, _ROW, _ROW + 4, _ROW, _A, factors=2),
    _matrix("symmetric_product", lax.linalg.symmetric_product, _A, _SPD),
    _matrix(
        "lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 3), np.array([[1, 2, 2]] * 2),
    ),
]

# ----------------------------------------------------------------------------------------- random numbers

_KEY, _KEYS = jax.random.key(3), jax.random.split(jax.random.key(1), 4)
_WORDS = jnp.arange(8, dtype=jnp.uint32)
RANDOM = [
    Case("random_bits", lambda k: jax.random.bits(k, (4, 6)), (_KEY,), 2, exact=True),
    Case("random_bits", jax.vmap(lambda k: jax.random.bits(k, (2,))), (_KEYS,), 2, exact=True),
    Case("random_split", lambda k: jax.random.split(k, (4, 3)), (_KEY,), 2, exact=True),
    Case("random_split", jax.vmap(lambda k: jax.random.split(k, 2)), (_KEYS,), 2, exact=True),
    Case("random_unwrap", lambda k: jax.random.key_data(k), (_KEYS,), 1, exact=True),
    Case("random_wrap", lambda w: jax.random.wrap_key_data(w), (_WORDS.reshape(4, 2),), 1, True),
    Case("random_seed", jax.vmap(jax.random.key), (jnp.arange(4),), 1, exact=True),
    Case("random_clone", jax.random.clone, (_KEYS,), 1, exact=True),
    Case("random_fold_in", jax.vmap(lambda k, i: jax.random.fold_in(k, i)), (_KEYS, _WORDS[:4]), 1, True),
    *[
        Case(name, lambda *xs, n=name: _private(f"random.{n}:{n}_p").bind(*xs), (_WORDS[:6],) * count, 1)
        for name, count in (("threefry2x32", 4), ("threefry4x32", 8), ("philox2x32", 3), ("philox4x32", 6))
    ],
    Case("iota_2x32_shape", lambda: _private("random.prng:iota_2x32_shape")((4, 6)), (), 2),
]  # fmt: skip

# --------------------------------------------------------------------------------- computed positions

_TABLE, _IDS = _ones(6, 4), jnp.zeros((2, 3), jnp.int32)
_UPDATES, _AT = _ones(2, 3, 4), jnp.int32(3)
_SLICES = lax.GatherDimensionNumbers((1, 2), (), (0,))

_FLOATS = _R.normal(size=(6, 4)).astype(np.float32), _R.normal(size=(3, 4)).astype(np.float32)
_PLACES = jnp.array([[0], [2], [6]])  # the last is out of range
_ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))

INDEXED = [
    *[
        Case("gather", lambda t, i, m=m: t.at[i].get(mode=m), (_TABLE, _IDS), 4)
        for m in ("fill", "clip", "promise_in_bounds")
    ],
    Case("gather", lambda x, i: jnp.take_along_axis(x, i, -1), (_T, jnp.zeros((2, 3, 2), jnp.int32)), 4),
    Case("gather", lambda x, i: jnp.take(x, i, axis=1), (_TABLE, _IDS), 4),
    Case("gather", lambda x, i: x[i, i], (_TABLE, _IDS), 4),
    Case("gather", lambda x, i: x[:, i[0]], (_TABLE, _IDS), 3),
    Case("gather", lambda x, i: jnp.take(x > 0, i, axis=0), (_TABLE, _IDS), 4),
    Case("gather", lambda x, i: jnp.take(x.astype(jnp.int32), i, axis=0), (_TABLE, _IDS), 4),
    Case("gather", lambda x, i: lax.gather(x, i[..., :1], _SLICES, (1, 4), mode="clip"), (_TABLE, _IDS), 3),
    Case("gather", lambda x, i: lax.gather(x, i[..., :1], _SLICES, (3, 4), mode="clip"), (_TABLE, _IDS), 2),
    *[
        Case("scatter-add", lambda t, i, u, m=m: t.at[i].add(u, mode=m), (_TABLE, _IDS, _UPDATES), 4)
        for m in ("drop", "clip", "promise_in_bounds")
    ],
    *[
        Case(f"scatter-{name}", lambda t, i, u, f=f: getattr(t.at[i], f)(u), (_TABLE, _IDS, _UPDATES), 4)
        for f, name in (("multiply", "mul"), ("min", "min"), ("max", "max"), ("subtract", "sub"))
    ],
    Case("scatter", lambda t, i, u: lax.scatter(t, i, u, _ROWS), (_FLOATS[0], _PLACES, _FLOATS[1]), 2, True),
    Case("scatter", lambda t, u: t.at[2:4].set(u), (_TABLE, _ones(2, 4))),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 4)), (_TABLE, jnp.int32(1)), 1),
    Case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (_TABLE, _TABLE[:2], _AT), 1),
    Case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (_TABLE, _TABLE[:1], _AT), 1),
    Case("dynamic_update_slice", lambda x, u: lax.dynamic_update_slice(x, u, (3, 0)), (_TABLE, _TABLE[:1]), 2),
]  # fmt: skip

# Covered primitives without a case, each with the reason.
UNPROVED = {
    "random_gamma": "a sample depends on its place, as bits do; tests/cpu8 holds split samples against whole ones",
    "custom_partitioning": "the rule is the user's; test_rules_kernels proves one",
    "pvary": "traced inside shard_map alone, which is opaque",
    "to_edtype": "traced for extended dtypes that an application defines",
    "from_edtype": "traced for extended dtypes that an application defines",
    "with_memory_space_constraint": "traced for memories that CPUs do not have",
    "zeros_like": "jax registers it without a shape rule: it cannot be traced, only met while differentiating",
    "relayout": "moves between explicit memory tilings, which CPUs do not have",
}

ALL = [
    *ELEMENTWISE, *SHAPES, *DOTS, *REDUCTIONS, *UNCOMBINED, *CONVOLUTIONS.values(), *WINDOWS, *ALONG, *MATRICES,
    *RANDOM, *INDEXED,
]  # fmt: skip
