# SPDX-License-Identifier: MIT
"""What ran in this process: cheap counters, and the way by which FLA reaches us."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("fla_flashqla")

MAX_REASONS = 256  # texts name shapes, so a long-lived process could make any number of them
OVERFLOW = "further reasons"

_ran: dict[str, int] = {}
_refused: dict[str, int] = {}
_reference = 0
_self_checks: dict[str, str] = {}
_reach: Callable[[], str] = lambda: "not reached: FLA's operator is not imported"  # noqa: E731
_lock = threading.Lock()


def ran(path: str) -> None:
    """Count a call that our GPU kernels answered."""
    with _lock:
        _ran[path] = _ran.get(path, 0) + 1


def reference_ran() -> None:
    """Count a call that the PyTorch reference answered."""
    global _reference
    with _lock:
        _reference += 1


def refused(reason: str) -> bool:
    """Count a call that was left to FLA, and log each reason once: True for a new reason."""
    with _lock:
        new = reason not in _refused
        if new and len(_refused) >= MAX_REASONS:
            reason, new = OVERFLOW, OVERFLOW not in _refused
        _refused[reason] = _refused.get(reason, 0) + 1
    if new:
        logger.info("refused: %s", reason)
    return new


def self_checked(kernels: str, outcome: str) -> None:
    """Note what the self-check of `kernels` found."""
    with _lock:
        _self_checks[kernels] = outcome


def reached_by(reach: Callable[[], str]) -> None:
    """Set what `dispatch_report` asks for the way by which FLA reaches us."""
    global _reach
    _reach = reach


def dispatch_report() -> dict[str, Any]:
    """Return what happened to the calls of this process.

    Returns:
        `ran`: calls answered by our GPU kernels, by path; `refused`: calls left to FLA, by reason;
        `reference`: calls answered by the PyTorch reference; `reach`: how FLA reaches us;
        `self_check`: by kernels, what the self-checks of this process found, which `reset_report` leaves.
        A forked child counts from zero.
    """
    reach = _reach()
    with _lock:
        return {
            "ran": dict(_ran),
            "refused": dict(_refused),
            "reference": _reference,
            "reach": reach,
            "self_check": dict(_self_checks),
        }


def reset_report() -> None:
    """Set all counters of `dispatch_report` to zero."""
    global _reference
    with _lock:
        _ran.clear()
        _refused.clear()
        _reference = 0


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's may have been held by a thread that is gone
    reset_report()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
