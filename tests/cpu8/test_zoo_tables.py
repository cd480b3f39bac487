"""The models of tables, graphs and recurrences learn, have the published sizes, and compute as planned."""

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

import meshplan as mp
from meshplan.hints import Workload, argument_names, leaf_paths, named_leaves
from models import _text, dlrm, gnn, ssm

MODELS = {"dlrm": dlrm, "gnn": gnn, "ssm": ssm}
MESH = {"data": 4, "model": 2}
# What is planned has to be right, not the best: a short search will do.
QUICK = mp.Options(solver_seconds=4.0)
# LLVM's work is not what is tested, and takes most of a compile's time.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
# Enough work that splitting it pays, little enough to compile and run in seconds.
LARGER: dict[str, dict[str, Any]] = {
    # a small batch: of a million sums that go into a ReLU, one is zero but for rounding, and its sign a toss-up
    "dlrm": {"batch": 1024, "rows": (2048, 256, 32), "bags": (4, 1, 2)},
    "gnn": {"width": 64},
    "ssm": {"layers": 1, "width": 64, "seq": 8, "batch": 128},
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
    overrides = dict(LARGER[model]) if model == "dlrm" else {**LARGER[model], "clip": None}
    return MODELS[model].workload("tiny", optimizer="sgd", learning_rate=1.0, **overrides)


def arguments(workload: Workload) -> tuple[Any, ...]:
    assert workload.init is not None
    assert workload.batches is not None
    return (*jax.jit(workload.init)(jax.random.key(0)), next(workload.batches()))


def parameters(workload: Workload) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(workload.args[0]["params"]))


@pytest.mark.parametrize(
    ("model", "steps", "first", "last"),
    [("dlrm", 40, math.log(2), 0.66), ("gnn", 20, math.log(10), 0.5), ("ssm", 12, math.log(256), 4.2)],
)
def test_the_loss_falls(model: str, steps: int, first: float, last: float) -> None:
    found = train(MODELS[model].workload("tiny", **({"seq": 16} if model == "ssm" else {})), steps)
    assert found[0] == pytest.approx(first, rel=0.1)
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
        (ssm.workload("130m"), 129_135_360),
        (ssm.workload("370m"), 371_516_416),
        (ssm.workload("1.4b"), 1_372_178_432),
        # all rows of the logs' tables, times the width, and the two perceptrons
        (dlrm.workload("criteo", rows=dlrm._CRITEO), 33_762_577 * 128 + 2_368_897),
    ],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_published_sizes_have_the_published_number_of_parameters(workload: Workload, published: int) -> None:
    assert parameters(workload) == published
    assert {type(leaf) for leaf in jax.tree.leaves(workload.args)} == {jax.ShapeDtypeStruct}


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_with_a_dim_above_one_has_names(model: str) -> None:
    workload = MODELS[model].workload("tiny")
    paths = leaf_paths(workload.args, argument_names(workload.step, 2))
    found = dict(zip(paths, named_leaves(workload.args), strict=True))
    nameless = {path for path, dims in found.items() if path.startswith("state/params") and dims is None}
    assert nameless == ({"state/params/top/2/kernel", "state/params/top/2/bias"} if model == "dlrm" else set())


def test_the_recurrence_is_that_of_a_loop() -> None:
    keep, write = (jax.random.uniform(jax.random.key(i), (2, 13, 3, 4)) for i in (0, 1))
    state, expected = jnp.zeros((2, 3, 4)), []
    for t in range(13):
        state = keep[:, t] * state + write[:, t]
        expected.append(state)
    np.testing.assert_allclose(ssm.recurrence(keep, write), jnp.stack(expected, 1), rtol=1e-5)


def test_no_token_of_the_state_space_sees_a_later_one() -> None:
    cfg = replace(ssm.SIZES["tiny"], layers=1, seq=8, batch=1)
    model, tokens = ssm.init(jax.random.key(0), cfg), next(_text.batches(1, 8))["tokens"]
    changed = np.concatenate([tokens[:, :5], 255 - tokens[:, 5:]], 1)
    apply = jax.jit(ssm.apply, static_argnums=2)
    before, after = (apply(model, t, cfg) for t in (tokens, changed))
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-6)
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


def test_scan_and_remat_change_no_number_of_the_state_space() -> None:
    cfg = replace(ssm.SIZES["tiny"], seq=4, width=16)
    plain, batch = ssm.init(jax.random.key(0), cfg), next(_text.batches(4, 4))
    assert isinstance(plain.layers, tuple)
    stacked = replace(plain, layers=jax.tree.map(lambda *leaves: jnp.stack(leaves), *plain.layers))
    grade = jax.jit(jax.value_and_grad(ssm.loss), static_argnums=2)
    wanted, got = grade(plain, batch, cfg), grade(stacked, batch, replace(cfg, remat=True))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(got[1].layers.into[1], wanted[1].layers[1].into, rtol=1e-4, atol=1e-6)


def test_nodes_receive_the_mean_of_their_senders() -> None:
    x = jnp.array([[1.0], [2.0], [4.0], [8.0]])
    got = gnn.mean_of_senders(x, jnp.array([0, 1, 3, 3]), jnp.array([2, 2, 2, 0]))
    np.testing.assert_allclose(got, [[8.0], [0.0], [11 / 3], [0.0]], rtol=1e-6)


def test_the_sampled_graph_follows_its_law() -> None:
    cfg = gnn.Config(layers=2, width=8, nodes=4000, edges=40000, features=16, classes=5)
    graph = gnn.sampled(cfg)
    same = (graph["classes"][graph["senders"]] == graph["classes"][graph["receivers"]]).mean()
    assert same == pytest.approx(0.8 + 0.2 / 5, abs=0.01)
    assert graph["known"].mean() == pytest.approx(0.25, abs=0.03)
    assert np.bincount(graph["classes"]) == pytest.approx(800, rel=0.15)


def test_neighbours_among_the_digits_are_mostly_of_one_class() -> None:
    graph = gnn.digits(gnn.SIZES["tiny"])
    assert (graph["classes"][graph["senders"]] == graph["classes"][graph["receivers"]]).mean() > 0.95
    assert (graph["senders"] != graph["receivers"]).all()


def test_the_ids_of_a_click_log_follow_zipf() -> None:
    batch = next(dlrm.batches(dlrm.Config(rows=(1000,), bags=(8,), bottom=(4, 4), top=(4, 1), batch=20000)))
    chance = np.bincount(batch["ids"][0].ravel(), minlength=1000) / batch["ids"][0].size
    ranks = np.array([1, 2, 4, 8, 16])
    np.testing.assert_allclose(chance[ranks - 1], np.log((ranks + 1) / ranks) / np.log(1001), rtol=0.05)
    assert 0.2 < batch["clicks"].mean() < 0.5


def test_features_meet_every_other_once() -> None:
    features = jnp.array([[[1.0, 0.0], [2.0, 3.0], [5.0, 7.0]]])
    np.testing.assert_array_equal(dlrm.interact(features), [[2.0, 5.0, 31.0]])
