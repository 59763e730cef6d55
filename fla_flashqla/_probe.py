# SPDX-License-Identifier: MIT
"""Calls FLA's operator the way a user's program does; `fla-flashqla check` runs this file as a script.

It runs in a process of its own because the proof needs one in which nothing but `import torch` has
loaded this package, and because a broken compiler library can abort the process that loads it.
Each line of its standard output is one JSON object; what libraries print goes to standard error.

    python _probe.py DEVICE FALLBACK     DEVICE: cpu or cuda:N; FALLBACK: the folder to import from by hand
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

FLOAT32_BOUND = 1e-5  # relative L2 of the CPU reference; `testing` has the bounds of kernels


def main(device: str, fallback: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: str, **data: Any) -> None:
        print(json.dumps({"event": event, **data}), file=out, flush=True)

    # Our warnings, as a user would see them; the logger needs no import of ours.
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: emit("warning", text=record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fla_flashqla").addHandler(handler)

    # A script's own folder comes first on the path: our modules must not answer to top-level names.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]

    try:
        import torch
    except BaseException as error:
        emit("torch", error=describe_error(error))
        return
    emit("torch", error=None)
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except BaseException as error:
        emit("fla", error=describe_error(error), loaded="fla_flashqla" in sys.modules)
        return
    emit("fla", error=None, loaded="fla_flashqla" in sys.modules)

    if not _reach(chunk_gated_delta_rule, torch.device(device), fallback, emit):
        return
    try:
        cases = _cases(device, chunk_gated_delta_rule)
    except BaseException as error:
        emit("done", error=describe_error(error))
        return
    for case in cases:
        emit("start", name=case.id)
        try:
            result = _compare(chunk_gated_delta_rule, torch.device(device), case)
        except BaseException as error:
            result = {"ok": False, "error": describe_error(error)}
        emit("case", name=case.id, **result)
    import fla_flashqla

    found = fla_flashqla.dispatch_report().get("self_check", {})  # another copy may have answered
    emit("done", error=None, self_checks=[*found.values()])


def describe_error(error: BaseException) -> str:
    """One line: the type and the first line of the message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _reach(operator: Callable[..., Any], device: Any, fallback: str, emit: Any) -> bool:
    """Whether the operator answers through us: first as loaded, then after an import by hand."""
    import torch

    shape = (1, 64, 1, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    g, beta = (torch.rand(shape[:3], device=device) for _ in range(2))
    for by in ("import torch", "import fla_flashqla"):
        if by == "import torch" and "fla_flashqla" not in sys.modules:
            continue
        try:
            if fallback not in sys.path:
                sys.path.append(fallback)
            import fla_flashqla
        except BaseException as error:
            emit("reach", loaded_by=by, answered="none", error=describe_error(error))
            return False
        before, error_text = fla_flashqla.dispatch_report(), None
        try:
            with torch.no_grad():
                operator(q, k, v, -g, beta, use_qk_l2norm_in_kernel=True)
        except BaseException as error:
            error_text = describe_error(error)
        after = fla_flashqla.dispatch_report()
        answered, detail = _answered(before, after)
        emit(
            "reach",
            loaded_by=by,
            answered=answered,
            detail=detail,
            error=error_text,
            mechanism=after.get("reach"),
            file=fla_flashqla.__file__,
        )
        if answered != "none":
            return answered != "refused" and error_text is None
    return False


def _answered(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, str | None]:
    """Which counter moved: ("kernels" | "reference" | "refused" | "none", its name)."""
    for key, answer in (("ran", "kernels"), ("refused", "refused")):
        for name, count in after[key].items():
            if count > before[key].get(name, 0):
                return answer, name
    return ("reference", None) if after["reference"] > before["reference"] else ("none", None)


def _cases(device: str, operator: Callable[..., Any]) -> list[Any]:
    """Small calls, as far as this operator knows their flags."""
    from fla_flashqla.testing import small_cases

    v_first = "state_v_first" in inspect.signature(operator).parameters  # since FLA 0.5.1
    dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16", "float16")
    lens = (1, 63, 0, 70) if device == "cpu" else (1, 63, 0, 65, 371)
    count = 4 if v_first else 2
    return [case for dtype in dtypes for case in small_cases(lens, dtype=dtype)[:count]]


def _compare(operator: Callable[..., Any], device: Any, case: Any) -> dict[str, Any]:
    """Errors of one call against the token recurrence in float64, and what answered it."""
    import torch

    import fla_flashqla
    from fla_flashqla import reference, testing

    # An older FLA may not have every option, which then must be at its default.
    known = inspect.signature(operator).parameters
    inputs = testing.make_inputs(case, device)
    inputs = {name: x for name, x in inputs.items() if name in known or x is not False}
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    do, dht = testing.make_output_gradients(inputs)
    before = fla_flashqla.dispatch_report()
    with torch.no_grad():
        o, state = operator(**inputs)
        answered, detail = _answered(before, fla_flashqla.dispatch_report())
        exact_o, exact_state = reference.recurrent_gated_delta_rule(**exact)
    assert exact_state is not None
    errors = {
        "o": testing.relative_error(o, exact_o),
        "final_state": testing.relative_error(state, exact_state),
    }
    # And gradients, by what answers a call that needs them.
    leaves = {n: inputs[n].requires_grad_() for n in testing.DIFFERENTIABLE if n in inputs}
    before = fla_flashqla.dispatch_report()
    results = operator(**{**inputs, "output_final_state": True})
    found = torch.autograd.grad(results, [*leaves.values()], [do, dht.to(results[1])])
    again, detail_again = _answered(before, fla_flashqla.dispatch_report())
    want = testing.oracle_gradients(inputs, do, dht)
    gradient_errors = {
        f"d{'h0' if name == 'initial_state' else name}": testing.relative_error(x, want[name])
        for name, x in zip(leaves, found, strict=True)
    }
    wide = case.dtype == "float32"
    bound = FLOAT32_BOUND if wide else testing.BOUNDS[case.dtype]
    gradient_bound = FLOAT32_BOUND if wide else testing.GRADIENT_BOUNDS[case.dtype]
    ours = "reference" if device.type == "cpu" else "kernels"
    if answered == ours:
        answered, detail = again, detail_again
    return {
        "ok": answered == ours
        and all(error <= bound for error in errors.values())
        and all(error <= gradient_bound for error in gradient_errors.values()),
        "answered": answered,
        "detail": detail,
        "relative_errors": errors,
        "bound": bound,
        "gradient_errors": gradient_errors,
        "gradient_bound": gradient_bound,
        "error": None,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
