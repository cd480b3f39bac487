"""The resources of one device of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.machine import Machine
from meshplan.simulate._task import Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResources:
    """Resources and where to find each: `resources[compute]`, `resources[links[level][dim]]`, `resources[host]`.

    `level` and `dim` index `Machine.levels` and its dims, as a `LinkShare` does.
    """

    resources: tuple[Resource, ...]
    compute: int
    links: tuple[tuple[int, ...], ...]
    host: int


def device_resources(machine: Machine, *, device: int = 0, start: int = 0) -> DeviceResources:
    """A compute engine (in program order), one resource per link dim, and the link to the host.

    A link dim's rate is that of one link one way, in bytes per second (`LinkDim.bytes_per_second`).
    `start`: the index of the first resource, where several devices' resources are put in one row.
    """
    found = [Resource(name="compute", kind="compute", device=device, in_order=True)]
    links = []
    for level in machine.levels:
        links.append(tuple(start + len(found) + k for k in range(len(level.dims))))
        found += [
            Resource(name=dim.name, kind="link", device=device, bytes_per_second=dim.bytes_per_second)
            for dim in level.dims
        ]
    host = Resource(name="host", kind="host", device=device, bytes_per_second=machine.chip.host_bytes_per_second)
    return DeviceResources(
        resources=(*found, host), compute=start, links=tuple(links), host=start + len(found)
    )
