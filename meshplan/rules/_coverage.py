"""What becomes of every primitive of the installed jax: split by a rule, opened, a region, an effect, or whole.

The answers that no rule gives are written down here, each with its reason, so that a primitive of a
new jax shows up as unlisted instead of being passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from meshplan.core import _jax
from meshplan.rules._table import TABLE

Kind = Literal["covered", "opened", "region", "effect", "inside", "whole", "unlisted"]
KINDS: tuple[Kind, ...] = ("covered", "opened", "region", "effect", "inside", "whole", "unlisted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """One primitive: its name, the module of jax that defines it, what becomes of it, and why."""

    primitive: str
    module: str
    kind: Kind
    reason: str


_REGIONS = MappingProxyType({
    "scan": "a loop: one decision per step, times the trips",
    "while": "a loop; trips are read off where they can be",
    "cond": "branches, all of them priced",
})  # fmt: skip
_EFFECTS = MappingProxyType({
    **dict.fromkeys(("debug_callback", "debug_print", "inspect_sharding"), "prints; no result depends on it"),
    **dict.fromkeys(("after_all", "create_token", "program_order", "dce_sink"), "orders side effects, holds no array"),
    **dict.fromkeys(("check", "assert_consumed_value", "consume", "unreachable"), "checks; carries no array"),
    "shape_assertion": "checks sizes that an exported program leaves open",
})  # fmt: skip
_MANUAL = "runs inside shard_map alone, which is opaque: its specs are the user's"
_INSIDE = MappingProxyType(dict.fromkeys((
    "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start "
    "all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done pbroadcast_dynamic "
    "pbroadcast_start pmax pmin ppermute ppermute_done ppermute_start precv preduced psend psum psum_done "
    "psum_invariant psum_invariant_start psum_start ragged_all_to_all reduce_scatter reduce_scatter_done "
    "reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin unreduced_psum "
    "unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast "
    "vary_unreduced_cast_p"
).split(), _MANUAL))  # fmt: skip

_KERNEL = "a kernel: nothing inside it is read; give a rule by its name"
_STATE = "a mutable reference: every device keeps the same whole array"
_HOST = "calls Python on the host with whole arrays"
_BODY = "calls a function whose meaning depends on the call; it is kept whole, not opened"
_SPARSE = "the places of nonzero elements are data: no block of the array has a known share of them"
_CUDNN = "a kernel of cuDNN, which runs on GPUs alone: no proof by execution on CPUs; give a rule by its name"
_OPEN_SIZE = "a size that an exported program leaves open; there is nothing to divide"
_WHOLE = MappingProxyType({
    **dict.fromkeys(
        "pallas_call core_map mpmd_map tpu_custom_call mosaic_gpu_p ffi_call custom_fusion fusible emit_pipeline "
        "pipeline_body einshape_lo".split(), _KERNEL,
    ),
    **dict.fromkeys(
        "new_ref empty_ref free_ref freeze get swap addupdate accum_grad_in_ref run_state pin unpin create_linear "
        "broadcast_to box_get box_set new_box new_log log_extend log_read empty2".split(), _STATE,
    ),
    **dict.fromkeys(("pure_callback", "io_callback", "buffer_callback"), _HOST),
    **dict.fromkeys(
        "call_exported call_hi_primitive call_hi_primitive_linearized compute_on fused_call stage "
        "custom_jvp_call_jaxpr remat_opt".split(), _BODY,
    ),
    **dict.fromkeys(
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general "
        "bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense "
        "coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec "
        "csr_spmm csr_spmv csr_todense spsolve todense".split(), _SPARSE,
    ),
    **dict.fromkeys(
        "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd "
        "dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper "
        "dot_product_attention_fwd dot_product_attention_fwd_wrapper cudnn_fusion scaled_matmul scaled_matmul_wrapper "
        "rnn_fwd rnn_bwd".split(), _CUDNN,
    ),
    **dict.fromkeys(("dim_as_value", "dimension_size"), _OPEN_SIZE),
    "global_array_to_host_local_array": "moves an array between one process and all; not part of a step",
    "host_local_array_to_global_array": "moves an array between one process and all; not part of a step",
    "platform_index": "a scalar: which branch is for the platform compiled for",
    "rng_bit_generator": "the generator's answer for a part of the shape is not a part of its answer for the whole",
    "rng_uniform": "the generator's answer for a part of the shape is not a part of its answer for the whole",
    "shard_map": "opaque: runs under the specs written for it",
})  # fmt: skip


def _kind(name: str, module: str, kernels: tuple[str, ...]) -> tuple[Kind, str]:
    if name in _jax.INLINE_CALLS or name in _jax.REMAT_CALLS:
        return "opened", "its operations stand in its place"
    for kind, listed in (("region", _REGIONS), ("effect", _EFFECTS), ("inside", _INSIDE), ("whole", _WHOLE)):
        if name in listed:
            return kind, listed[name]  # type: ignore[return-value]
    if name in TABLE:
        return "covered", ""
    if module.startswith(kernels):
        return "inside", "runs in the body of a kernel alone"
    return "unlisted", "no rule, no reason"


def whole_reason(primitive: str) -> str:
    """Why a primitive without a rule stays whole; '' where nothing is written down."""
    return _WHOLE.get(primitive, "")


def coverage() -> tuple[Coverage, ...]:
    """One row per primitive that the installed jax registers, by name. Imports every module of jax (a second)."""
    from meshplan.core import _jax_primitives

    rows = []
    for name, module in _jax_primitives.registered_primitives().items():
        kind, reason = _kind(name, module, _jax_primitives.KERNEL_MODULES)
        rows.append(Coverage(primitive=name, module=module, kind=kind, reason=reason))
    return tuple(rows)


def counts(rows: tuple[Coverage, ...]) -> dict[Kind, int]:
    """How many primitives are of each kind."""
    return {kind: sum(row.kind == kind for row in rows) for kind in KINDS}
