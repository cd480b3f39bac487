"""Compiles for NVIDIA GPUs: marked, skipped without the compiler."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def has_gpu_compiler() -> bool:
    """Whether jax's CUDA plugin is installed; a driver is not needed to compile."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{major}") is not None for major in (12, 13)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder, so that `-m "not gpu"` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not has_gpu_compiler():
                item.add_marker(pytest.mark.skip(reason="needs jax-cuda12-pjrt: pip install 'meshplan[cuda-aot]'"))
