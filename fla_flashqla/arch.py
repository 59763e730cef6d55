# SPDX-License-Identifier: MIT
"""Architectures as data, and the facts of a device, looked up once per device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Arch:
    """What one compute capability offers a kernel, and whether we launch there."""

    name: str
    sm: tuple[int, int]
    smem_bytes: int  # opt-in shared memory of one block
    supported: bool
    status: str


ARCHS = {
    row.sm: row
    for row in (
        Arch("sm90", (9, 0), 232_448, True, "run on hardware"),
        Arch("sm100", (10, 0), 232_448, False, "not supported yet"),
        Arch("sm103", (10, 3), 232_448, False, "not supported yet"),
        Arch("sm120", (12, 0), 101_376, False, "not supported"),
    )
}


class DeviceFacts(NamedTuple):
    """The facts of one device that decide a plan; `sm` is None where there is none."""

    device_type: str
    device_index: int
    sm: tuple[int, int] | None
    is_hip: bool
    sms: int = 0  # multiprocessors


_FACTS: dict[torch.device, DeviceFacts] = {}


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of `device`, which for CUDA is a tensor's own and so already initialised."""
    try:
        return _FACTS[device]
    except KeyError:
        pass
    sm, is_hip, sms = None, False, 0
    if device.type == "cuda":
        is_hip = torch.version.hip is not None
        properties = torch.cuda.get_device_properties(device)
        sm, sms = (properties.major, properties.minor), properties.multi_processor_count
    index = -1 if device.index is None else device.index
    return _FACTS.setdefault(device, DeviceFacts(device.type, index, sm, is_hip, sms))
