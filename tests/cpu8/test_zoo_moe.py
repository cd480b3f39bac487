"""The mixture of experts routes as it should, learns from real text, and plans in both of its forms."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import moe
from tests._zoo import MESH, case, check_plan, check_shapes, parameters, train

DISPATCH = ("grouped", "ragged")
CFG = moe.SIZES["tiny"]


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_the_loss_falls_on_real_text(dispatch):
    found = train(moe.workload("tiny", dispatch=dispatch), 16)
    assert found[0] == pytest.approx(np.log(256), rel=0.05)
    assert max(found[-3:]) < found[0] - 1.5


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_on_a_given_mesh_the_plan_computes_what_one_device_does(dispatch):
    check_plan(case(moe.workload, dispatch=dispatch, layers=1), mesh=MESH)


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_on_the_best_mesh_the_plan_computes_what_one_device_does(dispatch):
    check_plan(case(moe.workload, dispatch=dispatch, layers=1))


def test_scanned_and_rematerialised_layers_plan_too():
    check_plan(case(moe.workload, scan=True, remat=True), mesh=MESH)


def test_real_state_and_batches_have_the_shapes_of_the_arguments():
    check_shapes(moe.workload("tiny", scan=True))


def test_mixtral_has_the_published_number_of_parameters():
    assert parameters(moe.workload("mixtral-8x7b")) == 46_702_792_704


def test_an_unknown_dispatch_names_the_known_ones():
    with pytest.raises(ValueError, match=r"dispatch 'sorted' is unknown\. Known: grouped, ragged"):
        moe.workload("tiny", dispatch="sorted")


def routed(cfg: moe.Config, seed: int = 0):
    """Random experts, tokens [batch, seq, width] and their routing."""
    keys = jax.random.split(jax.random.key(seed))
    experts = moe.init_block(keys[0], cfg).experts
    x = jax.random.normal(keys[1], (3, cfg.seq, cfg.width))
    weights, chosen, _ = moe.route(experts.router, x, cfg)
    return experts, x, weights, chosen


def one_by_one(experts: moe.Experts, x, weights, chosen) -> np.ndarray:
    """Every token through its experts, in a loop over experts that all tokens visit."""

    @jax.jit
    def one(e: int) -> jax.Array:
        y = (jax.nn.silu(x @ experts.gate[e]) * (x @ experts.up[e])) @ experts.down[e]
        return jnp.where(chosen == e, weights, 0).sum(-1)[..., None] * y

    return np.sum([one(e) for e in range(experts.gate.shape[0])], 0)


def test_both_forms_give_every_token_its_two_experts_where_there_is_room():
    cfg = replace(CFG, capacity=CFG.experts / CFG.chosen)
    experts, x, weights, chosen = routed(cfg)
    wanted = one_by_one(experts, x, weights, chosen)
    for form in (moe.grouped, moe.ragged):
        found = jax.jit(form, static_argnums=4)(experts, x, weights, chosen, cfg)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-5)


def test_a_full_expert_takes_no_more_and_first_choices_go_before_second_ones():
    cfg = replace(CFG, capacity=0.5)
    _, _, _, chosen = routed(cfg)
    place = np.asarray(moe.places(chosen, cfg))
    assert place.shape == (3, cfg.seq, cfg.chosen, cfg.experts, cfg.room)
    assert place.sum((1, 2)).max() == 1  # one token at most in every place
    for b, e in np.ndindex(3, cfg.experts):
        asked = [(c, s) for c in range(cfg.chosen) for s in range(cfg.seq) if chosen[b, s, c] == e]
        given = {(c, s): r for s, c, r in np.argwhere(place[b, :, :, e])}
        assert given == {who: r for r, who in enumerate(asked[: cfg.room])}
    assert place.sum() < chosen.size


def test_the_balancing_loss_is_least_where_experts_share_equally():
    cfg = replace(CFG, width=8)
    even = jnp.tile(jnp.eye(8), (2, 4, 1))
    uneven = jnp.tile(jnp.eye(8)[:1], (2, 32, 1))
    weights, chosen, balanced = moe.route(30 * jnp.eye(8), even, cfg)
    assert float(balanced) == pytest.approx(1.0, rel=1e-5)
    assert float(moe.route(30 * jnp.eye(8), uneven, cfg)[2]) == pytest.approx(8.0, rel=1e-5)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    assert np.all(chosen[..., 0] != chosen[..., 1])


@pytest.mark.parametrize("dispatch", DISPATCH)
def test_no_token_sees_a_later_one(dispatch):
    cfg = replace(CFG, dispatch=dispatch, capacity=CFG.experts / CFG.chosen)
    model = moe.init(jax.random.key(0), cfg)
    tokens = np.arange(32)[None] * 7 % 256
    changed = np.concatenate([tokens[:, :20], 255 - tokens[:, 20:]], 1)
    before, after = (np.asarray(jax.jit(lambda t: moe.apply(model, t, cfg)[0])(t)) for t in (tokens, changed))
    np.testing.assert_allclose(before[:, :20], after[:, :20], rtol=1e-5, atol=1e-6)
    assert np.abs(before[:, 20:] - after[:, 20:]).max() > 1e-3
