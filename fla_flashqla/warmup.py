# SPDX-License-Identifier: MIT
"""Compile kernels ahead of their first call; needs nvcc, but no GPU."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from fla_flashqla import arch, chunk, env, kernels, segments
from fla_flashqla.plan import Plan


def plans(
    dtypes: Iterable[str],
    g_dtypes: Iterable[str],
    beta_dtypes: Iterable[str],
    gradients: bool = True,
    target: str = "sm_90a",
) -> list[Plan]:
    """One plan for each combination of dtypes, with or without a backward: nothing else selects what is compiled for a target."""
    combinations = itertools.product(dtypes, g_dtypes, beta_dtypes)
    name = targets()[target].in_form(env.form()).name
    return [Plan(name, *c, gradients=gradients) for c in combinations]


def targets() -> dict[str, arch.Arch]:
    """The architectures that calls are taken on, as nvcc calls them."""
    return {row.target: row for row in arch.ARCHS.values() if row.supported}


def visible() -> str:
    """The target of the first GPU that calls are taken on, Hopper's where there is none."""
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    found = (row.target for row in map(arch.row, devices) if row is not None)
    return next(found, "sm_90a")


def steps(plan: Plan) -> dict[str, Callable[[Plan], Any]]:
    """What compiles the kernels of each step that calls with these dtypes can need, by name."""
    found: dict[str, Callable[[Plan], Any]] = {"forward": chunk.build, "segments": segments.build}
    if plan.gradients:
        found["backward"] = chunk.build_backward
        found["backward_segments"] = segments.build_backward
    return found


def run(wanted: list[Plan], progress: Callable[[str], None]) -> dict[str, Any]:
    """Compile the kernels of `wanted` into TileLang's cache folder, which a later process reads instead of compiling.

    The kernels of a plan are compiled side by side.

    Args:
        wanted (list[Plan]):
            As `plans` returns them.
        progress (Callable):
            Called once for each of all `steps`, with what has been done.

    Returns:
        `cache` (the folder), `plans` (each with its `seconds`, or its `error`) and `ok`.
    """
    record: dict[str, Any] = {"cache": None, "plans": [], "ok": True}
    for plan in wanted:
        builds = steps(plan)
        row: dict[str, Any] = dict(
            zip(("arch", "dtype", "g_dtype", "beta_dtype"), plan.compiled, strict=True),
            steps=list(builds),
        )
        start = time.perf_counter()
        error = _compile(plan, builds, progress)
        if error is None:
            row["seconds"] = round(time.perf_counter() - start, 2)
        else:  # a compiler's message can be long: its cause stands in the last lines
            row["error"] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
            record["ok"] = False
        record["plans"].append(row)
    record["cache"] = kernels.cache_folder()
    return record


def _compile(
    plan: Plan, builds: dict[str, Callable[[Plan], Any]], progress: Callable[[str], None]
) -> BaseException | None:
    """The first error, in the order of `builds`."""
    try:  # by one thread: threads that import parts of TileLang block each other
        for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
            importlib.import_module(module.name)
    except Exception as error:
        return error
    with ThreadPoolExecutor(len(builds)) as pool:
        running = {pool.submit(build, plan): step for step, build in builds.items()}
        for done in as_completed(running):
            progress(f"{plan.dtype}, g {plan.g_dtype}, beta {plan.beta_dtype}: {running[done]}")
    return next((x.exception() for x in running if x.exception() is not None), None)
