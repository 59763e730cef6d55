# SPDX-License-Identifier: MIT
"""Whether kernels agree with float64 on small calls, in every form that `plan.py` may select."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fla_flashqla import arch, autograd, chunk, testing, warmup
from fla_flashqla.layout import Setup
from fla_flashqla.plan import Plan

INPUTS = (*testing.DIFFERENTIABLE, *testing.PARAMETERS)
FEW = 4  # multiprocessors, so that a block of `gradients.py` takes several chunks of these small calls
# Every form of the kernels of a step, as `plan.py` selects them.
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "forward": ({"warps": 1}, {"splits": 2, "longest_first": True}),
    "segments": ({"segment": 128}, {"segment": 64, "segment_splits": 2, "exact": True}),
    "backward": ({}, {"splits": 2}, {"splits": 2, "states_whole": True}),
    "backward_segments": (
        {"backward_segment": 128},
        {"backward_segment": 64, "backward_splits": 2, "exact": True},
    ),
}


def build(step: str, plan: Plan) -> None:
    """Compile, or read, what `compare` launches; raises what a compiler does."""
    gradients = step.startswith("backward")
    wanted = {"forward", "backward" if gradients else "forward", step}
    for name, make in warmup.steps(replace(plan, gradients=gradients)).items():
        if name in wanted:
            make(plan)


@contextlib.contextmanager
def _few_multiprocessors(device: torch.device) -> Iterator[None]:
    arch._FACTS[device] = arch.device_facts(device)._replace(sms=FEW)
    try:
        yield
    finally:
        del arch._FACTS[device]  # looked up again


def compare(step: str, plan: Plan, device: torch.device) -> tuple[bool, str]:
    """Run every form of the kernels of a step on small calls, with all flags between them.

    Args:
        step (str):
            One of `plan.STEPS`.
        plan (Plan):
            Of which `compiled` counts.
        device (torch.device):
            Where the kernels run; float64 is computed on the CPU.

    Returns:
        Whether all errors are within their bounds, and a sentence on how large they are.
    """
    plan = replace(plan, gradients=step.startswith("backward"))
    dtypes: dict[str, Any] = {
        "dtype": plan.dtype,
        "g_dtype": plan.g_dtype,
        "beta_dtype": plan.beta_dtype,
    }
    worst = 0.0
    for case in testing.small_cases(**dtypes):
        inputs = testing.make_inputs(case)
        given = testing.make_output_gradients(inputs)
        want: dict[str, Any] = testing.oracle_gradients(inputs, *given) if plan.gradients else {}
        want["o"], want["final_state"] = testing.oracle(inputs)
        for form in FORMS[step]:
            few = form.get("states_whole", False)  # in one form of all is enough
            with _few_multiprocessors(device) if few else contextlib.nullcontext():
                answers = _answers(replace(plan, **form), inputs, given, device)
            for name, x in answers.items():
                error, bound = _error(x, want[name]), testing.BOUNDS[plan.dtype]
                if name in INPUTS:
                    bound = testing.gradient_bound(name, x, plan.dtype)
                if not error <= bound:
                    text = f"{name} of {case.id} {form} is off by {error:.1e}, at most {bound:.1e}"
                    return False, text
                worst = max(worst, error / bound)
    return True, f"errors up to {worst:.2f} of their bounds"


def _error(x: torch.Tensor, want: torch.Tensor) -> float:
    """The relative L2 error, in which few wrong elements hide, or half the largest error beside the largest value."""
    peak = float((x.double() - want).abs().max() / want.abs().max())
    return max(testing.relative_error(x, want), peak / 2)


def _answers(
    plan: Plan, inputs: dict[str, Any], given: tuple[torch.Tensor, ...], device: torch.device
) -> dict[str, torch.Tensor]:
    """Results and gradients of a call, by name, on the CPU."""
    x: dict[str, Any] = {
        n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in inputs.items()
    }
    leaves = {n: x[n].requires_grad_(plan.gradients) for n in INPUTS if n in x}
    sigmoid = 2.0 if x.get("allow_neg_eigval") else 1.0
    cu_seqlens = x.get("cu_seqlens")
    flags = x["use_qk_l2norm_in_kernel"], x["state_v_first"], True
    call = autograd.Call(
        chunk.forward,
        Setup.of(plan, x["q"], x["v"], cu_seqlens, *flags),
        scale=x["q"].shape[-1] ** -0.5,
        cu_seqlens=cu_seqlens,
        sigmoid=sigmoid if x.get("use_beta_sigmoid_in_kernel") else 0.0,
    )
    results = autograd.GatedDeltaRule.apply(call, *map(x.get, INPUTS))  # type: ignore[no-untyped-call]
    found = dict(zip(("o", "final_state"), results, strict=True))
    if plan.gradients:
        gradients = torch.autograd.grad(results, [*leaves.values()], [t.to(device) for t in given])
        found |= zip(leaves, gradients, strict=True)
    return {name: t.detach().cpu() for name, t in found.items()}
