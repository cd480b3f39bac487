"""Programs of one operation each: what emission is measured on.

Every dim that may be split is a multiple of 16, so that meshes of eight divide it, and the sizes of a
program's dims differ where they can, so that bytes tell what was moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshplan.program import Call, Op, Program, trace


@dataclass(frozen=True, slots=True)
class Micro:
    """`fn(*args)` holds one equation of `primitive`, whose operands are the arguments (or literals)."""

    name: str
    primitive: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def program(self) -> tuple[Program, Op]:
        """Traced, with the operation in question."""
        program = trace(Call(step=self.fn, args=self.args, kwargs={}))
        return program, next(op for op in program.ops if op.primitive == self.primitive)


def arg(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


I32, BF16, C64, BOOL, U32 = jnp.int32, jnp.bfloat16, jnp.complex64, jnp.bool_, jnp.uint32


def _elementwise() -> list[Micro]:
    two = (arg(64, 48), arg(64, 48))
    return [
        Micro("add", "add", lax.add, two),
        Micro("exp_bf16", "exp", lax.exp, (arg(64, 48, dtype=BF16),)),
        Micro("select", "select_n", lambda p, a, b: lax.select_n(p, a, b), (arg(64, 48, dtype=BOOL), *two)),
        Micro("convert", "convert_element_type", lambda x: x.astype(BF16), (arg(64, 48),)),
        Micro("bits", "bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, I32), (arg(64, 48),)),
        Micro("clamp", "clamp", lambda x: lax.clamp(0.0, x, 1.0), (arg(64, 48),)),
    ]


def _products() -> list[Micro]:
    mat = (((1,), (0,)), ((), ()))
    batched = (((2,), (1,)), ((0,), (0,)))
    double = (((1, 2), (0, 1)), ((), ()))
    ragged_weights = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    ragged = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    return [
        Micro("dot", "dot_general", lambda a, b: lax.dot_general(a, b, mat), (arg(64, 128), arg(128, 96))),
        Micro(
            "dot_bf16", "dot_general", lambda a, b: lax.dot_general(a, b, mat),
            (arg(64, 128, dtype=BF16), arg(128, 96, dtype=BF16)),
        ),
        Micro(
            "dot_int", "dot_general", lambda a, b: lax.dot_general(a, b, mat, preferred_element_type=I32),
            (arg(64, 128, dtype=jnp.int8), arg(128, 96, dtype=jnp.int8)),
        ),
        Micro(
            "dot_batched", "dot_general", lambda a, b: lax.dot_general(a, b, batched),
            (arg(16, 64, 32), arg(16, 32, 48)),
        ),
        Micro(
            "dot_double", "dot_general", lambda a, b: lax.dot_general(a, b, double), (arg(64, 32, 16), arg(32, 16, 48))
        ),
        Micro(
            "ragged_dot_weights", "ragged_dot_general", lambda a, b, g: lax.ragged_dot_general(a, b, g, ragged_weights),
            (arg(128, 64), arg(128, 48), arg(16, dtype=I32)),
        ),
        Micro(
            "ragged_dot", "ragged_dot_general", lambda a, b, g: lax.ragged_dot_general(a, b, g, ragged),
            (arg(128, 64), arg(16, 64, 48), arg(16, dtype=I32)),
        ),
    ]


def _conv(x: Any, w: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("padding", "SAME")
    return lax.conv_general_dilated(
        x, w, kwargs.pop("strides", (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"), **kwargs
    )


def _weights(weights: Any, groups: int = 1) -> Callable[..., Any]:
    """The gradient of a convolution's weights, of its input and the result's cotangent."""

    def fn(x: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda w: _conv(x, w, feature_group_count=groups), weights)(g)[0]

    return fn


def _inputs(image: Any, groups: int = 1, strides: tuple[int, int] = (1, 1)) -> Callable[..., Any]:
    """The gradient of a convolution's input, of its weights and the result's cotangent."""

    def fn(w: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda x: _conv(x, w, feature_group_count=groups, strides=strides), image)(g)[0]

    return fn


def _convolutions() -> list[Micro]:
    image, little = arg(32, 16, 16, 32), arg(32, 8, 8, 16)
    name = "conv_general_dilated"
    return [
        Micro("conv", name, _conv, (image, arg(3, 3, 32, 64))),
        Micro("conv_1x1", name, _conv, (image, arg(1, 1, 32, 64))),
        Micro("conv_strided", name, lambda x, w: _conv(x, w, strides=(2, 2)), (image, arg(3, 3, 32, 64))),
        Micro("conv_dilated", name, lambda x, w: _conv(x, w, rhs_dilation=(2, 2)), (image, arg(3, 3, 32, 64))),
        Micro(
            "conv_transposed", name, lambda x, w: _conv(x, w, lhs_dilation=(2, 2), padding=((1, 2), (1, 2))),
            (image, arg(3, 3, 32, 64)),
        ),
        Micro("conv_groups4", name, lambda x, w: _conv(x, w, feature_group_count=4), (image, arg(3, 3, 8, 64))),
        Micro("conv_groups16", name, lambda x, w: _conv(x, w, feature_group_count=16), (image, arg(3, 3, 2, 64))),
        Micro("conv_depthwise", name, lambda x, w: _conv(x, w, feature_group_count=32), (image, arg(3, 3, 1, 32))),
        Micro("conv_multiplied", name, lambda x, w: _conv(x, w, feature_group_count=32), (image, arg(3, 3, 1, 64))),
        Micro("conv_batch_groups", name, lambda x, w: _conv(x, w, batch_group_count=16), (little, arg(3, 3, 16, 32))),
        Micro("conv_batch_groups32", name, lambda x, w: _conv(x, w, batch_group_count=32), (little, arg(3, 3, 16, 32))),
        Micro("conv_weights", name, _weights(arg(3, 3, 32, 64)), (image, arg(32, 16, 16, 64))),
        Micro("conv_weights_groups4", name, _weights(arg(3, 3, 8, 64), 4), (image, arg(32, 16, 16, 64))),
        Micro("conv_weights_depthwise", name, _weights(arg(3, 3, 1, 32), 32), (image, arg(32, 16, 16, 32))),
        Micro("conv_inputs_groups4", name, _inputs(image, 4), (arg(3, 3, 8, 64), arg(32, 16, 16, 64))),
        Micro("conv_inputs_strided", name, _inputs(image, 1, (2, 2)), (arg(3, 3, 32, 64), arg(32, 8, 8, 64))),
        Micro("conv_bf16", name, _conv, (arg(32, 16, 16, 32, dtype=BF16), arg(3, 3, 32, 64, dtype=BF16))),
    ]


def _reductions() -> list[Micro]:
    x, b = arg(64, 48, 32), arg(64, 48, 32, dtype=BOOL)
    out = [
        Micro(f"{name}_{axis}", name, lambda x, p=prim, a=axis: p.bind(x, axes=(a,)), (x,))
        for name, prim in (("reduce_max", lax.reduce_max_p), ("reduce_prod", lax.reduce_prod_p))
        for axis in (0, 2)
    ]
    return [
        Micro("reduce_sum_0", "reduce_sum", lambda x: jnp.sum(x, 0), (x,)),
        Micro("reduce_sum_2", "reduce_sum", lambda x: jnp.sum(x, 2), (x,)),
        Micro("reduce_sum_both", "reduce_sum", lambda x: jnp.sum(x, (0, 2)), (x,)),
        Micro("reduce_sum_int", "reduce_sum", lambda x: jnp.sum(x, 0), (arg(64, 48, 32, dtype=I32),)),
        *out,
        Micro("reduce_and", "reduce_and", lambda x: jnp.all(x, 0), (b,)),
        Micro("reduce_or", "reduce_or", lambda x: jnp.any(x, 0), (b,)),
        Micro("argmax", "argmax", lambda x: lax.argmax(x, 1, I32), (x,)),
        Micro("argmin_last", "argmin", lambda x: lax.argmin(x, 2, I32), (x,)),
    ]


def _windows() -> list[Micro]:
    x = arg(32, 16, 16, 48)
    dims, strides = (1, 2, 2, 1), (1, 2, 2, 1)

    def pool(init: float, op: Any) -> Callable[[Any], Any]:
        return lambda x: lax.reduce_window(x, init, op, dims, strides, "VALID")

    def unpool(g: Any, x: Any) -> Any:
        from jax._src.lax import windowed_reductions as wr

        return wr._select_and_scatter_add(g, x, lax.ge_p, dims, strides, ((0, 0),) * 4)

    def tangent(t: Any, x: Any) -> Any:
        from jax._src.lax import windowed_reductions as wr

        return wr._select_and_gather_add(
            t, x, lax.ge_p, dims, strides, ((0, 0),) * 4, (1,) * 4, (1,) * 4
        )

    return [
        Micro("pool_sum", "reduce_window_sum", pool(0.0, lax.add), (x,)),
        Micro("pool_max", "reduce_window_max", pool(-jnp.inf, lax.max), (x,)),
        Micro("unpool", "select_and_scatter_add", unpool, (arg(32, 8, 8, 48), x)),
        Micro("pool_tangent", "select_and_gather_add", tangent, (x, x)),
    ]


def _ordered() -> list[Micro]:
    x = arg(64, 48, 32)
    return [
        *(Micro(f"cumsum_{d}", "cumsum", lambda x, d=d: lax.cumsum(x, d), (x,)) for d in (0, 1, 2)),
        Micro("cumprod", "cumprod", lambda x: lax.cumprod(x, 1), (x,)),
        Micro("cummax", "cummax", lambda x: lax.cummax(x, 1, reverse=True), (x,)),
        Micro("cumlogsumexp", "cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (x,)),
        Micro("sort", "sort", lambda x: lax.sort(x, dimension=1), (x,)),
        Micro("sort_last", "sort", lambda x: lax.sort(x, dimension=2), (x,)),
        Micro(
            "sort_pairs", "sort", lambda x, i: lax.sort((x, i), dimension=1, num_keys=1),
            (x, arg(64, 48, 32, dtype=I32)),
        ),
        Micro("top_k", "top_k", lambda x: lax.top_k(x, 4), (x,)),
        Micro("top_k_2d", "top_k", lambda x: lax.top_k(x, 4), (arg(64, 48),)),
        Micro("approx_top_k", "approx_top_k", lambda x: lax.approx_max_k(x, 4), (arg(64, 1024),)),
    ]


def _indexing() -> list[Micro]:
    table, rows, big = arg(256, 64), arg(32, 16, 64), arg(64, 48, 32)

    return [
        Micro("lookup", "gather", _lookup, (table, arg(32, 16, 1, dtype=I32))),
        Micro("lookup_bf16", "gather", _lookup, (arg(256, 64, dtype=BF16), arg(32, 16, 1, dtype=I32))),
        Micro("take_along", "gather", _take_along, (big, arg(64, 48, 16, 1, dtype=I32))),
        Micro("windows", "gather", _slices, (big, arg(64, 1, dtype=I32))),
        Micro("segment_sum", "scatter-add", _scatter("scatter_add"), (table, arg(32, 16, 1, dtype=I32), rows)),
        Micro("scatter_max", "scatter-max", _scatter("scatter_max"), (table, arg(32, 16, 1, dtype=I32), rows)),
        Micro("scatter_mul", "scatter-mul", _scatter("scatter_mul"), (table, arg(32, 16, 1, dtype=I32), rows)),
        Micro("scatter_set", "scatter", _scatter("scatter"), (table, arg(32, 16, 1, dtype=I32), rows)),
        Micro("scatter_row", "scatter", _scatter("scatter"), (table, arg(1, dtype=I32), arg(64))),
        Micro("scatter_row_clipped", "scatter", _scatter("scatter", "clip"), (table, arg(1, dtype=I32), arg(64))),
        Micro("add_row", "scatter-add", _scatter("scatter_add"), (table, arg(1, dtype=I32), arg(64))),
        Micro("read_row", "gather", _lookup, (table, arg(1, dtype=I32))),
        Micro("scatter_batched", "scatter-add", _scatter_along, (big, arg(64, 48, 16, 1, dtype=I32), arg(64, 48, 16))),
        Micro(
            "slice_at", "dynamic_slice", lambda x, i: lax.dynamic_slice(x, (0, i, 0), (64, 16, 32)),
            (big, arg(dtype=I32)),
        ),
        Micro(
            "slice_row", "dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0, 0), (1, 48, 32)),
            (big, arg(dtype=I32)),
        ),
        Micro(
            "update_at", "dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)),
            (big, arg(64, 16, 32), arg(dtype=I32)),
        ),
        Micro(
            "update_row_inside", "dynamic_update_slice",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (lax.clamp(0, i, 63), 0, 0)),
            (big, arg(1, 48, 32), arg(dtype=I32)),
        ),
        Micro(
            "update_row", "dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0, 0)),
            (big, arg(1, 48, 32), arg(dtype=I32)),
        ),
    ]


def _lookup(table: Any, ids: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(offset_dims=(ids.ndim - 1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, ids, numbers, (1, table.shape[1]), mode="promise_in_bounds")


def _take_along(x: Any, ids: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(2,), start_index_map=(2,), operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    return lax.gather(x, ids, numbers, (1, 1, 1), mode="promise_in_bounds")


def _slices(x: Any, ids: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(1,), operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return lax.gather(x, ids, numbers, (1, 16, x.shape[2]), mode="promise_in_bounds")


def _scatter(name: str, mode: str = "promise_in_bounds") -> Callable[..., Any]:
    def fn(table: Any, ids: Any, rows: Any) -> Any:
        lead = rows.ndim - 1
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(lead,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
        )
        return getattr(lax, name)(table, ids, rows, numbers, mode=mode)

    return fn


def _scatter_along(x: Any, ids: Any, rows: Any) -> Any:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(), inserted_window_dims=(2,), scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1), scatter_indices_batching_dims=(0, 1),
    )
    return lax.scatter_add(x, ids, rows, numbers, mode="promise_in_bounds")


def _moves() -> list[Micro]:
    x = arg(64, 48, 32)
    return [
        Micro("transpose", "transpose", lambda x: lax.transpose(x, (2, 0, 1)), (x,)),
        Micro("broadcast", "broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (16, 64, 48), (1, 2)), (arg(64, 48),)),
        Micro("reshape_merge", "reshape", lambda x: x.reshape(64, 48 * 32), (x,)),
        Micro("reshape_split", "reshape", lambda x: x.reshape(64, 16, 3, 32), (x,)),
        Micro("slice", "slice", lambda x: lax.slice(x, (0, 8, 0), (64, 24, 32)), (x,)),
        Micro("pad", "pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (8, 8, 0), (0, 0, 0))), (x,)),
        Micro("concatenate", "concatenate", lambda a, b: lax.concatenate((a, b), 1), (x, x)),
        Micro("split", "split", lambda x: lax.split(x, (16, 32), 1), (x,)),
        Micro("rev", "rev", lambda x: lax.rev(x, (1,)), (x,)),
        Micro("iota", "iota", lambda: lax.broadcasted_iota(I32, (64, 48), 1), ()),
        Micro("squeeze", "squeeze", lambda x: lax.squeeze(x, (1,)), (arg(64, 1, 48),)),
    ]


def _linear_algebra() -> list[Micro]:
    square, tall = arg(16, 64, 64), arg(16, 64, 32)
    return [
        Micro("cholesky", "cholesky", lambda a: lax.linalg.cholesky(a, symmetrize_input=False), (square,)),
        Micro(
            "triangular_solve", "triangular_solve",
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (square, tall),
        ),
        Micro("lu", "lu", lambda a: lax.linalg.lu(a), (square,)),
        Micro("qr", "qr", lambda a: lax.linalg.qr(a, full_matrices=False), (tall,)),
        Micro(
            "householder", "householder_product", lambda a, t: lax.linalg.householder_product(a, t),
            (tall, arg(16, 32)),
        ),
        Micro("eigh", "eigh", lambda a: lax.linalg.eigh(a, symmetrize_input=False), (square,)),
        Micro("svd", "svd", lambda a: lax.linalg.svd(a, full_matrices=False), (tall,)),
        Micro("eig", "eig", lambda a: lax.linalg.eig(a), (square,)),
        Micro(
            "tridiagonal_solve", "tridiagonal_solve", lambda a, b, c, d: lax.linalg.tridiagonal_solve(a, b, c, d),
            (arg(16, 64), arg(16, 64), arg(16, 64), arg(16, 64, 8)),
        ),
    ]


def _transforms() -> list[Micro]:
    return [
        Micro("fft", "fft", lambda x: lax.fft(x, "FFT", (256,)), (arg(64, 256, dtype=C64),)),
        Micro("fft_3d", "fft", lambda x: lax.fft(x, "FFT", (64,)), (arg(16, 32, 64, dtype=C64),)),
        Micro("fft_2", "fft", lambda x: lax.fft(x, "IFFT", (32, 64)), (arg(16, 32, 64, dtype=C64),)),
        Micro("rfft", "fft", lambda x: lax.fft(x, "RFFT", (256,)), (arg(64, 256),)),
        Micro("irfft", "fft", lambda x: lax.fft(x, "IRFFT", (256,)), (arg(64, 129, dtype=C64),)),
    ]


def _random() -> list[Micro]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 64))
    return [
        Micro("random_bits", "random_bits", lambda k: jax.random.bits(k, (64, 48)), (key,)),
        Micro("split_keys", "random_split", lambda k: jax.random.split(k, 64), (key,)),
        Micro("bits_of_keys", "random_bits", lambda k: jax.vmap(lambda q: jax.random.bits(q, (48,)))(k), (keys,)),
    ]


def micros() -> Sequence[Micro]:
    """All of them, names unique."""
    families = (
        _elementwise, _products, _convolutions, _reductions, _windows, _ordered, _indexing, _moves, _linear_algebra,
        _transforms, _random,
    )
    return [m for family in families for m in family()]
