"""Small inputs that hurt people, with the right answer: weights gathered again, micro-batches, few KV heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import bytes_by_kind
from meshplan.plan import from_bytes, to_bytes
from tests._programs import f32

# ------------------------------------------------------------------------------------------- weights gathered again

WIDTH, LAYERS = 512, 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


def stacked(rematerialised: int, keep: Any = lambda w: w) -> Callable[..., Any]:
    """A training step of four layers, the first few of them under `jax.checkpoint`; `keep`: what weights go through."""

    def layer(w: Any, y: Any) -> Any:
        return jnp.tanh(y @ w)

    def loss(ws: Any, x: Any) -> Any:
        for i, w in enumerate(ws):
            x = (jax.checkpoint(layer) if i < rematerialised else layer)(keep(w), x)
        return (x**2).mean()

    def step(ws: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    return step


def fsdp(rematerialised: int, machine: str, memory_limit: int | None = None) -> mp.Plan:
    args = [f32(WIDTH, WIDTH)] * LAYERS, f32(64, WIDTH)
    pins = {"ws/.*": P("data"), "x": P("data")}
    found = mp.compare(
        stacked(rematerialised), *args, machine=machine, mesh={"data": 8}, pins=pins, templates=("fsdp",),
        memory_limit=memory_limit,
    )
    return found.plans["fsdp"]


def gathered_weights(collectives: Any) -> float:
    """How many weights' bytes are gathered; smaller gathers are of activations."""
    return sum(c.total_bytes for c in collectives if c.kind == "all-gather" and c.nbytes >= WEIGHT_BYTES) / WEIGHT_BYTES


def kept_weights(plan: mp.Plan) -> list[Any]:
    return [h for h in plan.data.at_peak if h.what.startswith("ws/") and h.what.endswith("as (None, None)")]


@pytest.mark.parametrize("machine", ["cpu:8", "h100:1x8"])
def test_gathered_weights_are_kept_where_memory_allows_and_gathered_again_where_not(machine: str) -> None:
    """Case 6: keeping is a decision with its bytes; the gathers of both are predicted and are the compiled module's."""
    plain = fsdp(0, machine)
    assert gathered_weights(plain.collectives) == gathered_weights(plain.audit().collectives) == LAYERS
    assert plain.notes == () and len(kept_weights(plain)) == LAYERS - 1  # the first's is not read again
    for rematerialised in (3, 4) if machine == "cpu:8" else (4,):
        kept = fsdp(rematerialised, machine)
        assert gathered_weights(kept.collectives) == gathered_weights(kept.audit().collectives) == LAYERS
        assert "gathered once and kept for rematerialised blocks: ws/0 " in kept.notes[0]
        assert len(kept_weights(kept)) >= LAYERS - 1 and all(h.nbytes == WEIGHT_BYTES for h in kept_weights(kept))
        again = fsdp(rematerialised, machine, int(kept.peak_bytes - 1.8 * WEIGHT_BYTES))
        assert gathered_weights(again.collectives) == gathered_weights(again.audit().collectives) == 7
        assert len(kept_weights(again)) == 1 and kept.peak_bytes - again.peak_bytes >= 1.8 * WEIGHT_BYTES
        assert kept.step_seconds < again.step_seconds
        if rematerialised == LAYERS:  # the last layer's is read again at once: kept for nothing
            assert "ws/0 float32[512,512] and 3 more, 4.19 MB a device from the forward pass on" in kept.notes[0]
            assert "again for rematerialised blocks: ws/0 and 2 more, 3.15 MB a device in all" in again.notes[0]
            assert "Gathered once they take up to 3.15 MB a device from the forward pass on" in again.notes[0]


def test_some_gathered_weights_are_kept_where_there_is_room_for_some() -> None:
    """Case 6: weight by weight; a plan file says which, and the loaded plan computes what one device does."""
    kept = fsdp(LAYERS, "cpu:8")
    some = fsdp(LAYERS, "cpu:8", int(kept.peak_bytes - 0.9 * WEIGHT_BYTES))
    gathers = gathered_weights(some.collectives)
    assert LAYERS < gathers < 2 * LAYERS and gathered_weights(some.audit().collectives) == gathers
    assert from_bytes(to_bytes(some.data), "a plan") == some.data and some.data.kept
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    ws = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[1:]]
    found = some.verify(ws, jax.random.normal(keys[0], (64, WIDTH)))
    assert found.ok, found


