# SPDX-License-Identifier: MIT
"""Every environment variable that this package reads, each time it is asked."""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    default: str
    meaning: str


SWITCH = Variable(
    "FLA_FLASH_QLA", "1", "FLA's own switch of this backend: 0 leaves every call to FLA."
)
STRICT = Variable(
    "FLA_FLASH_QLA_STRICT",
    "0",
    "1 turns every refusal and failure into an error instead of FLA's own path.",
)
SEGMENTS = Variable(
    "FLA_FLASH_QLA_CP",
    "auto",
    "Whether long sequences are cut, in the forward and the backward, and their segments run side by side: off, exact, or auto, which drops states that have decayed.",
)
FORM = Variable(
    "FLA_FLASH_QLA_FORM",
    "auto",
    "For tests: mma makes all products by mma.sync, as on architectures of which we use nothing else; auto takes the architecture's own form. Read once per GPU.",
)
SELF_CHECK = Variable(
    "FLA_FLASH_QLA_SELFCHECK",
    "auto",
    "Whether kernels must agree with float64 on a small problem, in a process of its own, before they answer: auto, on GPUs on which we never ran them; force, on all; off, on none.",
)
PREFER = Variable(
    "FLA_FLASH_QLA_PREFER",
    "auto",
    "Who answers the calls that the package flash_qla, if it is installed, takes from FLA as well: ours, flash_qla, or auto, which is flash_qla on GPUs on which ours was not measured.",
)
VARIABLES = (SWITCH, STRICT, SEGMENTS, FORM, SELF_CHECK, PREFER)


def enabled() -> bool:
    return os.environ.get(SWITCH.name, SWITCH.default) != "0"


def strict() -> bool:
    return os.environ.get(STRICT.name, STRICT.default) not in ("", "0")


def segments() -> str:
    """ "off", "exact" or "auto", which any other value stands for."""
    return _choice(SEGMENTS, "off", "exact")


def form() -> str:
    """ "mma", or "" for that of the architecture."""
    return "mma" if _choice(FORM, "mma") == "mma" else ""


def self_check() -> str:
    """ "off", "force" or "auto", which any other value stands for."""
    return _choice(SELF_CHECK, "off", "force")


def prefer() -> str:
    """ "ours", "flash_qla" or "auto", which any other value stands for."""
    return _choice(PREFER, "ours", "flash_qla")


def _choice(variable: Variable, *values: str) -> str:
    value = os.environ.get(variable.name, variable.default)
    return value if value in values else variable.default
