"""Compiles one exported program for a described machine; run as a script, in a process of its own.

A compiler for foreign hardware can abort its process, so it gets one that nobody else needs.
Reads `request.json` and `program.pickle` (written by the parent, same interpreter) in the
directory named on the command line and writes `result.json` and `module.hlo` there, each
complete or not at all.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

NO_TILES = "Couldn't find output tile sizes"
MEMORY_FIELDS = {
    "argument_bytes": "argument_size_in_bytes", "output_bytes": "output_size_in_bytes",
    "temp_bytes": "temp_size_in_bytes", "alias_bytes": "alias_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes", "host_argument_bytes": "host_argument_size_in_bytes",
    "host_output_bytes": "host_output_size_in_bytes", "host_temp_bytes": "host_temp_size_in_bytes",
    "host_alias_bytes": "host_alias_size_in_bytes",
}


def topology_devices(platform: str, topology: str, extra: dict[str, Any]) -> list[Any]:
    """The devices of a described machine; those of this process for the CPU."""
    import jax

    if platform == "cpu":
        return list(jax.devices("cpu"))[: int(topology)]
    from jax.experimental import topologies

    # The GPU plugin reads slices x hosts x devices from an argument of its own.
    options = {"topology": topology, **extra} if platform == "cuda" else extra
    return list(topologies.get_topology_desc(platform=platform, topology_name=topology, **options).devices)


def make_mesh(mesh: Any, devices: list[Any]) -> Any:
    """A mesh of these devices with the axes of an abstract one, its last axis on the fastest links."""
    import jax
    import numpy as np

    from meshplan.machine import device_order

    grid = np.array(device_order(devices)).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def compile_exported(exported: Any, donated: tuple[int, ...], devices: list[Any]) -> Any:
    """A `jax.stages.Compiled` of a flat exported program (`in_tree`: one tuple of leaves) on these devices.

    Arguments that the program was exported for without a sharding are left to the compiler, or whole
    on every device where none has one.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    abstract = exported.mesh
    if abstract is None:
        single = jax.sharding.SingleDeviceSharding(devices[0])
        ins = [single for _ in exported.program.in_avals]
        outs: Any = None
    else:
        mesh = make_mesh(abstract, devices)
        ins = [_on(s, mesh) for s in exported.in_shardings]
        if all(s is None for s in ins):
            ins = [NamedSharding(mesh, PartitionSpec()) for _ in ins]
        outs = tuple(_on(s, mesh) for s in exported.out_shardings)
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(exported.program.in_avals, ins, strict=True)
    ]
    options = {} if outs is None or all(s is None for s in outs) else {"out_shardings": outs}
    lowered = jax.jit(exported.program.call, donate_argnums=donated, **options).lower(*args)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if NO_TILES not in str(error):
            raise
        # Without a device to try them on, XLA:GPU's fusions of products cannot always choose their tiles.
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def _on(sharding: Any, mesh: Any) -> Any:
    from jax.sharding import NamedSharding

    if sharding is None:
        return None
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def describe(compiled: Any) -> dict[str, Any]:
    """Memory by our names and shardings as text."""
    import jax

    sizes = compiled.memory_analysis()
    return {
        "memory": {ours: int(getattr(sizes, theirs, 0) or 0) for ours, theirs in MEMORY_FIELDS.items()},
        "input_shardings": [str(s) for s in jax.tree.leaves(compiled.input_shardings)],
        "output_shardings": [str(s) for s in jax.tree.leaves(compiled.output_shardings)],
    }


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is complete or absent."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class Shipped:
    """What `program.pickle` holds, under the names that `compile_exported` reads."""

    def __init__(self, program: Any, mesh: Any, in_shardings: Any, out_shardings: Any) -> None:
        self.program, self.mesh = program, mesh
        self.in_shardings, self.out_shardings = in_shardings, out_shardings


def run(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    import jax

    for name, value in request["config"].items():
        jax.config.update(name, value)
    result: dict[str, Any]
    started = time.perf_counter()
    try:
        with (folder / "program.pickle").open("rb") as file:
            shipped = Shipped(*pickle.load(file))
        devices = topology_devices(request["platform"], request["topology"], request["extra"])
        if len(devices) != request["devices"]:
            raise ValueError(
                f"the topology {request['topology']} has {len(devices)} devices, the program {request['devices']}"
            )
        compiled = compile_exported(shipped, tuple(request["donated"]), devices)
        result = describe(compiled)
        write_whole(folder / "module.hlo", compiled.as_text())
    except Exception as error:  # reported to the parent, which knows how to say it
        result = {"error": f"{type(error).__name__}: {error}"}
        import traceback

        traceback.print_exc()
    result["seconds"] = time.perf_counter() - started
    write_whole(folder / "result.json", json.dumps(result))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
