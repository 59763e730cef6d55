# SPDX-License-Identifier: MIT
"""Run by test_flashqla_reach.py with FLA_DISABLE_BACKEND_DISPATCH=1."""

from __future__ import annotations

from unittest.mock import MagicMock

import torch
from child_processes import run_checks
from fla.ops.gated_delta_rule import chunk, chunk_gated_delta_rule

import fla_flashqla


def check_bypassed():
    x = torch.zeros(1, 4, 1, 16)
    chunk.ChunkGatedDeltaRuleFunction = MagicMock(apply=lambda *args: ("FLA", None))
    assert chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0]) == ("FLA", None)
    report = fla_flashqla.dispatch_report()
    assert report["reference"] == 0 and "FLA_DISABLE_BACKEND_DISPATCH=1" in report["reach"]


run_checks(globals())