def test_a_weight_that_is_stated_whole_before_a_rematerialised_block_is_gathered_once(make_mesh: Any) -> None:
    """Case 6: what the step itself states is kept, whatever the limit, and its bytes are in the peak."""
    whole = NamedSharding(make_mesh(data=8), P())

    @jax.custom_vjp  # a constraint holds for the gradient too, which is to be scattered
    def keep(w: Any) -> Any:
        return lax.with_sharding_constraint(w, whole)

    keep.defvjp(lambda w: (keep(w), None), lambda _, g: (g,))
    args = [f32(WIDTH, WIDTH)] * LAYERS, f32(64, WIDTH)
    pins = {"ws/.*": P("data"), "x": P("data")}
    found = mp.compare(
        stacked(LAYERS, keep), *args, machine="cpu:8", mesh={"data": 8}, templates=("fsdp",), pins=pins
    )
    plan, decided = found.plans["fsdp"], fsdp(LAYERS, "cpu:8")
    assert gathered_weights(plan.collectives) == gathered_weights(plan.audit().collectives) == LAYERS
    assert plan.notes == () and abs(plan.peak_bytes / decided.peak_bytes - 1) < 0.2
    with pytest.raises(mp.MemoryLimitError, match="no plan fits"):
        mp.plan(
            stacked(LAYERS, keep), *args, machine="cpu:8", mesh={"data": 8}, pins=pins,
            memory_limit=int(decided.peak_bytes - 1.8 * WEIGHT_BYTES),
        )


# --------------------------------------------------------------------------------------------------- micro-batches

BATCH = f32(8, 2048)


