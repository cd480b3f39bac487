"""Collectives of real modules of the three back ends, shortened."""

from __future__ import annotations

from meshplan.core import MeshShape, bytes_by_kind
from meshplan.lower._hlo import collectives, estimated_cycles, find_collectives, flops, summarise

MESH = MeshShape.of({"x": 2, "y": 4})

HEADER = """HloModule jit_step, is_scheduled=true, num_partitions=8, frontend_attributes={fingerprint_before_lhs="6e"}

FileNames
1 "/home/user/train.py"
2 "/venv/lib/python3.12/site-packages/flax/linen/linear.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=124 end_line=124 column=10 end_column=10}
2 {file_name_id=1 function_name_id=1 line=97 end_line=97 column=10 end_column=10}
3 {file_name_id=2 function_name_id=1 line=287 end_line=287 column=10 end_column=10}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}


"""

CPU_TUPLES = HEADER + """
%add.clone_promoted (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

ENTRY %main (p: f32[512,1024], q: f32[1024,1024]) -> f32[1024,512] {
  %p = f32[512,1024]{1,0} parameter(0), metadata={op_name="p"}
  %q = f32[1024,1024]{1,0} parameter(1), metadata={op_name="q"}
  %a = f32[512,1,512]{2,1,0} bitcast(%p)
  %b = f32[512,1,512]{2,1,0} bitcast(%p)
  %all-to-all.1 = (f32[512,1,512]{2,1,0}, f32[512,1,512]{2,1,0}) all-to-all(%a, %b), channel_id=1, replica_groups=mesh['x'=2,'y'=4] {'x'}, metadata={op_name="jit(step)/sharding_constraint" stack_frame_id=2}
  %all-reduce.6 = (f32[1024,1024]{1,0}, /*index=1*/f32[512,1024]{1,0}) all-reduce(f32[1024,1024]{1,0} %q, f32[512,1024]{1,0} %p), channel_id=3, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add.clone_promoted, metadata={op_name="jit(step)/dot_general" source_file="/home/user/model.py" source_line=12}
  %alone = f32[1024,1024]{1,0} all-reduce(%q), channel_id=4, replica_groups=[8,1]<=[8], to_apply=%add.clone_promoted
  ROOT %get-tuple-element = f32[512,1,512]{2,1,0} get-tuple-element(%all-to-all.1), index=0
}
"""  # noqa: E501


def test_tuples_of_operands_are_one_collective_with_the_sum_of_their_bytes() -> None:
    exchange, reduce = collectives(CPU_TUPLES, MESH)
    assert (exchange.kind, exchange.nbytes, exchange.group_size) == ("all-to-all", 512 * 1024 * 4, 2)
    assert (reduce.kind, reduce.nbytes, reduce.group_size) == ("all-reduce", (1024 + 512) * 1024 * 4, 4)
    assert (exchange.axes, reduce.axes) == (("x",), ("y",))


def test_a_group_of_one_device_is_left_out() -> None:
    assert all(c.group_size > 1 for c in collectives(CPU_TUPLES))
    assert len(collectives(CPU_TUPLES)) == 2


def test_source_lines_come_from_stack_frames_and_from_the_older_form() -> None:
    exchange, reduce = collectives(CPU_TUPLES)
    assert exchange.source == "/home/user/train.py:97"
    assert reduce.source == "/home/user/model.py:12"
    assert exchange.op_name == "jit(step)/sharding_constraint"


def test_a_frame_in_an_installed_package_yields_to_the_users_line() -> None:
    moved = CPU_TUPLES.replace("stack_frame_id=2", "stack_frame_id=3")
    assert collectives(moved)[0].source == "/home/user/train.py:97"


