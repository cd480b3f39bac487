"""Audits of small sharded programs on eight host devices, against closed forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshplan.core import ArgumentError, Collective, CompileError, MeshError
from meshplan.lower._aot import CompiledModule
from meshplan.lower._aot_export import export_program
from meshplan.lower._aot_here import compile_in_process, compile_jitted
from meshplan.lower._audit import Prediction, audit_compiled, audit_jitted
from meshplan.lower._hlo import collectives, flops

L, B, D, F32 = 3, 64, 128, 4
MakeMesh = Callable[..., Mesh]


def shaped(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def held(mesh: Any, x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def mlp_step(mesh: Any, weight: tuple[Any, ...], gather: bool) -> tuple[Any, list[Any], Any]:
    """A train step over L layers: weights kept as `weight`, batch split over 'data'."""

    def step(ws: list[Any], x: Any) -> tuple[list[Any], Any]:
        def loss(ws: list[Any]) -> Any:
            h = x
            for w in ws:
                w = held(mesh, w) if gather else w
                h = held(mesh, jnp.tanh(held(mesh, h @ w, "data")), "data")
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(ws)
        return [held(mesh, w - 0.1 * g, *weight) for w, g in zip(ws, grads, strict=True)], value

    ws = [shaped(mesh, (D, D), *weight) for _ in range(L)]
    return jax.jit(step, donate_argnums=(0,)), ws, shaped(mesh, (B, D), "data")


# One product forward, two backward, but none for the first layer's input.
MLP_FLOPS = (3 * L - 1) * 2 * (B // 8) * D * D


def test_data_parallel_training_all_reduces_each_weight_once(make_mesh: MakeMesh) -> None:
    step, ws, x = mlp_step(make_mesh(data=8), (), gather=False)
    audit = audit_jitted(step, ws, x)
    assert audit.bytes_by_kind() == {"all-reduce": L * D * D * F32 + F32}
    assert audit.flops == MLP_FLOPS
    assert audit.memory is not None
    assert audit.memory.argument_bytes == L * D * D * F32 + B // 8 * D * F32
    assert audit.memory.alias_bytes == L * D * D * F32


def test_fully_sharded_training_gathers_each_weight_and_sums_its_gradient(make_mesh: MakeMesh) -> None:
    step, ws, x = mlp_step(make_mesh(data=8), ("data",), gather=True)
    audit = audit_jitted(step, ws, x)
    # Forward and backward share a gather; the CPU compiler never emits a reduce-scatter.
    assert audit.bytes_by_kind() == {"all-reduce": L * D * D * F32 + F32, "all-gather": L * D * D * F32}
    assert audit.flops == MLP_FLOPS
    assert {c.axes for c in audit.collectives} == {("data",)}
    assert audit.memory is not None
    assert audit.memory.alias_bytes == L * D * D * F32 // 8
    peak = audit.memory.argument_bytes + audit.memory.output_bytes + audit.memory.temp_bytes - audit.memory.alias_bytes
    assert audit.memory.peak_bytes == peak


def scanned_tensor_parallel(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    def forward(up: Any, down: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> tuple[Any, None]:
            z = held(mesh, jnp.tanh(held(mesh, h @ w[0], "data", "model")), "data", "model")
            return held(mesh, h + held(mesh, z @ w[1], "data"), "data"), None

        return lax.scan(layer, x, (up, down))[0]

    args = (
        shaped(mesh, (L, D, 4 * D), None, None, "model"), shaped(mesh, (L, 4 * D, D), None, "model"),
        shaped(mesh, (B, D), "data"),
    )  # fmt: skip
    return jax.jit(forward), args


def test_a_scan_counts_its_body_once_a_layer(mesh8: Mesh) -> None:
    forward, args = scanned_tensor_parallel(mesh8)
    audit = audit_jitted(forward, *args)
    (reduce,) = audit.collectives
    assert (reduce.kind, reduce.nbytes, reduce.count) == ("all-reduce", B // 4 * D * F32, L)
    assert (reduce.axes, reduce.group_size) == (("model",), 2)
    assert audit.flops == L * 2 * 2 * (B // 4) * D * (4 * D // 2)


def test_a_collective_names_the_line_that_asked_for_it(mesh8: Mesh) -> None:
    forward, args = scanned_tensor_parallel(mesh8)
    lines, first = inspect.getsourcelines(scanned_tensor_parallel)
    line = first + next(i for i, text in enumerate(lines) if "z @ w[1]" in text)
    (reduce,) = audit_jitted(forward, *args).collectives
    assert reduce.source == f"{__file__}:{line}"
    assert reduce.op_name.endswith("dot_general")


def test_an_abstract_mesh_compiles_to_the_same_program(mesh8: Mesh) -> None:
    abstract = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = []
    for mesh in (mesh8, abstract):
        forward, args = scanned_tensor_parallel(mesh)
        found.append(audit_jitted(forward, *args))
    assert found[0].collectives == found[1].collectives
    assert found[0].memory == found[1].memory
    assert found[0].mesh_shape == found[1].mesh_shape


def test_handing_a_program_over_loses_nothing(make_mesh: MakeMesh) -> None:
    step, ws, x = mlp_step(make_mesh(data=8), ("data",), gather=True)
    direct, _, _ = compile_jitted(step, ws, x)
    program = export_program(step, ws, x, platform="cpu")
    handed = compile_in_process(program, jax.devices())
    assert isinstance(direct, CompiledModule)
    assert isinstance(handed, CompiledModule)
    assert collectives(handed.text) == collectives(direct.text)
    assert flops(handed.text) == flops(direct.text)
    assert handed.memory == direct.memory
    assert program.donated == tuple(range(L))


def test_arrays_and_keyword_arguments_serve_as_well_as_shapes(mesh8: Mesh) -> None:
    sharding = NamedSharding(mesh8, P("data", "model"))
    x = jax.device_put(np.ones((8, 8), np.float32), sharding)
    fn = jax.jit(lambda x, *, scale: held(mesh8, x * scale))
    for target in (None, "cpu:8"):
        audit = audit_jitted(fn, x, scale=2.0, target=target)
        assert sum(c.total_bytes for c in audit.collectives) == 2 * 8 * F32 + 8 * 8 * F32
        assert all("data" in s or "P()" in s for s in audit.input_shardings)


def test_shardings_inside_the_function_alone_are_enough(mesh8: Mesh) -> None:
    fn = jax.jit(lambda x: held(mesh8, held(mesh8, x * 2, "data")) * 3)
    for target in (None, "cpu:8"):
        audit = audit_jitted(fn, jax.ShapeDtypeStruct((8, 8), jnp.float32), target=target)
        assert audit.mesh_shape.devices == 8
        assert audit.collectives == () or audit.collectives[0].axes == ("data",)


def test_custom_calls_without_promises_are_handed_over(mesh8: Mesh) -> None:
    def fn(x: Any) -> Any:
        call = jax.ffi.ffi_call("meshplan_test_nobody_has_this", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return held(mesh8, call(held(mesh8, x)), "data")

    program = export_program(jax.jit(fn), shaped(mesh8, (8, 8), "data"), platform="cuda")
    assert b"meshplan_test_nobody_has_this" in program.blob


def test_a_host_callback_is_an_error_that_says_what_to_do(mesh8: Mesh) -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return x

    with pytest.raises(CompileError, match="Remove host callbacks"):
        export_program(jax.jit(fn), shaped(mesh8, (8, 8), "data"), platform="cpu")


def test_host_memory_is_counted_apart(mesh8: Mesh) -> None:
    host = NamedSharding(mesh8, P("data"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=host)
    fn = jax.jit(lambda x: jax.device_put(x, NamedSharding(mesh8, P("data"))) * 2)
    direct, handed = audit_jitted(fn, x), audit_jitted(fn, x, target="cpu:8")
    assert direct.memory == handed.memory
    assert all("pinned_host" in a.input_shardings[0] for a in (direct, handed))


def test_another_number_of_devices_is_an_error_before_any_compile(mesh8: Mesh) -> None:
    forward, args = scanned_tensor_parallel(mesh8)
    with pytest.raises(MeshError, match=r"forward is sharded over 8 devices, h100:4x8 has 32\. Give its arguments"):
        audit_jitted(forward, *args, target="h100:4x8")
    wide = AbstractMesh((8, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    forward, args = scanned_tensor_parallel(wide)
    with pytest.raises(MeshError, match="sharded over 64 devices, this process has 8 of cpu"):
        audit_jitted(forward, *args)


def test_a_function_that_is_not_jitted_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="'plain' is not a jitted function"):

        def plain(x: Any) -> Any:
            return x

        audit_jitted(plain, 1.0)
    with pytest.raises(ArgumentError, match="target is a int"):
        audit_jitted(jax.jit(lambda x: x), 1.0, target=8)  # type: ignore[arg-type]


def test_predictions_are_held_against_the_module(make_mesh: MakeMesh) -> None:
    step, ws, x = mlp_step(make_mesh(data=8), ("data",), gather=True)
    found = audit_jitted(step, ws, x, target="cpu:8")
    assert found.memory is not None
    exact = Prediction(collectives=found.collectives, flops=found.flops, peak_bytes=found.memory.peak_bytes)
    assert audit_jitted(step, ws, x, target="cpu:8", predicted=exact).ok

    scatter = Collective(kind="reduce-scatter", nbytes=2_000_000, group_size=8, axes=("data",))
    wrong = Prediction(collectives=(scatter,), flops=2 * found.flops, peak_bytes=found.memory.peak_bytes * 1.04)
    audit = audit_jitted(step, ws, x, target="cpu:8", predicted=wrong)
    assert not audit.ok
    assert audit.fits
    rows = {m.kind: (m.predicted, m.compiled, m.ratio) for m in audit.mismatches()}
    assert rows == {"reduce-scatter": (2e6, 0.0, 0.0), "flops": (2 * found.flops, found.flops, 0.5)}
    everything = audit.mismatches(relative=0.0, above_bytes=0.0)
    assert [m.kind for m in everything] == ["reduce-scatter", "all-reduce", "all-gather", "peak memory", "flops"]
    assert "MISMATCH     reduce-scatter: predicted 2 MB, compiled 0 B" in str(audit)


def test_the_table_names_kinds_axes_bytes_and_lines(mesh8: Mesh) -> None:
    forward, args = scanned_tensor_parallel(mesh8)
    text = str(audit_jitted(forward, *args, target="cpu:8"))
    assert text.startswith("forward on cpu:8, mesh data=4 x model=2, compiled in ")
    assert "6.29 MFLOP in float32" in text
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("all-reduce"))
    assert row[:9] == ["all-reduce", "model", "2", "3", "8.19", "kB", "24.6", "kB", "f32"]
    assert row[9].startswith("cpu8/test_audit.py:")


def test_time_is_flops_at_peak_plus_each_collective(mesh8: Mesh) -> None:
    from meshplan.machine import Machine, collective_seconds

    machine = Machine.preset("cpu:8")
    forward, args = scanned_tensor_parallel(mesh8)
    audit = audit_jitted(forward, *args, target=machine)
    one = collective_seconds(machine, audit.mesh_shape, "all-reduce", B // 4 * D * F32, ("model",))
    assert audit.compute_seconds == pytest.approx(audit.flops / machine.chip.flops_for("float32"))
    assert audit.collective_seconds == pytest.approx(L * one)
    assert audit.seconds == pytest.approx(audit.flops / machine.chip.flops_for("float32") + L * one)


def test_a_mesh_of_other_size_than_the_machine_is_not_priced(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(data=4)
    compiled, shape, name = compile_jitted(jax.jit(lambda x: held(mesh, x)), shaped(mesh, (8, 8), "data"))
    from meshplan.machine import Machine

    audit = audit_compiled(compiled, name=name, machine=Machine.preset("cpu:8"), mesh_shape=shape)
    assert audit.seconds is None
    assert audit.notes == ("collectives not priced: the mesh data=4 is not the 8 devices of cpu:8",)
    assert "not priced" in str(audit)


@pytest.mark.parametrize(("padding", "stride"), [("SAME", 1), ("VALID", 1), ("SAME", 2)])
def test_the_flops_of_a_compiled_convolution_are_its_taps(make_mesh: Callable[..., Mesh], padding: str, stride: int):
    mesh = make_mesh(data=8)
    x = jax.ShapeDtypeStruct((16, 12, 12, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    w = jax.ShapeDtypeStruct((3, 3, 8, 16), jnp.float32, sharding=NamedSharding(mesh, P()))

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    outs = jax.eval_shape(conv, x, w).shape[1]
    low = (((outs - 1) * stride + 3 - 12) // 2) if padding == "SAME" else 0
    taps = sum(0 <= o * stride + k - max(low, 0) < 12 for o in range(outs) for k in range(3))
    assert audit_jitted(jax.jit(conv), x, w).flops == 2 * (16 // 8) * 16 * 8 * taps**2
