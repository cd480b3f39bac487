"""How sums lie in the TPU's tiles, and which of them are scattered because of it: as measured on v5e."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshplan.cost._tiles import Lies, lies, scatters
from tests._programs import f32, graph_of


def scores(x: Any) -> Any:
    return jnp.einsum("bhqd,bhkd->bhqk", x, jnp.cos(x))


def attention(x: Any) -> Any:
    seen, back = jax.nn.softmax(scores(x), -1), scores(jnp.sin(x))
    return (seen * (back - (seen * back).sum(-1, keepdims=True))).sum(0)


def norm(x: Any) -> Any:
    return jnp.sin((x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)).sum(0)


HEADS, ROWS = (16, 4, 512, 64), (16, 512, 512)
SUMS: list[tuple[Any, tuple[int, ...], Lies]] = [
    (attention, HEADS, "columns"), (lambda x: norm(x @ jnp.ones((512, 512))), ROWS, "columns"),
    (norm, ROWS, "rows"), (lambda x: jnp.sin(scores(x)).sum(0), HEADS, "rows"),
    (lambda x: jax.nn.softmax(x, -1).sum(0), (16, 4, 512, 512), "rows"),
    (lambda x: jnp.einsum("bsd,bse->de", x, x), ROWS, "close"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "shape", "how"), SUMS)
def test_a_sum_lies_as_what_makes_it(step: Any, shape: tuple[int, ...], how: Lies):
    graph = graph_of(step, f32(*shape))
    (last,) = [n for n in graph.nodes if n.partial and any(r.value == graph.program.results[0].value
                                                           for r in n.partial.values())]  # fmt: skip
    assert lies(graph.program, last) == how


# (what each device gets, the dim that was split, bytes of an element, how it lies, whether it was scattered)
PIECES = [
    ((64, 1024), 0, 4, "rows", True), ((512, 128), 1, 4, "rows", True), ((512, 128), 1, 2, "rows", False),
    ((8, 64, 256), 1, 2, "rows", True), ((8, 512, 32), 2, 4, "rows", False), ((1, 512, 256), 0, 2, "rows", True),
    ((4, 64, 512), 1, 4, "rows", True), ((4, 512, 64), 2, 4, "rows", False),
    ((4, 64, 512), 1, 4, "columns", False), ((4, 512, 64), 2, 4, "columns", True),
    ((64, 512), 0, 4, "columns", False), ((512, 64), 1, 4, "columns", True),
]  # fmt: skip


@pytest.mark.parametrize(("piece", "dim", "itemsize", "how", "scattered"), PIECES)
def test_pieces_of_whole_tiles_are_scattered(
    piece: tuple[int, ...], dim: int, itemsize: int, how: Lies, scattered: bool
):
    assert scatters(piece, dim, itemsize, how) == scattered