GPU_ASYNC = HEADER + """
%add.clone (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add = bf16[] add(%x, %y)
}

%body (state: (s32[], bf16[512,1024])) -> (s32[], bf16[512,1024]) {
  %state = (s32[], bf16[512,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = bf16[512,1024]{1,0} get-tuple-element(%state), index=1
  %all-gather-start = (bf16[512,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%h), channel_id=1, replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_1'}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/while/body/squeeze" stack_frame_id=2}, backend_config={"collective_backend_config":{"is_sync":false}}
  %all-gather-done = bf16[1024,1024]{1,0} all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((bf16[1024,1024]{1,0}), bf16[512,1024]{1,0}) reduce-scatter-start(%all-gather-done), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, to_apply=%add.clone
  %reduce-scatter-done = bf16[512,1024]{1,0} reduce-scatter-done(%reduce-scatter-start)
  ROOT %tuple = (s32[], bf16[512,1024]{1,0}) tuple(%i, %reduce-scatter-done)
}

%condition (state.1: (s32[], bf16[512,1024])) -> pred[] {
  %state.1 = (s32[], bf16[512,1024]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (w: bf16[512,1024], v: bf16[256,1024]) -> bf16[512,1024] {
  %w = bf16[512,1024]{1,0} parameter(0)
  %v = bf16[256,1024]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %tuple.1 = (s32[], bf16[512,1024]{1,0}) tuple(%zero, %w)
  %while.8 = (s32[], bf16[512,1024]{1,0}) while(%tuple.1), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}, backend_config={"dynamic_variables":[],"known_induction_variable":{"tuple_index":"0"},"known_trip_count":{"n":"6"}}
  %all-gather-start.1 = ((bf16[512,1024]{1,0}, bf16[256,1024]{1,0}), (bf16[1024,1024]{1,0}, bf16[512,1024]{1,0})) all-gather-start(%w, %v), channel_id=5, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %all-gather-done.1 = (bf16[1024,1024]{1,0}, bf16[512,1024]{1,0}) all-gather-done(%all-gather-start.1)
  %collective-permute-start = (bf16[512,1024]{1,0}, bf16[512,1024]{1,0}, u32[], u32[]) collective-permute-start(%w), channel_id=6, source_target_pairs={{0,0},{1,1},{4,2},{5,3},{2,4},{3,5},{6,6},{7,7}}
  ROOT %collective-permute-done = bf16[512,1024]{1,0} collective-permute-done(%collective-permute-start)
}
"""  # noqa: E501


def test_start_and_done_count_once_and_bodies_of_loops_by_their_runs() -> None:
    found = {(c.kind, c.count): c for c in collectives(GPU_ASYNC, MESH)}
    assert set(found) == {
        ("all-gather", 6.0), ("reduce-scatter", 6.0), ("all-gather", 1.0), ("collective-permute", 1.0),
    }  # fmt: skip
    full, piece = 1024 * 1024 * 2, 512 * 1024 * 2
    assert found["all-gather", 6.0].nbytes == found["reduce-scatter", 6.0].nbytes == full
    assert found["all-gather", 1.0].nbytes == full + piece
    assert found["collective-permute", 1.0].nbytes == piece
    assert found["collective-permute", 1.0].axes == ("x", "y")
    assert bytes_by_kind(collectives(GPU_ASYNC)) == {
        "all-gather": 6 * full + full + piece, "reduce-scatter": 6 * full, "collective-permute": piece,
    }  # fmt: skip