def by_parts(cut: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(x: Any) -> Any:
        return lax.map(lambda part: jnp.tanh(part) * 2, cut(x))

    return step


def apart(x: Any) -> Any:
    return x.reshape(2, 4, 2048)


def in_turns(x: Any) -> Any:
    return x.reshape(4, 2, 2048).swapaxes(0, 1)


def moved_bytes(found: Any) -> dict[str, float]:
    """Bytes of collectives by kind; sums of scalars left out."""
    return {c.kind: c.total_bytes for c in found.collectives if c.nbytes > 64}


def plan_parts(cut: Callable[[Any], Any], pins: dict[str, P]) -> mp.Plan:
    return mp.plan(by_parts(cut), BATCH, machine="cpu:4", mesh={"data": 4}, pins=pins, donate_argnums=())


def test_a_batch_cut_into_micro_batches_across_its_shards_is_priced_and_another_order_is_offered() -> None:
    """Case 7: [8, 2048] split 4 ways, reshaped to [2, 4, 2048] and scanned."""
    made = plan_parts(apart, {"x": P("data")})
    assert moved_bytes(made) == moved_bytes(made.audit()) == {"all-to-all": 8 * 2048 * 4 / 4}, "rows for columns"
    (note,) = made.notes
    assert note.startswith("reshape of [8, 2048] to [2, 4, 2048] at ")
    assert "test_cases.py:" in note
    assert "dim 0 is split over data (4)" in note
    assert "every device receives 16.4 kB" in note
    assert "reshape(4, 2, 2048).swapaxes(0, 1) is the same batch in another order" in note


def test_the_order_that_is_offered_moves_nothing() -> None:
    """Case 7, as offered: every micro-batch lies on all devices."""
    made = plan_parts(in_turns, {"x": P("data"), "0": P(None, "data")})
    assert moved_bytes(made) == moved_bytes(made.audit()) == {}
    assert made.notes == ()
    x = np.random.default_rng(0).normal(size=(8, 2048)).astype(np.float32)
    rows, others = (np.asarray(by_parts(cut)(x)).reshape(8, -1) for cut in (apart, in_turns))
    assert sorted(map(bytes, rows)) == sorted(map(bytes, others)), "the same rows"
    assert made.verify(x, mesh=made.mesh(jax.devices()[:4])).ok


def test_a_free_batch_is_stored_so_that_cutting_it_moves_nothing() -> None:
    """Case 7, nothing pinned."""
    made = plan_parts(apart, {})
    assert moved_bytes(made) == moved_bytes(made.audit()) == {}
    assert made.notes == ()


def test_the_offer_reaches_through_conversions_and_a_mesh_that_divides_the_micro_batches() -> None:
    """Over 2 devices each micro-batch lies on one device whole: it moves too."""

    def step(x: Any) -> Any:
        return by_parts(lambda x: jnp.abs(x.astype(jnp.bfloat16).reshape(2, 4, 2048)))(x)

    made = mp.plan(step, BATCH, machine="cpu:2", mesh={"data": 2}, pins={"x": P("data")}, donate_argnums=())
    assert sum(moved_bytes(made).values()) > 0
    assert ["micro-batches" in note for note in made.notes] == [True]


# --------------------------------------------------------------------------------- fewer KV heads than devices

B, S, M, HEADS, KV, D = 2, 128, 512, 32, 4, 64
SMALL = {"q": f32(M, HEADS, D), "k": f32(M, KV, D), "v": f32(M, KV, D), "o": f32(HEADS, D, M)}


def attention(p: Any, x: Any) -> Any:
    q = jnp.einsum("bsm,mhd->bshd", x, p["q"]).reshape(B, S, KV, HEADS // KV, D)
    k, v = (jnp.einsum("bsm,mkd->bskd", x, p[name]) for name in "kv")
    weights = jax.nn.softmax(jnp.einsum("bskgd,btkd->bkgst", q, k) / D**0.5, -1)
    out = jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(B, S, HEADS, D)
    return jnp.einsum("bshd,hdm->bsm", out, p["o"])


def test_few_kv_heads_split_the_devices_in_two_axes() -> None:
    """Case 8: the search itself splits 8 devices 4 x 2; 1.84 MB of arguments per device and one all-reduce."""
    made = mp.plan(attention, SMALL, f32(B, S, M), machine="h100:1x8", memory_limit=3e6, donate_argnums=(),
                   pins={"0": P()}, options=mp.Options(max_axes=2))  # fmt: skip
    four, two = made.data.mesh.names
    assert made.data.mesh.sizes == (4, 2)
    assert made.specs == {"p/q": P(None, (four, two)), "p/k": P(None, four), "p/v": P(None, four),
                          "p/o": P((four, two)), "x": P()}  # fmt: skip
    assert made.data.argument_bytes == pytest.approx(1.84e6, rel=0.01)
    audit = made.audit()
    for found in (made.collectives, audit.collectives):
        assert [(c.kind, c.nbytes, c.group_size) for c in found] == [("all-reduce", B * S * M * 4, 8)]
    assert audit.memory is not None
    assert audit.memory.argument_bytes == made.data.argument_bytes


def test_few_kv_heads_on_host_devices_compute_the_same() -> None:
    """Case 8 on CPU, with the weights pinned: no weight is gathered whole, and the numbers are those of one device."""
    mesh = {"kv": 4, "group": 2}
    pins = {"p/k": P(None, "kv"), "p/v": P(None, "kv"), "p/q": P(None, ("kv", "group")), "x": P(), "0": P(),
            "p/o": P(("kv", "group"))}  # fmt: skip
    made = mp.plan(attention, SMALL, f32(B, S, M), machine="cpu:8", mesh=mesh, donate_argnums=(), pins=pins)
    audit = made.audit()
    assert audit.bytes_by_kind() == bytes_by_kind(made.collectives)
    assert max(c.nbytes for c in audit.collectives) <= M * HEADS * D * 4 / 4, "no weight is gathered over all devices"
    rng = np.random.default_rng(0)
    real = jax.tree.map(lambda a: (rng.normal(size=a.shape) / M**0.5).astype(np.float32), (SMALL, f32(B, S, M)))
    assert made.verify(*real).ok
