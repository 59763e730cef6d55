# SPDX-License-Identifier: MIT
"""The cases for compute-sanitizer whose plans are forced, by models of the kernels: a case that is not cut would be worth nothing."""

from __future__ import annotations

import pytest
import sanitizer_cases

FORCED = [number for number, (_, fields) in enumerate(sanitizer_cases.CASES) if fields]
CUT = {"segments", "combine", "reverse_segments"}


@pytest.mark.parametrize("number", FORCED)
def test_flashqla_sanitizer_cases(number: int, launched: list[str]) -> None:
    case, fields = sanitizer_cases.CASES[number]
    errors = sanitizer_cases.check(case, fields, "cpu")
    assert all(x <= 1 for x in errors.values()), errors
    assert set(launched) & CUT == (CUT if "segment" in fields else set())
    halves = "forward_halves" in launched, "reverse_halves" in launched
    assert halves == (fields.get("segment_splits") == 2,) * 2
