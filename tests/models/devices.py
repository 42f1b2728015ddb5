"""Devices that tests judge and choose between."""

from __future__ import annotations

from stopdown.devices.device_choice import Device

CPU = Device("cpu", 0, "a CPU", None, 2**34)
MPS = Device("mps", 0, "Apple M2", None, 2**34)
V100 = Device("cuda", 0, "Tesla V100", (7, 0), 2**34)
T4 = Device("cuda", 1, "Tesla T4", (7, 5), 2**34)
