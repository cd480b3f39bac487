"""Compiles for TPU: marked, skipped without the compiler, one process at a time."""

from __future__ import annotations

import fcntl
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder, so that `-m "not tpu"` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.tpu)
            if importlib.util.find_spec("libtpu") is None:
                item.add_marker(pytest.mark.skip(reason="needs libtpu: pip install 'meshplan[tpu]'"))


@pytest.fixture(scope="session", autouse=True)
def one_tpu_compiler() -> Iterator[None]:
    """libtpu admits one process on a machine: wait for the other test runs that hold it."""
    with (Path(tempfile.gettempdir()) / "meshplan-tests-libtpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
