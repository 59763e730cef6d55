# SPDX-License-Identifier: MIT
"""Architectures as data, and the facts of a device, looked up once per device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fla_flashqla import env

WGMMA, MMA = "wgmma", "mma"  # forms of products, see kernels/products.py


@dataclass(frozen=True, slots=True)
class Arch:
    """What one compute capability offers a kernel, and whether we launch there."""

    name: str
    sm: tuple[int, int]
    smem_bytes: int  # opt-in shared memory of one block
    form: str  # of products
    supported: bool
    status: str
    proven: bool = False  # whether our kernels ran there: else `selfcheck.py` has the say
    measured: bool = False  # whether they were timed there beside flash_qla

    @property
    def target(self) -> str:
        """What nvcc calls it, with what only this one has."""
        return f"sm_{self.sm[0]}{self.sm[1]}a"

    def in_form(self, form: str) -> Arch:
        """The same with products in `form`, "" being its own: in another ours ran in tests alone."""
        if form in ("", self.form):
            return self
        status = "run on hardware in tests alone"
        return replace(self, name=f"{self.name}-{form}", form=form, status=status, proven=False)


SMALL = "a block has too little shared memory"
UNTRIED = "compiled and run in its portable form on Hopper; never run on Blackwell"
ARCHS = {
    row.sm: row
    for row in (
        Arch("sm90", (9, 0), 232_448, WGMMA, True, "run on hardware", proven=True, measured=True),
        Arch("sm100", (10, 0), 232_448, MMA, True, UNTRIED),
        Arch("sm103", (10, 3), 232_448, MMA, True, UNTRIED),
        # all but two of our kernels take 126 to 222 KB a block
        Arch("sm120", (12, 0), 101_376, MMA, False, SMALL),
        Arch("sm121", (12, 1), 101_376, MMA, False, SMALL),
    )
}


def named(name: str) -> Arch:
    """The row that plans name, in the form that the name says."""
    name, _, form = name.partition("-")
    return next(row for row in ARCHS.values() if row.name == name).in_form(form)


class DeviceFacts(NamedTuple):
    """The facts of one device that decide a plan; `sm` is None where there is none."""

    device_type: str
    device_index: int
    sm: tuple[int, int] | None
    is_hip: bool
    sms: int = 0  # multiprocessors
    form: str = ""  # of products, where the user wants another than the architecture's own


_FACTS: dict[torch.device, DeviceFacts] = {}


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of `device`, which for CUDA is a tensor's own and so already initialised."""
    try:
        return _FACTS[device]
    except KeyError:
        pass
    sm, is_hip, sms, form = None, False, 0, ""
    if device.type == "cuda":
        is_hip = torch.version.hip is not None
        properties = torch.cuda.get_device_properties(device)
        sm, sms = (properties.major, properties.minor), properties.multi_processor_count
        form = env.form()
    index = -1 if device.index is None else device.index
    return _FACTS.setdefault(device, DeviceFacts(device.type, index, sm, is_hip, sms, form))


def row(device: torch.device) -> Arch | None:
    """What the table has on a device that our kernels support."""
    sm = device_facts(device).sm
    found = None if sm is None else ARCHS.get(sm)
    return found if found is not None and found.supported else None


def proven(name: str) -> bool:
    """Whether our kernels ran on a GPU of the row that plans name, in the form that the name says; no row, nothing to check."""
    name, _, form = name.partition("-")
    return all(row.in_form(form).proven for row in ARCHS.values() if row.name == name)


class Identity(NamedTuple):
    """Which GPU it is, however a process counts them."""

    name: str
    uuid: str


def identity(index: int) -> Identity:
    """Of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return Identity(properties.name, str(properties.uuid))
