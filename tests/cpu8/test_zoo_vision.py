"""Convolutional, recurrent and vision models compute what they should, learn from real data, and plan."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import _digits, lstm, resnet, unet, vit
from tests._zoo import MESH, case, check_plan, check_shapes, compiled, parameters, train

MODELS = {"lstm": lstm, "resnet": resnet, "unet": unet, "vit": vit}
# every kind of layer once or twice: compiling the rest shows nothing new
SMALL = {"lstm": {}, "resnet": {}, "unet": {"blocks": 0}, "vit": {"layers": 1}}
# steps, most that the last losses may be of the first
LEARNS = {"lstm": (20, 0.7), "resnet": (25, 0.75), "unet": (16, 0.5), "vit": (25, 0.85)}


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_falls_on_real_data(model):
    steps, part = LEARNS[model]
    found = train(MODELS[model].workload("tiny", **SMALL[model]), steps)
    assert np.isfinite(found).all()
    assert max(found[-3:]) < part * found[0]


@pytest.mark.parametrize("model", MODELS)
def test_on_a_given_mesh_the_plan_computes_what_one_device_does(model):
    check_plan(case(MODELS[model].workload, **SMALL[model]), mesh=MESH)


@pytest.mark.parametrize("model", MODELS)
def test_on_the_best_mesh_the_plan_computes_what_one_device_does(model):
    plan = check_plan(case(MODELS[model].workload, **SMALL[model]))
    assert [len(c.mesh.axes) for c in plan.data.candidates] == [1, 2]


@pytest.mark.parametrize("model", MODELS)
def test_real_state_and_batches_have_the_shapes_of_the_arguments(model):
    check_shapes(MODELS[model].workload("tiny"))


@pytest.mark.parametrize(
    ("workload", "published"),
    [
        (vit.workload("base"), 86_567_656),
        (vit.workload("large"), 304_326_632),
        (resnet.workload("resnet18"), 11_689_512),
        (resnet.workload("resnet50"), 25_557_032),
        (resnet.workload("resnet101"), 44_549_160),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_published_sizes_have_the_published_number_of_parameters(workload, published):
    assert parameters(workload) == published
    assert {type(leaf) for leaf in jax.tree.leaves(workload.args)} == {jax.ShapeDtypeStruct}


@pytest.mark.parametrize("model", MODELS)
def test_an_unknown_size_names_the_known_ones(model):
    with pytest.raises(ValueError, match=r"size 'huge' is unknown. Known: tiny, "):
        MODELS[model].workload("huge")


def test_digits_grow_by_whole_pixels_and_fill_every_channel():
    small, large = (next(_digits.batches(4, size, channels)) for size, channels in ((8, 1), (24, 3)))
    assert small["images"].shape == (4, 8, 8, 1)
    assert large["images"].shape == (4, 24, 24, 3)
    assert -1 <= small["images"].min() < small["images"].max() <= 1
    np.testing.assert_array_equal(large["images"][:, 1::3, 2::3, 1], small["images"][..., 0])
    np.testing.assert_array_equal(large["labels"], small["labels"])
    with pytest.raises(ValueError, match=r"size 30 is no multiple of the 8 pixels of a digit\. Nearest: 32"):
        next(_digits.batches(4, 30))


def test_batch_norm_is_that_of_flax_and_moves_the_running_statistics():
    x = 3 + 2 * jax.random.normal(jax.random.key(0), (8, 4, 4, 5))
    theirs = nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0))
    params, stats = {"scale": jnp.ones(5), "bias": jnp.zeros(5)}, {"mean": jnp.zeros(5), "var": jnp.ones(5)}
    ours, moved = jax.jit(resnet.batch_norm)(params, stats, x, 0.9)
    np.testing.assert_allclose(ours, nnx.jit(nnx.BatchNorm.__call__)(theirs, x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moved["mean"], theirs.mean[...], rtol=1e-5)
    np.testing.assert_allclose(moved["var"], theirs.var[...], rtol=1e-4)


def test_a_training_step_moves_every_running_statistic():
    about = case(resnet.workload)
    before, after = about.args[0]["stats"], about.alone[0]["stats"]
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_a_stage_halves_the_pixels_and_doubles_the_channels():
    cfg = resnet.SIZES["resnet50"]
    shapes = resnet.block_shapes(cfg)
    assert [s.stride for s in shapes] == [1] * 3 + [2, 1, 1, 1] + [2, 1, 1, 1, 1, 1] + [2, 1, 1]
    assert [shapes[i].fan_out for i in (0, 3, 7, 13)] == [256, 512, 1024, 2048]
    x = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    params, stats = jax.eval_shape(lambda: resnet.init(jax.random.key(0), cfg))
    logits, moved = jax.eval_shape(lambda p, s, x: resnet.apply(p, s, x, cfg), params, stats, x)
    assert logits.shape == (2, 1000)
    assert jax.tree.structure(moved) == jax.tree.structure(stats)


def test_group_norm_is_that_of_flax():
    x = 3 + 2 * jax.random.normal(jax.random.key(0), (3, 4, 4, 12))
    theirs = nnx.GroupNorm(12, num_groups=4, epsilon=1e-5, rngs=nnx.Rngs(0))
    ours = jax.jit(unet.group_norm, static_argnums=2)(x, {"scale": jnp.ones(12), "bias": jnp.zeros(12)}, 4)
    np.testing.assert_allclose(ours, jax.jit(lambda x: theirs(x))(x), rtol=1e-4, atol=1e-5)


def test_the_noise_is_drawn_anew_at_every_step():
    about = case(unet.workload, **SMALL["unet"])
    keys = [jax.random.key_data(state["key"]) for state in (about.args[0], about.alone[0])]
    assert np.any(keys[0] != keys[1])
    state = {**about.args[0], "key": about.alone[0]["key"]}
    again = compiled(jax.jit(about.workload.step), *about.args)(state, about.args[1])[1]["loss"]
    assert float(again) != float(about.alone[1]["loss"])


def test_an_lstm_layer_is_that_of_flax():
    cell = lstm.init_cell(jax.random.key(0), 6, 5)
    x = jax.random.normal(jax.random.key(1), (3, 7, 6))
    theirs = nnx.OptimizedLSTMCell(6, 5, rngs=nnx.Rngs(0))
    for name, pool in (("dense_i", cell.input), ("dense_h", cell.recurrent)):
        getattr(theirs, name).kernel[...] = pool.reshape(pool.shape[0], -1)
    assert theirs.dense_h.bias is not None
    theirs.dense_h.bias[...] = cell.bias.reshape(-1)
    carry = (jnp.zeros((3, 5)), jnp.zeros((3, 5)))
    found, one = jax.jit(lstm.run_cell)(cell, x), jax.jit(lambda carry, x: theirs(carry, x))
    for time in range(7):
        carry, hidden = one(carry, x[:, time])
        np.testing.assert_allclose(found[:, time], hidden, rtol=1e-4, atol=1e-5)


def test_an_lstm_remembers_what_came_before_and_sees_nothing_later():
    cfg = lstm.SIZES["tiny"]
    model = lstm.init(jax.random.key(0), cfg)
    tokens = np.arange(32)[None] * 7 % 256
    changed = tokens.copy()
    changed[:, 20] += 1
    apply = jax.jit(lstm.apply, static_argnums=2)
    before, after = (np.asarray(apply(model, t, cfg)) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert np.abs(before[:, 21:] - after[:, 21:]).max() > 1e-4


def test_patches_are_read_row_by_row_and_their_order_matters_by_position_alone():
    cfg = replace(vit.SIZES["tiny"], layers=1)
    model = vit.Vit(cfg, nnx.Rngs(0))
    model.positions[...] = jnp.zeros_like(model.positions[...])
    image = jax.random.normal(jax.random.key(0), (1, 8, 8, 1))
    swapped = image.at[:, :2, :2].set(image[:, 2:4, 4:6]).at[:, 2:4, 4:6].set(image[:, :2, :2])
    apply = jax.jit(lambda image: model(image))
    np.testing.assert_allclose(apply(image), apply(swapped), rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(apply(image) - apply(jnp.roll(image, 1, 1)))).max() > 1e-3
