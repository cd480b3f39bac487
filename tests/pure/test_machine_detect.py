"""The machine that devices make up, told from their attributes alone."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import MachineError, MeshShape
from meshplan.machine import Machine, collective_rate, collective_seconds, device_order


@dataclass(frozen=True)
class Device:
    """What detection reads of a jax device."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, ...] | None = None
    core_on_chip: int = 0


def tpus(kind: str, *shape: int, slices: int = 1, cores: int = 1) -> list[Device]:
    """As the runtime lists them: the first coordinate varies fastest."""
    x, y, z = (*shape, 1)[:3]
    places = [(i, j, k, c) for k in range(z) for j in range(y) for i in range(x) for c in range(cores)]
    return [
        Device(s * len(places) + n, "tpu", kind, process_index=s, slice_index=s, coords=(i, j, k), core_on_chip=c)
        for s in range(slices)
        for n, (i, j, k, c) in enumerate(places)
    ]


def gpus(nodes: int, per_node: int, kind: str = "NVIDIA H100 80GB HBM3") -> list[Device]:
    return [Device(n * per_node + i, "gpu", kind, process_index=n) for n in range(nodes) for i in range(per_node)]


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (tpus("TPU v5 lite", 2, 4), "tpu-v5e:2x4"),
        (tpus("TPU v6 lite", 4, 4), "tpu-v6e:4x4"),
        (tpus("TPU v5", 2, 2, 2), "tpu-v5p:2x2x2"),
        (tpus("TPU v4", 4, 4, 4), "tpu-v4:4x4x4"),
        (tpus("TPU v5 lite", 2, 2, slices=2), "tpu-v5e:2*2x2"),
        (gpus(1, 8), "h100:1x8"),
        (gpus(4, 8), "h100:4x8"),
        (gpus(2, 4, "NVIDIA A100-SXM4-80GB"), "a100:2x4"),
    ],
)
def test_devices_name_their_machine(devices, name):
    assert Machine.detect(devices) == Machine.preset(name)
    assert Machine.detect(devices[::-1]) == Machine.preset(name)


def test_one_process_per_gpu_is_grouped_by_host_where_the_runtime_tells():
    kind = "NVIDIA H200"
    one_host = [Device(i, "gpu", kind, process_index=i, slice_index=0) for i in range(8)]
    two_hosts = [Device(i, "gpu", kind, process_index=i, slice_index=i // 4) for i in range(8)]
    assert Machine.detect(one_host).name == "h200:1x8"
    assert Machine.detect(two_hosts).name == "h200:2x4"


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ([], "no devices to detect a machine from"),
        (gpus(1, 1) + tpus("TPU v4", 2, 2), "devices of several kinds: NVIDIA H100 80GB HBM3, TPU v4;"),
        (gpus(1, 2, "NVIDIA T4"), "device kind 'NVIDIA T4' is unknown; known kinds: NVIDIA A100-SXM4-80GB, "),
        (gpus(2, 4)[:7], "the nodes have unequal numbers of devices (node 0: 4, node 1: 3); give nodes of one size."),
        (tpus("TPU v5 lite", 2, 2)[:3], "TPU v5e: 3 devices do not fill the box of 2x2 that they span;"),
        (tpus("TPU v4", 2, 2, cores=2), "TPU v4: 2 devices on one chip (one per core);"),
        (
            tpus("TPU v5 lite", 2, 4)
            + [Device(8 + d.id, "tpu", d.device_kind, 1, 1, d.coords) for d in tpus("TPU v5 lite", 4, 2)],
            "TPU v5e: slices of different shapes (2x4, 4x2);",
        ),
    ],
)
def test_devices_that_are_no_known_machine_are_told(devices, sentence):
    with pytest.raises(MachineError, match=re.escape(sentence)):
        Machine.detect(devices)


def test_device_order_follows_the_dims_of_the_machine():
    ordered = device_order(tpus("TPU v5 lite", 2, 4, slices=2)[::-1])
    assert [(d.slice_index, d.coords[:2]) for d in ordered] == [
        (s, (x, y)) for s in range(2) for x in range(2) for y in range(4)
    ]
    assert [d.id for d in device_order(gpus(2, 2)[::-1])] == [0, 1, 2, 3]


@pytest.mark.parametrize("devices", [tpus("TPU v5 lite", 2, 2, slices=2)[::-1], gpus(2, 4)[::-1]], ids=["tpu", "gpu"])
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"fsdp": 8}], ids=str)
def test_one_call_builds_the_mesh_with_the_fast_links_innermost(devices, mesh):
    """Case 15: two slices (nodes) of four, in any order: an axis that spans them is priced at the slow link."""
    machine = Machine.detect(devices)
    first, *rest = mesh
    inner = tuple(rest)
    args = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2
    pins = {"x": P(first, *inner), "w": P(*inner or (None,)), "0": P()}
    plan = mp.plan(lambda x, w: (x @ w).sum(0), *args, machine=machine, mesh=mesh, pins=pins, donate_argnums=())
    built = plan.mesh(devices)
    assert dict(built.shape) == mesh
    slice_of = [d.process_index for d in built.devices.reshape(-1)]
    assert slice_of == [0] * 4 + [1] * 4, "the outermost axis goes over the slow links"
    if mesh == {"dp": 2, "tp": 4}:
        assert all(len({d.process_index for d in row}) == 1 for row in built.devices), "tp stays within a slice"
    slow, shape = machine.dims[0].bytes_per_second, MeshShape.of(mesh)
    for c in plan.collectives:
        passes = 2 if c.kind == "all-reduce" else 1
        floor = passes * 0.5 * (c.nbytes / min(4, c.group_size)) / slow  # one half to the other over the slow links
        moving = c.nbytes * collective_rate(machine, shape, c.kind, c.axes)[1]  # without the latency
        assert (moving >= floor) == (first in c.axes)
    assert {a for c in plan.collectives for a in c.axes} == set(mesh)
    if inner:
        near, far = (collective_seconds(machine, shape, "all-reduce", 1e9, (axis,)) for axis in (*inner, first))
        assert near < far / 2