TPU_CHAIN = HEADER + """
%fused_computation.6 (param_0.14: bf16[512,1024]) -> (bf16[512,1024], bf16[1024,1024], u32[]) {
  %param_0.14 = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.11 = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.14), channel_id=2, replica_groups=mesh['x'=2,'y'=4] {'x'}, dimensions={0}, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %custom-call.1 = (bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%all-gather.11), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.15 (param_0.17: bf16[512,1024], param_1.16: bf16[1024,1024], param_2: bf16[512,1024], param_3: bf16[1024,1024]) -> (bf16[512,1024], bf16[1024,1024]) {
  %param_0.17 = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.16 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %param_2 = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(2)
  %param_3 = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(3)
  %convolution.11 = bf16[512,1024]{1,0:T(8,128)(2,1)} convolution(%param_2, %param_3), dim_labels=bf_io->bf
  %all-gather.13 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.17), channel_id=2, replica_groups=mesh['x'=2,'y'=4] {'x'}, dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %tuple.5 = (bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}) tuple(%convolution.11, %all-gather.13)
}

%fused_computation.8 (param_0.18: bf16[512,1024], param_1.17: bf16[1024,1024]) -> bf16[1024,1024] {
  %param_0.18 = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.17 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.15 = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.18), channel_id=2, replica_groups=mesh['x'=2,'y'=4] {'x'}, dimensions={0}
  ROOT %custom-call.3 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} custom-call(%param_0.18, %param_1.17, %all-gather.15), custom_call_target="AsyncCollectiveDone"
}

%add.clone (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add = bf16[] add(%x, %y)
}

%all-reduce-scatter (input_0: bf16[1024,1024]) -> (bf16[512,1024]) {
  %input_0 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-reduce.4 = (bf16[1024,1024]{1,0:T(8,128)(2,1)}) all-reduce(%input_0), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, to_apply=%add.clone
  %get-tuple-element = bf16[1024,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%all-reduce.4), index=0
  %start = u32[] constant(512)
  %zero = u32[] constant(0)
  %dynamic-slice.16 = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%get-tuple-element, %start, %zero), dynamic_slice_sizes={512,1024}
  ROOT %tuple.3 = (bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}) tuple(%dynamic-slice.16)
}

ENTRY %main (w: bf16[512,1024], x: bf16[512,1024]) -> bf16[512,1024] {
  %w = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.16 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} all-gather(%w), channel_id=1, replica_groups=mesh['x'=2,'y'=4] {'x'}, dimensions={0}, metadata={op_name="jit(call)/call_exported/jit(step)/first" stack_frame_id=1}
  %async-collective-start = (bf16[512,1024]{1,0}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%fused_computation.6, metadata={op_name="jit(step)/second" stack_frame_id=2}
  %e0 = bf16[512,1024]{1,0} get-tuple-element(%async-collective-start), index=0
  %e1 = bf16[1024,1024]{1,0} get-tuple-element(%async-collective-start), index=1
  %fusion.15 = (bf16[512,1024]{1,0}, bf16[1024,1024]{1,0}) fusion(%e0, %e1, %x, %all-gather.16), kind=kOutput, calls=%async_collective_fusion.15, backend_config={"window_config":{"estimated_cycles":"12636"}}
  %e2 = bf16[1024,1024]{1,0} get-tuple-element(%fusion.15), index=1
  %async-collective-done = bf16[1024,1024]{1,0} fusion(%e0, %e2), kind=kCustom, calls=%fused_computation.8
  %fusion.3 = (bf16[512,1024]{1,0}) fusion(%async-collective-done), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="jit(step)/dot_general" stack_frame_id=2}, backend_config={"window_config":{"estimated_cycles":"4"}}
  ROOT %result = bf16[512,1024]{1,0} get-tuple-element(%fusion.3), index=0
}
"""  # noqa: E501


def test_a_tpu_collective_that_three_fusions_repeat_counts_once() -> None:
    gathers = [c for c in collectives(TPU_CHAIN, MESH) if c.kind == "all-gather"]
    assert [(c.op_name, c.nbytes, c.count) for c in gathers] == [
        ("jit(step)/first", 2**21, 1.0),
        ("jit(step)/second", 2**21, 1.0),
    ]


def test_a_repeated_collective_without_a_start_counts_once_too() -> None:
    renamed = TPU_CHAIN.replace('"AsyncCollectiveStart"', '"SomethingNew"')
    assert sum(c.kind == "all-gather" for c in collectives(renamed)) == 2


def test_a_fused_all_reduce_and_slice_is_the_tpus_reduce_scatter() -> None:
    scatter = collectives(TPU_CHAIN, MESH)[-1]
    assert (scatter.kind, scatter.nbytes, scatter.axes) == ("reduce-scatter", 2**21, ("x",))
    assert scatter.source == "/home/user/train.py:97"


def test_a_fused_reduce_scatter_counts_what_it_was_given_not_the_filling_of_its_tiles() -> None:
    given = "%all-reduce.4 = (bf16[1024,1024]{1,0:T(8,128)(2,1)}) all-reduce(%input_0)"
    filled = """%bitcast.1 = bf16[131072,8]{1,0} bitcast(%input_0)
  %pad.1 = bf16[131328,8]{1,0} pad(%bitcast.1, %zero), padding=0_256x0_0
  %all-reduce.4 = (bf16[131328,8]{1,0}) all-reduce(%pad.1)"""
    assert given in TPU_CHAIN
    scatter = collectives(TPU_CHAIN.replace(given, filled), MESH)[-1]
    assert (scatter.kind, scatter.nbytes) == ("reduce-scatter", 2**21)


