"""Detection of this process's own devices."""

import jax

from meshplan.machine import Machine, device_order


def test_eight_host_devices_are_the_cpu_preset():
    machine = Machine.detect()
    assert machine == Machine.preset("cpu:8")
    assert machine.devices == len(jax.devices()) == 8


def test_some_of_the_devices_are_a_smaller_machine():
    assert Machine.detect(jax.devices()[:2]).name == "cpu:2"


def test_host_devices_keep_their_order():
    assert device_order(jax.devices()[::-1]) == jax.devices()
