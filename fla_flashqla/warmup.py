# SPDX-License-Identifier: MIT
"""Compile kernels ahead of their first call; needs nvcc, but no GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from fla_flashqla import chunk, segments
from fla_flashqla.plan import Plan


def plans(
    dtypes: Iterable[str],
    g_dtypes: Iterable[str],
    beta_dtypes: Iterable[str],
    gradients: bool = True,
) -> list[Plan]:
    """One plan for each combination of dtypes, with or without a backward: nothing else selects what is compiled."""
    combinations = itertools.product(dtypes, g_dtypes, beta_dtypes)
    return [Plan("sm90", *c, gradients=gradients) for c in combinations]


def run(wanted: list[Plan], progress: Callable[[str], None]) -> dict[str, Any]:
    """Compile the kernels of `wanted` into TileLang's cache folder, which a later process reads instead of compiling.

    Returns:
        `cache` (the folder), `plans` (each with its `seconds`, or its `error`) and `ok`.
    """
    record: dict[str, Any] = {"cache": None, "plans": [], "ok": True}
    for number, plan in enumerate(wanted, 1):
        row: dict[str, Any] = dict(
            zip(("arch", "dtype", "g_dtype", "beta_dtype"), plan.compiled, strict=True),
            steps=list(plan.steps),
        )
        progress(
            f"{number} of {len(wanted)}: {plan.dtype}, g {plan.g_dtype}, beta {plan.beta_dtype}"
        )
        start = time.perf_counter()
        try:
            chunk.build(plan)
            segments.build(plan)
            if plan.gradients:
                chunk.build_backward(plan)
                segments.build_backward(plan)
            row["seconds"] = round(time.perf_counter() - start, 2)
        except (
            Exception
        ) as error:  # a compiler's message can be long: its cause stands in the last lines
            row["error"] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
            record["ok"] = False
        record["plans"].append(row)
    from fla_flashqla.kernels import cache_folder

    record["cache"] = cache_folder()
    return record
