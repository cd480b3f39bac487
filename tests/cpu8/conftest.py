"""Meshes over the eight host devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

MeshMaker = Callable[..., Mesh]


@pytest.fixture(scope="session")
def make_mesh() -> MeshMaker:
    """`make_mesh(data=4, model=2)`: a mesh with Auto axes over the first devices."""

    def make(**sizes: int) -> Mesh:
        count = int(np.prod(list(sizes.values()), dtype=int))
        devices = np.asarray(jax.devices()[:count]).reshape(tuple(sizes.values()))
        return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    return make


@pytest.fixture(scope="session")
def mesh8(make_mesh: MeshMaker) -> Mesh:
    """All eight host devices, as data=4, model=2."""
    mesh = make_mesh(data=4, model=2)
    assert mesh.size == 8, f"tests/cpu8 needs 8 host devices, jax sees {jax.device_count()}"
    return mesh