def test_an_all_reduce_that_is_kept_whole_stays_one() -> None:
    kept = TPU_CHAIN.replace("dynamic-slice(%get-tuple-element,", "dynamic-slice(%input_0,")
    assert collectives(kept)[-1].kind == "all-reduce"


def test_cycles_add_up_outside_fusions_and_are_unknown_elsewhere() -> None:
    assert estimated_cycles(TPU_CHAIN) == 12640
    assert estimated_cycles(GPU_ASYNC) is None


def test_a_convolution_that_is_a_dot_counts_as_one() -> None:
    assert flops(TPU_CHAIN) == 2 * 512 * 1024 * 1024


BRANCHES = HEADER + """
%small (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %small-permute = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

%large (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %all-gather = f32[64]{0} all-gather(%p.1), replica_groups={}, dimensions={0}
  ROOT %slice = f32[8]{0} slice(%all-gather), slice={[0:8]}
}

%async_wrapped (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %collective-broadcast = f32[8]{0} collective-broadcast(%p.2), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}
}

%called (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  %sizes = s32[8]{0} constant({1, 1, 1, 1, 1, 1, 1, 1})
  ROOT %ragged-all-to-all = f32[8]{0} ragged-all-to-all(%p.3, %p.3, %sizes, %sizes, %sizes, %sizes), replica_groups={{0,1,2,3,4,5,6,7}}
}

ENTRY %main (x: f32[8], which: pred[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %which = pred[] parameter(1)
  %conditional = f32[8]{0} conditional(%which, %x, %x), true_computation=%small, false_computation=%large
  %again = f32[8]{0} conditional(%which, %x, %x), branch_computations={%small, %small}
  %async-start = ((f32[8]{0}), f32[8]{0}) async-start(%x), calls=%async_wrapped
  %async-update = ((f32[8]{0}), f32[8]{0}) async-update(%async-start), calls=%async_wrapped
  %async-done = f32[8]{0} async-done(%async-update), calls=%async_wrapped
  %call.1 = f32[8]{0} call(%async-done), to_apply=%called
  ROOT %call.2 = f32[8]{0} call(%call.1), to_apply=%called
}
"""  # noqa: E501


def test_the_dearest_branch_counts_and_calls_count_at_every_call() -> None:
    found = [(f.instruction, f.collective.kind, f.collective.nbytes) for f in find_collectives(BRANCHES)]
    assert found == [
        ("all-gather", "all-gather", 256),
        ("small-permute", "collective-permute", 32),
        ("collective-broadcast", "collective-permute", 32),
        ("ragged-all-to-all", "all-to-all", 32),
        ("ragged-all-to-all", "all-to-all", 32),
    ]


def test_rare_collectives_are_named_in_the_notes() -> None:
    notes = summarise(BRANCHES).notes
    assert [n.split(":")[0].split(",")[0] for n in notes] == ["collective-broadcast", "ragged-all-to-all"]


SLICES = """HloModule jit_step, num_partitions=8

ENTRY %main (p: f32[64,1024]) -> f32[128,1024] {
  %p = f32[64,1024]{1,0:T(8,128)} parameter(0), metadata={op_name="p"}
  %after-all = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="all-gather_0"}
  %send = (f32[64,1024]{1,0:T(8,128)}, u32[], token[]) send(%p, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_GATHER"}
  %recv = (f32[128,1024]{1,0:T(8,128)}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_GATHER"}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[128,1024]{1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %plain = (f32[64,1024]{1,0:T(8,128)}, u32[], token[]) send(%p, %after-all), channel_id=3, is_host_transfer=true
  ROOT %got = f32[128,1024]{1,0:T(8,128)} get-tuple-element(%recv-done), index=0
}
"""  # noqa: E501


def test_a_transfer_between_slices_is_the_collective_it_does() -> None:
    (gather,) = collectives(SLICES, MeshShape.of({"slice": 2, "data": 8}))
    assert (gather.kind, gather.nbytes, gather.group_size) == ("all-gather", 128 * 1024 * 4, 2)
    assert gather.axes == ("slice",)
