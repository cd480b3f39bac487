"""Kernels: rules in JAX's own notation, by kernel name; `shard_map` and what it demands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshplan.program import trace
from meshplan.program._trace import Call
from meshplan.rules import OpRule, fixed_specs, parse_rule, rule_for, rule_names
from tests._proof import Traced, equation, prove, random_operands, view_of


def _product(rule: str, **options: Any) -> Any:
    @custom_partitioning
    def product(x: Any, y: Any) -> Any:
        return x @ y

    def partition(mesh: Any, shapes: Any, result: Any) -> Any:
        return mesh, lambda x, y: x @ y, result.sharding, tuple(s.sharding for s in shapes)

    product.def_partition(partition=partition, infer_sharding_from_operands=None, sharding_rule=rule, **options)
    return product


@pytest.mark.parametrize(
    ("rule", "shapes", "sizes"),
    [
        ("i j, j k -> i k", ((4, 6), (6, 8)), (4, 6, 8)),
        ("... i j, ... j k -> ... i k", ((2, 4, 6), (2, 6, 8)), (2, 4, 6, 8)),
    ],
)  # fmt: skip
def test_custom_partitioning_splits_by_the_rule_it_carries(rule: str, shapes: Any, sizes: tuple[int, ...]) -> None:
    fn = _product(rule, reduction_factors=("j",))
    eqn = equation("custom_partitioning", fn, *(jnp.ones(s) for s in shapes))
    found = prove(Traced(eqn, fn), random_operands(eqn))
    assert found.sizes == sizes
    assert found.combine == {len(sizes) - 2: "sum"}


def test_a_wrong_rule_of_a_kernel_is_disproved() -> None:
    fn = _product("i j, j k -> i k", reduction_factors=("j",))
    eqn = equation("custom_partitioning", fn, jnp.ones((4, 4)), jnp.ones((4, 4)))
    text = parse_rule("i j, j k -> i k", reduction_factors=("j",), combine={"j": "max"})
    wrong = rule_for(view_of(eqn), {"custom_partitioning": text})
    with pytest.raises(AssertionError):
        prove(Traced(eqn, fn), random_operands(eqn), wrong)


def test_custom_partitioning_without_a_readable_rule_is_left_to_the_user() -> None:
    eqn = equation("custom_partitioning", _product(lambda *_: "i j, j k -> i k"), jnp.ones((4, 6)), jnp.ones((6, 8)))  # type: ignore[arg-type]
    assert rule_for(view_of(eqn)) is None


def _factor(x: Any) -> Any:
    """LAPACK's Cholesky factorisation by its FFI target; matrices are column-major there."""
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], jnp.int32)
    lead = tuple(range(x.ndim - 2))
    order = (*lead, x.ndim - 1, x.ndim - 2)
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", whole, input_layouts=[order], output_layouts=[order, lead])
    return call(x, uplo=np.uint8(ord("L")))


_CHOLESKY = "... i j -> ... i j, ... need_replication={i, j}"


def test_a_rule_for_one_ffi_target_holds_for_that_target_alone() -> None:
    jax.block_until_ready(jnp.linalg.cholesky(jnp.eye(2)))  # jax binds LAPACK's functions when it first needs one
    matrix = np.eye(3, dtype=np.float32) * 4 + 1
    x = np.stack([matrix * k for k in (1, 2, 3, 4)])
    eqn = equation("ffi_call", _factor, x)
    view = view_of(eqn)
    assert rule_names(view) == ("ffi_call:lapack_spotrf_ffi", "ffi_call")
    assert rule_for(view) is None
    assert rule_for(view, {"ffi_call:another": _CHOLESKY}) is None
    rule = rule_for(view, {"ffi_call:lapack_spotrf_ffi": _CHOLESKY, "ffi_call": "... -> ..., ..."})
    assert rule is not None
    assert rule.operands == (((0,), (), ()),)
    assert "need replication" in rule.whole
    assert prove(Traced(eqn, _factor), [x], rule).sizes == (4,)


def _pallas(x: Any, name: str | None) -> Any:
    from jax.experimental import pallas as pl

    def double(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name=name)(x)


@pytest.mark.parametrize(("name", "found"), [("scaled", "scaled"), (None, "double")])
def test_a_pallas_kernel_is_known_by_its_name(name: str | None, found: str) -> None:
    fn = lambda x: _pallas(x, name)  # noqa: E731
    eqn = equation("pallas_call", fn, jnp.ones((4, 6)))
    assert rule_names(view_of(eqn)) == (f"pallas_call:{found}", "pallas_call")
    rule = rule_for(view_of(eqn), {f"pallas_call:{found}": "i j -> i j"})
    assert isinstance(rule, OpRule)
    assert prove(Traced(eqn, fn), random_operands(eqn), rule).sizes == (4, 6)


def test_a_kernel_without_a_rule_is_whole_and_the_plan_is_told_the_bytes() -> None:
    program = trace(Call(step=lambda x: _factor(x)[0], args=(jnp.ones((1000, 10, 10)),), kwargs={}))
    (note,) = [n for n in program.notes if "ffi_call:lapack_spotrf_ffi" in n]
    assert "0.804 MB per step are not split" in note


def test_shard_map_states_the_specs_it_demands() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    body = lambda a, b: jax.lax.psum(a @ b, "y")  # noqa: E731
    fn = jax.shard_map(body, mesh=mesh, in_specs=(P("x", "y"), P("y")), out_specs=P("x"))
    jaxpr = jax.make_jaxpr(fn)(jnp.ones((8, 4)), jnp.ones((4, 6)))
    (eqn,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "shard_map"]
    fixed = fixed_specs(view_of(eqn))
    assert fixed is not None
    assert fixed.axes == (("x", 4), ("y", 2))
    assert fixed.operands == ((("x",), ("y",)), (("y",), ()))
    assert fixed.results == ((("x",), ()),)
    assert rule_for(view_of(eqn)) is None
    assert fixed_specs(view_of(equation("exp", jnp.exp, jnp.ones(3)))) is None
