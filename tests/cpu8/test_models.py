"""The models compute what they should, learn from real data, and have the published sizes."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshplan.hints import Workload, argument_names, leaf_paths, named_leaves
from models import _text, gpt, llama, mlp
from models._train import cross_entropy

TEXT_MODELS = {"gpt": gpt, "llama": llama}


def train(workload: Workload, steps: int) -> list[float]:
    """Losses of the first steps on one device."""
    assert workload.init is not None
    assert workload.batches is not None
    (state,) = jax.jit(workload.init)(jax.random.key(0))
    step = jax.jit(workload.step, donate_argnums=workload.donate_argnums)
    found = []
    for batch in itertools.islice(workload.batches(), steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def losses(model: str, **overrides) -> list[float]:
    """Of 16 steps of the tiny text model, trained once for all tests."""
    return train(TEXT_MODELS[model].workload("tiny", **overrides), 16)


def parameters(workload: Workload) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(workload.args[0]["params"]))


def names(workload: Workload) -> dict:
    paths = leaf_paths(workload.args, argument_names(workload.step, 2))
    return dict(zip(paths, named_leaves(workload.args), strict=True))


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("gpt", {}),
        ("gpt", {"scan": True, "remat": True, "dtype": "bfloat16", "tied": False, "fused_qkv": True}),
        ("gpt", {"optimizer": "adafactor", "learning_rate": 0.1}),
        ("gpt", {"optimizer": "sgd", "learning_rate": 0.1, "clip": None}),
        ("llama", {}),
        ("llama", {"scan": True, "remat": True, "dtype": "bfloat16", "tied": True}),
    ],
    ids=["gpt", "gpt bf16 fused", "gpt adafactor", "gpt sgd", "llama", "llama bf16"],
)
def test_the_loss_falls_on_real_text(model, overrides):
    found = losses(model, **overrides)
    assert found[0] == pytest.approx(math.log(256), rel=0.05)
    assert max(found[-3:]) < found[0] - 1.0


def test_the_digits_are_learned():
    found = train(mlp.workload("tiny"), 150)
    assert found[0] > 2.0
    assert max(found[-5:]) < 0.6


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_scan_and_unrolled_layers_compute_the_same(model):
    np.testing.assert_allclose(losses(model, scan=True)[:3], losses(model)[:3], rtol=2e-5)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_remat_changes_no_number(model):
    np.testing.assert_allclose(losses(model, remat=True)[:3], losses(model)[:3], rtol=2e-5)


def test_fused_and_separate_projections_compute_the_same():
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (8, 2, 4)) for key in keys[:3])
    o = jax.random.normal(keys[3], (2, 4, 8))
    biases = [jax.random.normal(key, (2, 4)) for key in jax.random.split(keys[4], 3)]
    x = jax.random.normal(keys[4], (2, 6, 8))
    separate = gpt.attention(gpt.Attention(q, k, v, o, biases[0], biases[1], biases[2], jnp.ones(8)), x)
    fused = gpt.FusedAttention(jnp.stack([q, k, v], 1), o, jnp.stack(biases), jnp.ones(8))
    np.testing.assert_allclose(gpt.attention(fused, x), separate, rtol=1e-4, atol=1e-5)


def test_grouped_attention_is_that_of_jax():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 10, heads, 8)) for i, heads in enumerate((6, 2, 2)))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(llama.grouped_attention(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = (jnp.broadcast_to(jax.random.normal(jax.random.key(i), (8,)), (1, 12, 1, 8)) for i in (0, 1))
    scores = jnp.einsum("bshk,bthk->st", llama.rotate(q, 1e4), llama.rotate(k, 1e4))
    for shift in range(-11, 12):
        diagonal = np.diagonal(scores, shift)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert np.ptp(np.asarray(scores)[0]) > 0.1


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_no_token_sees_a_later_one(model):
    workload = TEXT_MODELS[model].workload("tiny", batch=1)
    (state,) = workload.init(jax.random.key(0))
    tokens = next(_text.batches(1, 64))["tokens"]
    changed = np.concatenate([tokens[:, :40], 255 - tokens[:, 40:]], 1)
    apply = llama.Llama.__call__ if model == "llama" else lambda p, t: gpt.apply(p, t, gpt.SIZES["tiny"])
    before, after = (jax.jit(apply)(state["params"], t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :40], after[:, :40])
    assert np.abs(before[:, 40:] - after[:, 40:]).max() > 1e-3


def test_cross_entropy_is_that_of_optax():
    logits = 30 * jax.random.normal(jax.random.key(0), (3, 5, 11))
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 11)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    np.testing.assert_allclose(cross_entropy(logits, targets), expected, rtol=1e-6)
    got = jax.grad(cross_entropy)(logits, targets)
    wanted = jax.grad(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, targets).mean())(logits)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("workload", "published"),
    [
        (gpt.workload("gpt3-125m"), 125e6),
        (gpt.workload("gpt3-6.7b"), 6.7e9),
        (gpt.workload("gpt3-13b"), 12.9e9),
        (gpt.workload("gpt3-175b"), 174.6e9),
        (llama.workload("1b"), 1_235_814_400),
        (llama.workload("llama3-8b"), 8_030_261_248),
        (llama.workload("llama3-70b", scan=True), 70_553_706_496),
        (llama.workload("llama3-405b"), 405_853_388_800),
    ],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_published_sizes_have_the_published_number_of_parameters(workload, published):
    assert parameters(workload) == pytest.approx(published, rel=0.01 if published % 1e5 == 0 else 0)
    assert {type(leaf) for leaf in jax.tree.leaves(workload.args)} == {jax.ShapeDtypeStruct}


@pytest.mark.parametrize("model", [gpt, llama, mlp])
def test_real_state_and_batches_have_the_shapes_of_the_arguments(model):
    workload = model.workload("tiny")
    assert workload.init is not None
    assert workload.batches is not None
    real = (*workload.init(jax.random.key(0)), next(workload.batches()))
    assert jax.tree.structure(real) == jax.tree.structure(workload.args)
    for made, planned in zip(jax.tree.leaves(real), jax.tree.leaves(workload.args), strict=True):
        assert (made.shape, made.dtype) == (planned.shape, planned.dtype)
    again = next(workload.batches())
    jax.tree.map(np.testing.assert_array_equal, real[1], again)


def test_targets_are_the_next_bytes_even_where_the_vocabulary_is_larger():
    workload = gpt.workload("small", batch=4, seq=128)
    assert workload.batches is not None
    batch = next(workload.batches())
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert batch["tokens"].min() >= 0
    assert batch["tokens"].max() < 256
    assert len(_text.corpus()) > 3_000_000


@pytest.mark.parametrize("scan", [False, True])
def test_parameters_and_optimizer_states_of_gpt_are_named(scan):
    found = names(gpt.workload("tiny", scan=scan))
    layers, lead = ("layers", (None,)) if scan else ("layers/1", ())
    for root in ("state/params", "state/opt_state/1/0/mu", "state/opt_state/1/0/nu"):
        assert found[f"{root}/embed"] == ("vocab", "embed")
        assert found[f"{root}/{layers}/mlp/up"] == (*lead, "embed", "mlp")
        assert found[f"{root}/{layers}/attn/q"] == (*lead, "embed", "heads", "head_dim")
        assert found[f"{root}/{layers}/attn_norm/scale"] == (*lead, "embed")
    nameless = {path for path, dims in found.items() if dims is None}
    assert nameless == {"state/step", "state/opt_state/1/0/count", "batch/tokens", "batch/targets"}


@pytest.mark.parametrize("scan", [False, True])
def test_parameters_and_optimizer_states_of_llama_are_named(scan):
    found = names(llama.workload("tiny", scan=scan))
    layers, lead = ("layers", (None,)) if scan else ("layers/1", ())
    for root in ("state/params", "state/opt_state/1/0/mu", "state/opt_state/1/0/nu"):
        assert found[f"{root}/head"] == ("embed", "vocab")
        assert found[f"{root}/{layers}/mlp/down"] == (*lead, "mlp", "embed")
        assert found[f"{root}/{layers}/attn/k"] == (*lead, "embed", "kv_heads", "head_dim")
    nameless = {path for path, dims in found.items() if dims is None}
    assert nameless == {"state/step", "state/opt_state/1/0/count", "batch/tokens", "batch/targets"}


def test_unrolled_layers_under_remat_share_one_traced_block():
    jaxpr = jax.make_jaxpr(llama.Llama.__call__)(
        llama.workload("tiny", layers=5, remat=True).args[0]["params"], jax.ShapeDtypeStruct((8, 64), jnp.int32)
    )
    blocks = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name in ("checkpoint", "remat2", "remat")]
    assert len(blocks) == 5
    assert len({id(block) for block in blocks}) == 1


@pytest.mark.parametrize("model", [gpt, llama, mlp])
def test_an_unknown_size_names_the_known_ones(model):
    with pytest.raises(ValueError, match=r"size 'huge' is unknown. Known: tiny, "):
        model.workload("huge")


def test_an_unknown_optimizer_names_the_known_ones():
    with pytest.raises(ValueError, match=r"optimizer 'adam' is unknown. Known: adamw, sgd, adafactor"):
        gpt.workload("tiny", optimizer="adam")  # type: ignore[arg-type]
