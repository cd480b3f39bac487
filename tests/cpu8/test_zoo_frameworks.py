"""The models in linen and equinox learn, have the published sizes, and compute as planned."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import meshplan as mp
from meshplan.hints import Workload, argument_names, leaf_paths, named_leaves
from models import encoder_decoder, mixer

MODELS = {"encoder_decoder": encoder_decoder, "mixer": mixer}
MESH = {"data": 4, "model": 2}
# What is planned has to be right, not the best: a short search will do.
QUICK = mp.Options(solver_seconds=4.0)
# LLVM's work is not what is tested, and takes most of a compile's time.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
# Enough work that splitting it pays, little enough to compile and run in seconds.
LARGER: dict[str, dict[str, Any]] = {
    "encoder_decoder": {"source": 16, "target": 16, "batch": 128},
    "mixer": {"batch": 512, "layers": 1, "width": 64},
}


def train(workload: Workload, steps: int) -> list[float]:
    """Losses of the first steps on one device."""
    assert workload.init is not None
    assert workload.batches is not None
    (state,) = jax.jit(workload.init)(jax.random.key(0))
    jitted = jax.jit(workload.step, donate_argnums=workload.donate_argnums)
    step = jitted.lower(*workload.args).compile(compiler_options=FAST_COMPILE)
    found = []
    for batch in itertools.islice(workload.batches(), steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def graded(model: str) -> Workload:
    """With a first step whose momentum is the gradient: Adam would make full steps out of rounding."""
    return MODELS[model].workload("tiny", optimizer="sgd", learning_rate=1.0, clip=None, **LARGER[model])


def arguments(workload: Workload) -> tuple[Any, ...]:
    assert workload.init is not None
    assert workload.batches is not None
    return (*jax.jit(workload.init)(jax.random.key(0)), next(workload.batches()))


def parameters(workload: Workload) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(workload.args[0]["params"]))


def names(workload: Workload) -> dict[str, Any]:
    paths = leaf_paths(workload.args, argument_names(workload.step, 2))
    return dict(zip(paths, named_leaves(workload.args), strict=True))


@pytest.mark.parametrize(
    ("model", "steps", "last"), [("encoder_decoder", 16, 3.8), ("mixer", 30, 1.3)], ids=MODELS
)
def test_the_loss_falls(model: str, steps: int, last: float) -> None:
    found = train(MODELS[model].workload("tiny"), steps)
    assert found[0] == pytest.approx(math.log(256 if model == "encoder_decoder" else 10), rel=0.1)
    assert max(found[-3:]) < last


@pytest.mark.parametrize("mesh", [MESH, None], ids=["data=4 model=2", "searched"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_planned_computes_the_gradients_of_one_device(model: str, mesh: dict[str, int] | None) -> None:
    workload = graded(model)
    plan = mp.plan(workload, machine="cpu:8", mesh=mesh, options=QUICK)
    assert plan.collectives  # something is split
    verified = plan.verify(*arguments(workload), tolerance=1e-5)
    assert verified.ok, str(verified)


@pytest.mark.parametrize("model", MODELS)
def test_real_state_and_batches_have_the_shapes_of_the_arguments(model: str) -> None:
    workload = MODELS[model].workload("tiny")
    real = arguments(workload)
    assert jax.tree.structure(real) == jax.tree.structure(workload.args)
    for made, planned in zip(jax.tree.leaves(real), jax.tree.leaves(workload.args), strict=True):
        assert (made.shape, made.dtype) == (planned.shape, planned.dtype)
    jax.tree.map(np.testing.assert_array_equal, real[1], arguments(workload)[1])


@pytest.mark.parametrize("model", MODELS)
def test_an_unknown_size_names_the_known_ones(model: str) -> None:
    with pytest.raises(ValueError, match=r"size 'huge' is unknown. Known: tiny, "):
        MODELS[model].workload("huge")


@pytest.mark.parametrize(
    ("workload", "published"),
    [
        (encoder_decoder.workload("base"), 247_577_856),
        (encoder_decoder.workload("large"), 783_150_080),
        (encoder_decoder.workload("xl"), 2_849_757_184),
        (mixer.workload("b16"), 59_880_472),
        (mixer.workload("l16"), 208_196_168),
    ],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_published_sizes_have_the_published_number_of_parameters(workload: Workload, published: int) -> None:
    assert parameters(workload) == published
    assert {type(leaf) for leaf in jax.tree.leaves(workload.args)} == {jax.ShapeDtypeStruct}


def test_scan_and_remat_change_no_number_of_the_encoder_decoder() -> None:
    """Scanned blocks draw other weights, so that those of the unrolled model are stacked for them."""
    cfg: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "mlp": 32, "source": 8, "target": 8, "batch": 4}
    (boxed, batch), scanned = arguments(encoder_decoder.workload("tiny", **cfg)), dict(cfg, scan=True, remat=True)
    plain = nn.meta.unbox(boxed["params"])
    params = {key: dict(value) if isinstance(value, dict) else value for key, value in plain.items()}
    for stack in ("encoder", "decoder"):
        layers = [params[stack].pop(f"layers_{i}") for i in range(2)]
        params[stack]["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    loss = jax.jit(encoder_decoder.loss, static_argnums=2)
    wanted, got = (
        loss(p, batch, replace(encoder_decoder.SIZES["tiny"], **how)) for p, how in ((plain, cfg), (params, scanned))
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_buckets_are_exact_near_by_and_coarse_far_away() -> None:
    distance = jnp.arange(-200, 201)
    both = encoder_decoder.bucket(distance, False, 32, 128)
    np.testing.assert_array_equal(both[193:208], [7, 6, 5, 4, 3, 2, 1, 0, 17, 18, 19, 20, 21, 22, 23])
    assert (int(both[0]), int(both[-1])) == (15, 31)
    causal = encoder_decoder.bucket(distance, True, 32, 128)
    np.testing.assert_array_equal(causal[200:], 0)
    np.testing.assert_array_equal(causal[185:201], range(15, -1, -1))
    assert int(causal[0]) == 31


def test_no_target_token_sees_a_later_one_but_every_source_token() -> None:
    workload = encoder_decoder.workload("tiny", batch=1)
    state, batch = arguments(workload)
    run = jax.jit(encoder_decoder.EncoderDecoder(encoder_decoder.SIZES["tiny"]).apply)
    variables, previous = {"params": state["params"]}, batch["previous"]
    before = run(variables, batch["source"], previous)
    later = run(variables, batch["source"], np.concatenate([previous[:, :20], 255 - previous[:, 20:]], 1))
    np.testing.assert_allclose(before[:, :20], later[:, :20], rtol=1e-5, atol=1e-5)
    assert np.abs(before[:, 20:] - later[:, 20:]).max() > 1e-2
    last = batch["source"].copy()
    last[0, -1] = 255 - last[0, -1]
    assert np.abs(before - run(variables, last, previous))[0, 0].max() > 1e-6


def test_logical_names_of_linen_reach_parameters_and_moments() -> None:
    found = names(encoder_decoder.workload("base"))
    for root in ("state/params", "state/opt_state/1/0/mu", "state/opt_state/1/0/nu"):
        assert found[f"{root}/embed"] == ("vocab", "embed")
        assert found[f"{root}/decoder/layers/cross/q/kernel"] == ("layers", "embed", "heads", "head_dim")
        assert found[f"{root}/encoder/layers/mlp/down/kernel"] == ("layers", "mlp", "embed")
        assert found[f"{root}/encoder/final_norm/scale"] == ("embed",)
        assert found[f"{root}/encoder_bias/table"] == ("buckets", "heads")


def test_names_of_equinox_modules_reach_parameters_and_moments() -> None:
    found = names(mixer.workload("tiny"))
    for root in ("state/params", "state/opt_state/1/0/mu", "state/opt_state/1/0/nu"):
        assert found[f"{root}/blocks/1/tokens/up/weight"] == ("tokens", "patch")
        assert found[f"{root}/blocks/0/channels/down/weight"] == ("embed", "mlp")
        assert found[f"{root}/head/bias"] == ("class",)


def test_digits_grow_to_the_size_of_the_images() -> None:
    small = next(mixer.batches(mixer.SIZES["tiny"]))
    large = next(mixer.batches(replace(mixer.SIZES["b16"], batch=64)))
    np.testing.assert_array_equal(small["labels"], large["labels"])
    np.testing.assert_array_equal(large["images"][:, 1, ::28, 27::28], small["images"][:, 0])
