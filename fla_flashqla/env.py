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
    "For tests: mma makes all products by mma.sync, as on architectures of which we use nothing else; auto by what is fastest. Read once per GPU.",
)
VARIABLES = (SWITCH, STRICT, SEGMENTS, FORM)


def enabled() -> bool:
    return os.environ.get(SWITCH.name, SWITCH.default) != "0"


def strict() -> bool:
    return os.environ.get(STRICT.name, STRICT.default) not in ("", "0")


def segments() -> str:
    """ "off", "exact" or "auto", which any other value stands for."""
    value = os.environ.get(SEGMENTS.name, SEGMENTS.default)
    return value if value in ("off", "exact") else "auto"


def form() -> str:
    """ "mma", or "" for that of the architecture."""
    return "mma" if os.environ.get(FORM.name, FORM.default) == "mma" else ""
