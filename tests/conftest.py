"""Eight host devices for every test, set up before anything imports jax."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import settings

HOST_DEVICES = 8
ROOT = Path(__file__).resolve().parents[1]


def with_host_devices(flags: str, count: int) -> str:
    """XLA_FLAGS `flags` with this many host devices, whatever number they named before."""
    rest = re.sub(r"--xla_force_host_platform_device_count=\S+", "", flags)
    return " ".join([*rest.split(), f"--xla_force_host_platform_device_count={count}"])


if "jax" in sys.modules and os.environ.get("JAX_PLATFORMS") != "cpu":
    raise pytest.UsageError("a pytest plugin imported jax before tests/conftest.py could choose the CPU; turn it off")
os.environ["JAX_PLATFORMS"] = "cpu"  # also for the processes that tests start
os.environ["XLA_FLAGS"] = with_host_devices(os.environ.get("XLA_FLAGS", ""), HOST_DEVICES)

# The same examples in every run; a compile inside an example takes as long as it takes.
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the checkout: public instances and acceptance cases, not part of the repository."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the folder {folder}, which lies beside the checkout")
    return folder
