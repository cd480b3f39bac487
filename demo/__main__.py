"""`python -m demo`: eight host devices, chosen before anything imports jax."""

from __future__ import annotations

import os
import re
import sys

HOST_DEVICES = 8


def use_host_devices(count: int) -> None:
    """Make jax, which reads this once when it is imported, see `count` devices on the CPU and nothing else."""
    rest = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join([*rest.split(), f"--xla_force_host_platform_device_count={count}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # plugins for devices that are not there have much to say


def main() -> int:
    use_host_devices(HOST_DEVICES)
    from demo._run import run

    return run(f"cpu:{HOST_DEVICES}")


if __name__ == "__main__":
    sys.exit(main())
