"""Compiled modules on a timeline: closed forms on small texts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import MeshError, MeshShape
from meshplan.lower._hlo_parse import parse_module
from meshplan.lower._hlo_timeline import ModuleTimeline, module_timeline
from meshplan.lower._hlo_traffic import Traffic
from meshplan.machine import Chip, Machine, collective_time

H100 = Machine.preset("h100:1x8")
V5E = Machine.preset("tpu-v5e:2x4")
EIGHT = MeshShape.of({"data": 8})
KERNEL = 3e-6  # the start of one on a GPU, as cost/ states it
MB = 1 << 18  # elements of a float32 array of 1 MiB


def module(*lines: str, before: str = "") -> str:
    """A module of eight devices whose parameter %p is 1 MiB."""
    body = "\n".join(f"  {line}" for line in (f"%p = f32[{MB}]{{0}} parameter(0)", *lines))
    head = f"HloModule m, is_scheduled=true, num_partitions=8\n\n{before}\nENTRY %main (p: f32[{MB}]) -> f32[]"
    return f"{head} {{\n{body}\n}}\n"


def work(name: str, mib: int = 1) -> str:
    """Computes something that writes so many MiB and reads one."""
    return f"%{name} = f32[{mib},{MB}]{{1,0}} exponential(%p)"


def worked(mib: int = 1, machine: Machine = H100) -> float:
    """It reads as much of %p as it writes, at most all of it: one MiB."""
    return (mib + 1) * 4 * MB / machine.chip.memory_bytes_per_second + KERNEL


def start(name: str, groups: str = "{}", more: str = "") -> str:
    return f"%{name} = f32[{MB}]{{0}} all-reduce-start(%p), channel_id=1, replica_groups={groups}, to_apply=%add{more}"


def done(name: str) -> str:
    return f"%{name}-done = f32[{MB}]{{0}} all-reduce-done(%{name})"


def reduced(machine: Machine = H100, mesh: MeshShape = EIGHT, axes: tuple[str, ...] = ("data",)) -> float:
    return collective_time(machine, mesh, "all-reduce", 4 * MB, axes).seconds


def timed(text: str, machine: Machine = H100, mesh: MeshShape = EIGHT) -> ModuleTimeline:
    found = module_timeline(text, machine, mesh)
    assert found.seconds == pytest.approx(found.compute_seconds + found.exposed_seconds + found.copy_seconds)
    assert found.exposed_seconds == pytest.approx(sum(c.exposed_seconds for c in found.collectives))
    return found


def figures(t: ModuleTimeline) -> tuple[float, ...]:
    return t.seconds, t.compute_seconds, t.collective_seconds, t.exposed_seconds, t.hidden_seconds


def test_nothing_between_start_and_done_overlaps_nothing() -> None:
    c = reduced()
    found = timed(module(start("ar"), done("ar"), work("w")))
    assert figures(found) == pytest.approx((worked() + c, worked(), c, c, 0))


def test_enough_computation_between_start_and_done_hides_the_collective() -> None:
    c = reduced()
    assert worked(512) > c
    found = timed(module(start("ar"), work("w", 512), done("ar")))
    assert figures(found) == pytest.approx((worked(512), worked(512), c, 0, c))


def test_part_of_a_collective_is_hidden_and_the_rest_exposed_at_its_line() -> None:
    c, w = reduced(), worked()
    assert w < c
    place = ', metadata={op_name="jit(f)/add" source_file="a/m.py" source_line=7}'
    found = timed(module(start("ar", more=place), work("w"), done("ar")))
    assert figures(found) == pytest.approx((c, w, c, c - w, w))
    (row,) = found.collectives
    assert (row.kind, row.source, row.axes, row.count) == ("all-reduce", "a/m.py:7", ("data",), 1)
    assert (row.seconds, row.exposed_seconds) == pytest.approx((c, c - w))


SYNCHRONOUS = ', backend_config={"collective_backend_config":{"is_sync":true}}'


@pytest.mark.parametrize(
    "lines",
    [
        (f"%ar = f32[{MB}]{{0}} all-reduce(%p), replica_groups={{}}, to_apply=%add", work("w", 512)),
        (start("ar", more=SYNCHRONOUS), work("w", 512), done("ar")),
    ],
    ids=["no start", "a start that is stated to be synchronous"],
)
def test_a_synchronous_collective_blocks(lines: tuple[str, ...]) -> None:
    c = reduced()
    assert figures(timed(module(*lines))) == pytest.approx((worked(512) + c, worked(512), c, c, 0))


def test_a_collective_wrapped_in_an_asynchronous_call_is_found() -> None:
    c, w = reduced(), worked()
    inside = f"%wrapped (p: f32[{MB}]) -> f32[] {{\n  %p = f32[{MB}]{{0}} parameter(0)\n  ROOT {start('ar')}\n}}\n"
    inside = inside.replace("all-reduce-start", "all-reduce")
    begin = f"%s = ((f32[{MB}]{{0}}), f32[{MB}]{{0}}, s32[]) async-start(%p), calls=%wrapped"
    end = f"%e = f32[{MB}]{{0}} async-done(%s)"
    assert figures(timed(module(begin, work("w"), end, before=inside))) == pytest.approx((c, w, c, c - w, w))


def test_a_transfer_between_slices_lasts_until_it_is_received() -> None:
    machine, mesh = Machine.preset("tpu-v5e:2*2x2"), MeshShape.of({"slice": 2, "data": 4})
    what = '_xla_megascale_transfer_type="ALL_REDUCE",_xla_megascale_target="{1,2}x{0:3}"'
    lines = (
        "%t = token[] after-all()",
        f"%s = (f32[{MB}]{{0}}, u32[], token[]) send(%p, %t), channel_id=7, frontend_attributes={{{what}}}",
        f"%r = (f32[{MB}]{{0}}, u32[], token[]) recv(%t), channel_id=7, frontend_attributes={{{what}}}",
        "%sd = token[] send-done(%s), channel_id=7",
        f"%rd = (f32[{MB}]{{0}}, token[]) recv-done(%r), channel_id=7",
    )
    text = module(*lines).replace("num_partitions=8", "num_partitions=4")
    found = timed(text, machine, mesh)
    assert [c.kind for c in found.collectives] == ["all-reduce"]
    assert found.seconds == found.exposed_seconds == pytest.approx(found.collective_seconds) != 0
    beside = timed(text.replace("%sd =", work("w", 8) + "\n  %sd ="), machine, mesh)
    assert beside.hidden_seconds == pytest.approx(beside.compute_seconds)


def test_a_collective_that_is_never_waited_for_ends_with_the_step() -> None:
    c, w = reduced(), worked()
    assert figures(timed(module(start("ar"), work("w")))) == pytest.approx((c, w, c, c - w, w))


def test_two_collectives_on_one_link_queue() -> None:
    c = reduced()
    found = timed(module(start("a"), start("b"), done("a"), done("b")))
    assert figures(found) == pytest.approx((2 * c, 0, 2 * c, 2 * c, 0))
    swapped = timed(module(start("a"), start("b"), done("b"), done("a")))
    assert figures(swapped) == pytest.approx((2 * c, 0, 2 * c, 2 * c, 0))


def test_two_collectives_on_different_links_run_at_once() -> None:
    machine, mesh = Machine.preset("h100:2x8"), MeshShape.of({"node": 2, "gpu": 8})
    outer = "{" + ",".join(f"{{{i},{i + 8}}}" for i in range(8)) + "}"
    text = module(start("a", outer), start("b", "{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}"), done("a"), done("b"))
    text = text.replace("num_partitions=8", "num_partitions=16")
    a, b = reduced(machine, mesh, ("node",)), reduced(machine, mesh, ("gpu",))
    found = timed(text, machine, mesh)
    assert {c.axes: c.seconds for c in found.collectives} == pytest.approx({("node",): a, ("gpu",): b})
    assert figures(found) == pytest.approx((max(a, b), 0, a + b, max(a, b), min(a, b)))


def test_a_group_of_one_device_costs_nothing() -> None:
    alone = "{{0},{1},{2},{3},{4},{5},{6},{7}}"
    found = timed(module(start("a", alone), done("a"), work("w")))
    assert figures(found) == pytest.approx((worked(), worked(), 0, 0, 0))
    assert found.collectives == ()


def test_a_module_of_another_number_of_devices_than_the_machine_is_refused() -> None:
    with pytest.raises(MeshError, match=r"has 4 devices, machine .* has 8"):
        module_timeline(module(start("a"), done("a")), H100, MeshShape.of({"data": 4}))


# ---------------------------------------------------------------------------------------------------- control flow


def looped(*lines: str, trips: int = 6) -> tuple[str, str]:
    """(the computations of a loop over these lines, the instruction)."""
    body = "\n".join(f"  {line}" for line in (f"%p = f32[{MB}]{{0}} parameter(0)", *lines))
    condition = f"%cond (q: f32[{MB}]) -> pred[] {{\n  %q = f32[] parameter(0)\n}}\n"
    inside = f"%body (p: f32[{MB}]) -> f32[] {{\n{body}\n}}\n{condition}"
    known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return inside, f"%while = f32[{MB}]{{0}} while(%p), condition=%cond, body=%body, {known}"


def test_a_loop_takes_its_turns() -> None:
    c, w = reduced(), worked()
    inside, loop = looped(start("ar"), work("w"), done("ar"), work("v"))
    found = timed(module(loop, before=inside))
    assert figures(found) == pytest.approx((6 * (c + w), 12 * w, 6 * c, 6 * (c - w), 6 * w))
    assert found.collectives[0].count == 6


def test_a_collective_hides_behind_a_loop_that_uses_no_links() -> None:
    c, w = reduced(), worked()
    inside, loop = looped(work("w"), trips=4)
    short = timed(module(start("a"), loop, done("a"), before=inside))
    assert figures(short) == pytest.approx((c, 4 * w, c, c - 4 * w, 4 * w))
    longer = timed(module(start("a"), loop.replace('"n":"4"', '"n":"1000"'), done("a"), before=inside))
    assert figures(longer) == pytest.approx((1000 * w, 1000 * w, c, 0, c))


def test_collectives_of_a_loop_queue_behind_one_that_was_started_before_it() -> None:
    c, w = reduced(), worked()
    inside, loop = looped(start("b"), work("w"), done("b"))
    found = timed(module(start("a"), loop, done("a"), before=inside))
    assert found.seconds == pytest.approx(7 * c), "the first turn waits for it, the others find the links free"
    assert found.compute_seconds == pytest.approx(6 * w)
    alone = timed(module(start("a"), done("a"), loop, before=inside))
    assert alone.seconds == pytest.approx(7 * c)


def test_links_that_a_turn_leaves_busy_catch_up_over_the_turns() -> None:
    c, w = reduced(), worked(512)
    inside, loop = looped(start("b"), work("w", 512), done("b"), trips=9)
    starts = [start(f"a{k}") for k in range(5)]
    found = timed(module(*starts, loop, *(done(f"a{k}") for k in range(5)), before=inside))
    now, free = 0.0, 5 * c
    for _ in range(9):
        free = max(free, now) + c
        now = max(now + w, free)
    assert found.seconds == pytest.approx(now)
    assert found.collective_seconds == pytest.approx(14 * c)


def test_of_a_conditional_the_longest_branch_runs() -> None:
    short, long = (f"%{n} (p: f32[{MB}]) -> f32[] {{\n  %p = f32[{MB}]{{0}} parameter(0)\n  {work(n, m)}\n}}\n"
                   for n, m in (("s", 1), ("l", 8)))  # fmt: skip
    found = timed(module("%c = f32[] conditional(%p, %p, %p), branch_computations={%s, %l}", before=short + long))
    assert found.seconds == pytest.approx(worked(8))


def test_a_call_is_what_it_calls() -> None:
    inside = f"%f (p: f32[{MB}]) -> f32[] {{\n  %p = f32[{MB}]{{0}} parameter(0)\n  {work('x', 2)}\n}}\n"
    assert timed(module("%c = f32[] call(%p), to_apply=%f", before=inside)).seconds == pytest.approx(worked(2))


# ------------------------------------------------------------------------------------------------- TPUs and copies

CHAIN = f"""%begin (a: f32[{MB}]) -> f32[] {{
  %a = f32[{MB}]{{0}} parameter(0)
  %all-reduce.1 = f32[{MB}]{{0}} all-reduce(%a), channel_id=5, replica_groups={{}}, to_apply=%add
  ROOT %cc.1 = f32[] custom-call(%all-reduce.1), custom_call_target="AsyncCollectiveStart"
}}
%async_collective_fusion (b: f32[{MB}], c: f32[{MB}]) -> f32[] {{
  %b = f32[{MB}]{{0}} parameter(0)
  %c = f32[{MB}]{{0}} parameter(1)
  %exp.1 = f32[{MB}]{{0}} exponential(%c)
  %all-reduce.2 = f32[{MB}]{{0}} all-reduce(%b), channel_id=5, replica_groups={{}}, to_apply=%add
  ROOT %t = (f32[{MB}]{{0}}, f32[{MB}]{{0}}) tuple(%exp.1, %b)
}}
%end (d: f32[{MB}]) -> f32[] {{
  %d = f32[{MB}]{{0}} parameter(0)
  %all-reduce.3 = f32[{MB}]{{0}} all-reduce(%d), channel_id=5, replica_groups={{}}, to_apply=%add
  ROOT %cc.3 = f32[{MB}]{{0}} custom-call(%d, %all-reduce.3), custom_call_target="AsyncCollectiveDone"
}}
"""
FUSED = (
    "%f1 = f32[] fusion(%p), kind=kCustom, calls=%begin",
    '%f2 = f32[] fusion(%p, %p), calls=%async_collective_fusion, backend_config={"estimated_cycles":"900"}',
    "%f3 = f32[] fusion(%p), kind=kCustom, calls=%end",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockedChip(Chip):
    clock_hertz: float | None = None


def clocked(machine: Machine, hertz: float) -> Machine:
    chip = machine.chip
    values = {name: getattr(chip, name) for name in Chip.__dataclass_fields__ if name != "clock_hertz"}
    return replace(machine, chip=ClockedChip(**values, clock_hertz=hertz))


def test_asynchronous_fusions_of_a_tpu_move_beside_what_they_compute() -> None:
    machine, c = clocked(V5E, 1e6), reduced(V5E)
    found = timed(module(*FUSED, before=CHAIN), machine)
    assert found.by_cycles
    assert figures(found) == pytest.approx((9e-4, 9e-4, c, 0, c))
    plain = timed(module(*FUSED, before=CHAIN), clocked(V5E, 1e8))
    assert figures(plain) == pytest.approx((c, 9e-6, c, c - 9e-6, 9e-6))


def test_fusions_that_repeat_a_collective_without_a_beginning_run_it_once() -> None:
    c = reduced(V5E)
    again = CHAIN[CHAIN.index("%async") : CHAIN.index("%end")]
    again = again.replace("fusion (", "fusion.1 (").replace("reduce.2", "reduce.4")
    calls = FUSED[1], FUSED[1].replace("%f2", "%f4").replace("_fusion,", "_fusion.1,")
    found = timed(module(*calls, before=CHAIN + again), clocked(V5E, 1e6))
    assert figures(found) == pytest.approx((18e-4, 18e-4, c, 0, c))


def test_without_a_clock_a_tpu_is_a_roofline() -> None:
    machine = clocked(V5E, 0.0)
    found = timed(module('%w = f32[1048576]{0} exponential(%p), backend_config={"estimated_cycles":"5"}'), machine)
    assert not found.by_cycles
    assert found.seconds == pytest.approx(5 * MB * 4 / V5E.chip.memory_bytes_per_second + 1e-6)


@pytest.mark.parametrize(("space", "host"), [("S(5)", True), ("S(1)", False)])
def test_copies_between_memories_run_beside_the_computation(space: str, host: bool) -> None:
    shape = f"(f32[{MB}]{{0:{space}}}, f32[{MB}]{{0}}, u32[])"
    lines = (f"%s = {shape} copy-start(%p)", f"%d = f32[{MB}]{{0:{space}}} copy-done(%s)")
    chip = V5E.chip
    rate = chip.host_bytes_per_second if host else chip.memory_bytes_per_second
    found = timed(module(*lines), V5E)
    assert (found.seconds, found.copy_seconds) == pytest.approx((4 * MB / rate, 4 * MB / rate))
    assert figures(found)[1:] == (0, 0, 0, 0)
    hidden = timed(module(lines[0], work("w", 512), lines[1]), V5E)
    assert (hidden.seconds, hidden.copy_seconds) == (pytest.approx(hidden.compute_seconds), 0)


# ---------------------------------------------------------------------------------------------------------- traffic


def traffic(fused: str, call: str, operands: str) -> float:
    text = f"HloModule m\n\n%fused (x: f32[]) -> f32[] {{\n{fused}\n}}\n\n"
    text += f"ENTRY %main (p: f32[]) -> f32[] {{\n{operands}\n  {call}\n}}\n"
    found = parse_module(text)
    main = found.computations["main"]
    return Traffic(found).nbytes(main.instructions[-1], main)


STACK = """  %s = f32[16,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,1024]{1,0} parameter(2)"""


def test_a_fusion_reads_its_operands_once_and_writes_its_results() -> None:
    fused = STACK + """
  %b = f32[16,1024]{1,0} broadcast(%u), dimensions={0,1}
  %m = f32[16,1024]{1,0} multiply(%s, %b)
  %a = f32[16,1024]{1,0} add(%m, %s)
  ROOT %t = (f32[16,1024]{1,0}, f32[16,1024]{1,0}) tuple(%m, %a)"""
    call = "%f = (f32[16,1024]{1,0}, f32[16,1024]{1,0}) fusion(%s, %i, %u), calls=%fused"
    assert traffic(fused, call, STACK) == 4 * (16 * 1024 + 1024 + 2 * 16 * 1024)


def test_a_slice_of_a_stack_counts_its_own_bytes() -> None:
    fused = STACK + """
  %z = s32[] constant(0)
  %c = bf16[16,1024]{1,0} convert(%s)
  %d = bf16[1,1024]{1,0} dynamic-slice(%c, %i, %z), dynamic_slice_sizes={1,1024}
  ROOT %r = bf16[1024]{0} bitcast(%d)"""
    call = "%f = bf16[1024]{0} fusion(%s, %i, %u), calls=%fused"
    assert traffic(fused, call, STACK) == 4 * 1024 + 4 + 2 * 1024, "one slice and the index read, one slice written"


def test_an_update_of_a_stack_in_place_counts_the_update() -> None:
    fused = STACK + """
  %z = s32[] constant(0)
  %e = f32[1,1024]{1,0} exponential(%u)
  %d = f32[16,1024]{1,0} dynamic-update-slice(%s, %e, %i, %z)
  ROOT %r = f32[16384]{0} bitcast(%d)"""
    call = "%f = f32[16384]{0} fusion(%s, %i, %u), calls=%fused"
    assert traffic(fused, call, STACK) == 2 * 4 * 1024 + 4
    of_made = fused.replace("dynamic-update-slice(%s", "dynamic-update-slice(%n")
    of_made = of_made.replace("%e =", "%n = f32[16,1024]{1,0} negate(%s)\n  %e =")
    assert traffic(of_made, call, STACK) == 4 * (2 * 16 * 1024 + 1024) + 4, "what is made inside is written whole"


def test_what_is_not_fused_counts_alike() -> None:
    dus = "%f = f32[16,1024]{1,0} dynamic-update-slice(%s, %u, %i, %i)"
    assert traffic("", dus, STACK) == 2 * 4 * 1024 + 8
    assert traffic("", "%f = f32[1,1024]{1,0} dynamic-slice(%s, %i, %i)", STACK) == 2 * 4 * 1024 + 8
    assert traffic("", "%f = f32[16,1024]{1,0} copy(%s)", STACK) == 2 * 4 * 16 * 1024
    call = '%f = (f32[16,1024]{1,0}, s8[99]{0}) custom-call(%s, %s), custom_call_target="__cublas$gemm"'
    assert traffic("", call, STACK) == 3 * 4 * 16 * 1024, "a workspace is not traffic"


def test_a_scatter_reads_and_writes_what_it_updates() -> None:
    call = "%f = f32[16,1024]{1,0} scatter(%s, %i, %u), to_apply=%add"
    assert traffic("", call, STACK) == 4 + 3 * 4 * 1024


def test_a_product_takes_the_longer_of_arithmetic_and_traffic() -> None:
    n, chip = 4096, H100.chip
    lines = (
        f"%a = bf16[{n},{n}]{{1,0}} bitcast(%p)",
        f"%d = bf16[{n},{n}]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
        f"%v = bf16[{n},1]{{1,0}} bitcast(%p)",
        f"%e = bf16[{n},1]{{1,0}} dot(%a, %v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
    )
    large = timed(module(*lines[:2])).seconds
    assert large == pytest.approx(2 * n**3 / chip.flops_for("bfloat16") + KERNEL)
    both = timed(module(*lines)).seconds
    assert both - large == pytest.approx(2 * (n * n + 2 * n) / chip.memory_bytes_per_second + KERNEL)


# ------------------------------------------------------------------------------------------------------- properties


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, list[str]]:
    """(module text, groups of the collectives) of random starts, dones and computation."""
    groups = st.sampled_from(["{}", "{{0,1},{2,3},{4,5},{6,7}}", "{{0,2,4,6},{1,3,5,7}}"])
    lines: list[str] = []
    used: list[str] = []
    open_: list[str] = []
    for k in range(draw(st.integers(0, 12))):
        match draw(st.sampled_from(["work", "start", "done"])):
            case "work":
                lines.append(work(f"w{k}", draw(st.integers(1, 300))))
            case "start":
                used.append(draw(groups))
                lines.append(start(f"a{k}", used[-1]))
                open_.append(f"a{k}")
            case _ if open_:
                lines.append(done(open_.pop(draw(st.integers(0, len(open_) - 1)))))
    return module(*lines, *map(done, open_)), used


@given(schedules(), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_step_lies_between_its_longest_part_and_the_sum_of_all(drawn: tuple[str, list[str]], trips: int) -> None:
    text, used = drawn
    mesh = MeshShape.of({"a": 4, "b": 2})
    found = timed(text, mesh=mesh)
    longest = max((c.seconds / c.count for c in found.collectives), default=0.0)
    assert sum(c.count for c in found.collectives) == len(used)
    assert max(found.compute_seconds, longest) <= found.seconds * (1 + 1e-12)
    assert found.seconds <= (found.compute_seconds + found.collective_seconds) * (1 + 1e-12)
    assert -1e-15 <= found.hidden_seconds <= found.collective_seconds + 1e-15
    body = text[text.index("ENTRY") :].replace("ENTRY %main", "%body")
    inside, loop = looped(trips=trips)
    inside = body + inside[inside.index("%cond") :]
    assert timed(module(loop, before=inside), mesh=mesh).seconds == pytest.approx(trips * found.seconds)
