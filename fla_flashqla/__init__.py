# SPDX-License-Identifier: MIT
"""TileLang kernels for the chunked Gated Delta Rule, reached through flash-linear-attention.

Importing this registers with FLA, now or as soon as FLA's operator is imported. It loads neither
torch, FLA nor TileLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fla_flashqla import _autoload

if TYPE_CHECKING:
    from fla_flashqla.backend import register
    from fla_flashqla.call import Unsupported
    from fla_flashqla.low_level import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    from fla_flashqla.op import chunk_gated_delta_rule
    from fla_flashqla.report import dispatch_report, reset_report

__version__ = "0.1.0"
__all__ = [
    "Unsupported",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "dispatch_report",
    "register",
    "reset_report",
]

_HOMES = {
    "Unsupported": "call",
    "chunk_gated_delta_rule": "op",
    "chunk_gated_delta_rule_bwd": "low_level",
    "chunk_gated_delta_rule_fwd": "low_level",
    "dispatch_report": "report",
    "register": "backend",
    "reset_report": "report",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_autoload.autoload()
