"""Trip counts and FLOPs of compiled modules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.lower._hlo import find_collectives, flops, flops_by_dtype, parse_module, summarise
from meshplan.lower._hlo_cost import _taps
from meshplan.lower._hlo_parse import parse_shape

LOOP = """HloModule jit_scan, num_partitions=8

%region_0 (p: (s32[], f32[64], s32[])) -> (s32[], f32[64], s32[]) {{
  %p = (s32[]{{:T(128)}}, f32[64]{{0}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %x = f32[64]{{0}} get-tuple-element(%p), index=1
  %n = s32[]{{:T(128)}} get-tuple-element(%p), index=2
  %one = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%i, %one)
  %all-reduce = f32[64]{{0}} all-reduce(%x), replica_groups={{}}, to_apply=%add
  ROOT %tuple = (s32[]{{:T(128)}}, f32[64]{{0}}, s32[]{{:T(128)}}) tuple(%next, %all-reduce, %n)
}}

%fused_compare (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare({test}
}}

%region_1 (q: (s32[], f32[64], s32[])) -> pred[] {{
  %q = (s32[]{{:T(128)}}, f32[64]{{0}}, s32[]{{:T(128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %limit = s32[]{{:T(128)}} {limit}
  ROOT %fusion = pred[] fusion(%j, %limit), kind=kLoop, calls=%fused_compare
}}

ENTRY %main (arg: f32[64], m: s32[]) -> f32[64] {{
  %arg = f32[64]{{0}} parameter(0)
  %m = s32[] parameter(1)
  %start = s32[] constant({start})
  %copy = s32[] copy(%start)
  %six = s32[] constant({six})
  %state = (s32[], f32[64]{{0}}, s32[]) tuple(%copy, %arg, %{bound})
  %while = (s32[], f32[64]{{0}}, s32[]) while(%state), condition=%region_1, body=%region_0
  ROOT %result = f32[64]{{0}} get-tuple-element(%while), index=1
}}
"""
CONSTANT, IN_STATE = "constant({six})", "get-tuple-element(%q), index=2"
UP, SWAPPED = "%a, %b), direction={way}", "%b, %a), direction={way}"


def loop(limit: str = CONSTANT, test: str = UP, way: str = "LT", bound: str = "six", **numbers: int) -> str:
    numbers = {"start": 0, "step": 1, "six": 6, **numbers}
    return LOOP.format(limit=limit.format(**numbers), test=test.format(way=way), bound=bound, **numbers)


def runs(text: str) -> float:
    (found,) = find_collectives(text)
    return found.collective.count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (loop(), 6),
        (loop(limit=IN_STATE), 6),
        (loop(test=SWAPPED, way="GT"), 6),
        (loop(way="LE"), 7),
        (loop(way="NE"), 6),
        (loop(start=2, step=2), 2),
        (loop(start=1, step=2), 3),
        (loop(start=5, step=-1, six=0, way="GT"), 5),
        (loop(start=5, step=-1, six=0, way="GE"), 6),
        (loop(limit=IN_STATE, test=SWAPPED, way="GT", six=9), 9),
    ],
)
def test_runs_of_a_loop_follow_from_start_step_and_limit(text: str, count: int) -> None:
    assert runs(text) == count
    assert not summarise(text).notes


def test_the_compilers_own_trip_count_wins() -> None:
    known = loop().replace(
        "body=%region_0\n", 'body=%region_0, backend_config={"known_trip_count":{"n":"11"},"dynamic_variables":[]}\n'
    )
    assert runs(known) == 11


RAGGED = """HloModule jit_step, num_partitions=8

ENTRY %main (rows: bf16[512,128], groups: bf16[8,128,256], sizes: s32[8]) -> bf16[512,256] {
  %rows = bf16[512,128]{1,0} parameter(0)
  %groups = bf16[8,128,256]{2,1,0} parameter(1)
  %sizes = s32[8]{0} parameter(2)
  ROOT %ragged-dot-none.1 = bf16[512,256]{1,0} custom-call(%sizes, %rows, %groups), custom_call_target="tpu_custom_call", frontend_attributes={mosaic_fusion_entry_point="true",ragged_dot_tiling="128,128,256"}, metadata={op_name="jit(step)/ragged_dot_general/ragged-dot-none"}
}
"""  # noqa: E501


def test_the_tpus_kernel_of_a_ragged_dot_counts_each_row_with_one_group() -> None:
    assert flops_by_dtype(RAGGED) == {"bf16": 2 * 512 * 128 * 256}


def test_a_loop_of_no_runs_counts_nothing() -> None:
    assert find_collectives(loop(six=0)) == ()


def test_a_loop_whose_limit_is_an_argument_counts_once_and_says_so() -> None:
    text = loop(limit=IN_STATE, bound="m")
    assert runs(text) == 1
    assert summarise(text).notes == ("the loop at while has no known trip count and is counted once",)


DOTS = """HloModule jit_dots

%fused (p0: f32[8,16,32], p1: f32[8,32,64]) -> f32[8,16,64] {
  %p0 = f32[8,16,32]{2,1,0} parameter(0)
  %p1 = f32[8,32,64]{2,1,0} parameter(1)
  ROOT %dot = f32[8,16,64]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

ENTRY %main (a: f32[8,16,32], b: f32[8,32,64], c: bf16[32,16], d: bf16[16,24]) -> f32[8,16,64] {
  %a = f32[8,16,32]{2,1,0} parameter(0)
  %b = f32[8,32,64]{2,1,0} parameter(1)
  %c = bf16[32,16]{1,0} parameter(2)
  %d = bf16[16,24]{1,0} parameter(3)
  %gemm = (bf16[32,24]{1,0}, s8[4096]{0}) custom-call(%c, %d), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %fusion = f32[8,16,64]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%fused
}
"""  # noqa: E501


def test_batched_dots_in_fusions_and_library_calls_count_two_per_multiply() -> None:
    assert flops_by_dtype(DOTS) == {"f32": 2.0 * 8 * 16 * 32 * 64, "bf16": 2.0 * 32 * 16 * 24}
    assert flops(DOTS) == sum(flops_by_dtype(DOTS).values())


@given(
    inputs=st.integers(1, 9), kernel=st.integers(1, 5), stride=st.integers(1, 3), low=st.integers(-2, 4),
    high=st.integers(0, 4), hole=st.integers(1, 3), spread=st.integers(1, 3),
)  # fmt: skip
def test_taps_are_those_that_meet_an_input_element(
    inputs: int, kernel: int, stride: int, low: int, high: int, hole: int, spread: int
) -> None:
    length = (inputs - 1) * hole + 1
    outputs = max(0, (length + low + high - (kernel - 1) * spread - 1) // stride + 1)
    places = {k * hole for k in range(inputs)}
    expected = sum(o * stride + k * spread - low in places for o in range(outputs) for k in range(kernel))
    window = {"pad": f"{low}_{high}", "stride": str(stride), "lhs_dilate": str(hole), "rhs_dilate": str(spread)}
    assert _taps(inputs, kernel, outputs, window) == expected


def convolution(lhs: str, rhs: str, out: str, attributes: str) -> str:
    return f"""HloModule jit_convolution

ENTRY %main (a: {lhs}, b: {rhs}) -> {out} {{
  %a = {lhs} parameter(0)
  %b = {rhs} parameter(1)
  ROOT %c = {out} convolution(%a, %b), {attributes}
}}
"""


SAME, IMAGES = "window={size=3x3 pad=1_1x1_1}", "dim_labels=b01f_01io->b01f"
TRANSPOSED = "window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # 3 taps of a row of 8 with a border of 1: 8 + 7 + 7 meet a pixel
        (convolution("f32[2,8,8,16]", "f32[3,3,16,32]", "f32[2,8,8,32]", f"{SAME}, {IMAGES}"), 2 * 2 * 32 * 16 * 22**2),
        # of 4 groups each output sees 4 of the 16 channels
        (
            convolution("f32[2,8,8,16]", "f32[3,3,4,32]", "f32[2,8,8,32]", f"{SAME}, {IMAGES}, feature_group_count=4"),
            2 * 2 * 32 * 4 * 22**2,
        ),
        # between two pixels there is an empty one: 8 outputs of 3 taps meet 4 pixels 4 + 3 + 4 times
        (
            convolution("bf16[2,4,4,16]", "bf16[3,3,16,8]", "bf16[2,8,8,8]", f"{TRANSPOSED}, {IMAGES}"),
            2 * 2 * 8 * 16 * 11**2,
        ),
        # products written as convolutions (TPU): without a window, and batched over a dim of 8 that meets itself alone
        (convolution("bf16[64,128]", "bf16[128,32]", "bf16[64,32]", "dim_labels=bf_io->bf"), 2 * 64 * 128 * 32),
        (
            convolution(
                "bf16[8,64,128]", "bf16[8,128,32]", "bf16[8,64,32]",
                "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            ),
            2 * 8 * 64 * 128 * 32,
        ),
    ],
    ids=["padded", "grouped", "transposed", "product", "batched product"],
)  # fmt: skip
def test_convolutions_count_the_taps_that_meet_an_input_element(text: str, expected: int) -> None:
    assert flops(text) == expected


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[8,4]{1,0}", 128),
        ("bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}", 2**20),
        ("(bf16[2]{0}, (u32[]{:S(2)}, token[]), s4[3]{0})", 4 + 4 + 2),
        ("f8e4m3fn[16]{0}", 16),
        ("pred[]", 1),
        ("f32[<=8,2]{1,0}", 64),
        ("c64[3]", 24),
    ],
)
def test_bytes_of_a_shape_ignore_its_layout(text: str, nbytes: int) -> None:
    assert parse_shape(text).nbytes == nbytes


def test_text_that_is_no_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="No ENTRY computation"):
        parse_module("HloModule nothing\n")
