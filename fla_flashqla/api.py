# SPDX-License-Identifier: MIT
"""From a call to its answer: describe it, plan it, run what was planned."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from fla_flashqla import arch, autograd, chunk, env, reference, report, segments, selfcheck
from fla_flashqla.activations import NONE, Activations
from fla_flashqla.call import Unsupported, describe
from fla_flashqla.layout import Packed, Setup
from fla_flashqla.plan import Plan, Reference, Refusal, changed, plan
from fla_flashqla.report import logger

Decision = Plan | Reference | Refusal
Result = tuple[torch.Tensor, torch.Tensor | None]
T = TypeVar("T")


class FirstLaunchError(Exception):
    """A plan failed before it ever succeeded; it is refused from now on. Has the error as cause."""


Place = tuple[int, ...]  # variant of a step and device: each kernel is loaded once
Key = tuple[str, ...]  # a step of a plan, and what is compiled together for it


class _Kernels:
    """What this process knows about kernels that are compiled together."""

    __slots__ = ("otherwise", "path", "proven", "refused")

    def __init__(self, path: str, otherwise: str) -> None:
        self.path = path
        self.otherwise = otherwise
        self.proven: set[Place] = set()  # has run: a later error is not hidden, and all is loaded
        self.refused: dict[Place | None, str] = {}  # has failed, why; None: nothing was built

    def fail(self, place: Place | None, what: str, error: Exception) -> None:
        cause = self.refused[place] = f"{self.path} {what}: {_summary(error)}"
        logger.warning("%s; %s from now on", cause, self.otherwise)
        logger.debug("%s", cause, exc_info=error)


def _summary(error: Exception) -> str:
    """The one line that tells the cause: a compiler's error comes with the source in front."""
    lines = [line.strip() for line in str(error).rpartition("Compilation error:\n")[2].splitlines()]
    lines = [line for line in lines if line] or [""]
    telling = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return f"{type(error).__name__}: {(telling or lines)[0][:300]}"


_kernels: dict[Key, _Kernels] = {}
_OTHERWISE = dict.fromkeys(("forward", "backward"), "such calls are left to FLA")
_OTHERWISE["segments"] = "sequences stay whole"
_OTHERWISE["backward_segments"] = "sequences stay whole in the backward"
_build_lock = threading.Lock()


def _renew_lock() -> None:
    global _build_lock
    _build_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _build(step: str, plan: Plan) -> _Kernels:
    with _build_lock:
        kernels = _kernels.get(plan.key(step))
        if kernels is None:
            kernels = _Kernels(plan.path(step), _OTHERWISE[step])
            logger.info("compiling %s, or reading it from TileLang's cache", kernels.path)
            try:
                module = segments if step.endswith("segments") else chunk
                (module.build_backward if step.startswith("backward") else module.build)(plan)
            except Exception as error:
                kernels.fail(None, "cannot be built", error)
            _kernels[plan.key(step)] = kernels
    return kernels


def capturing() -> bool:
    """Whether a CUDA graph is being captured, which compiling and loading kernels could break."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def _obstacle(step: str, plan: Plan, device_index: int) -> str | None:
    """Why a step of a plan cannot run, else its kernels are built, and checked where that is due."""
    kernels = _kernels.get(plan.key(step))
    place = *plan.variant(step), device_index
    if kernels is not None and place in kernels.proven:
        return None
    if capturing():
        return "kernels must have run before a CUDA graph is captured with them"
    refused = (kernels or _build(step, plan)).refused
    reason = refused.get(None) or refused.get(place)
    return reason or selfcheck.refusal(step, plan, device_index)


def _cut(plan: Plan, device_index: int) -> Plan:
    """The plan as the user has it, without segments where they are off or cannot run."""
    mode = env.segments()
    for step in ("segments", "backward_segments"):
        if step in plan.steps and (mode == "off" or _obstacle(step, plan, device_index)):
            plan = plan.without(step)
    return changed(plan, exact=True) if mode == "exact" else plan


def decide(args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool = False) -> Decision:
    """Say what answers a call, which `gradients` follow in any case; a plan is returned with its kernels built."""
    call = describe(*args, **kwargs)
    decision = plan(call._replace(needs_grad=True) if gradients else call)
    if isinstance(decision, Plan):
        if decision.segment or decision.backward_segment:
            decision = _cut(decision, call.device_index)
        for step in decision.steps:
            reason = _obstacle(step, decision, call.device_index)
            if reason is not None:
                return Refusal(reason)
    return decision


def run(decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Answer a call as `decide` said, and count it."""
    if isinstance(decision, Plan):
        return _forward(decision, *args, **kwargs)
    if isinstance(decision, Refusal):
        refuse(decision.reason)
    result = reference.chunk_gated_delta_rule(*args, **kwargs)
    report.reference_ran()
    return result


def refuse(reason: str) -> NoReturn:
    """Raise `Unsupported`, and count it."""
    report.refused(reason)
    raise Unsupported(reason)


def _place(step: str, plan: Plan, device: torch.device) -> Place:
    return *plan.variant(step), arch.device_facts(device).device_index


def _launch(
    step: str, plan: Plan, device: torch.device, launch: Callable[..., Any], *args: Any
) -> Any:
    """Call `launch`; the first failure of kernels that have not run yet is remembered."""
    kernels = _kernels[plan.key(step)]
    place = _place(step, plan, device)
    try:
        result = launch(*args)
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernels
    except Exception as error:
        if place in kernels.proven:
            raise
        kernels.fail(place, "failed at its first launch", error)
        raise FirstLaunchError from error
    kernels.proven.add(place)
    return result


def _rehearsed(plan: Plan, device: torch.device) -> Plan:
    """The plan without segments whose kernels fail, which are launched here if they have not run yet."""
    if not (plan.segment or plan.backward_segment):
        return plan
    rehearsals = {"segments": segments.rehearse, "backward_segments": segments.rehearse_backward}
    for step, rehearse in rehearsals.items():
        if step in plan.steps and _place(step, plan, device) not in _kernels[plan.key(step)].proven:
            try:
                _launch(step, plan, device, rehearse, plan, device)
            except FirstLaunchError:
                plan = plan.without(step)
    return plan


def _answer(setup: Setup, q: torch.Tensor, *args: Any) -> chunk.Forward:
    plan = setup.plan
    forward: chunk.Forward = _launch("forward", plan, q.device, chunk.forward, setup, q, *args)
    report.ran(plan.path("forward"))
    return forward


def _rehearse(plan: Plan, device: torch.device) -> None:
    if _place("backward", plan, device) not in _kernels[plan.key("backward")].proven:
        _launch("backward", plan, device, chunk.rehearse_backward, plan, device)


def _forward(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *_: Any,
    **keywords: Any,
) -> Result:
    plan = _rehearsed(plan, q.device)
    # What is not passed on restates what is, or decides nothing here.
    if "transpose_state_layout" in keywords:
        state_v_first = reference.renamed(keywords["transpose_state_layout"])
    raw_g = keywords.get("use_gate_in_kernel")
    sigmoid = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # FLA's layers pass None for flags, too
    flags = bool(use_qk_l2norm_in_kernel), bool(state_v_first), bool(output_final_state)
    setup = Setup.of(plan, q, v, cu_seqlens, *flags)
    A_log = keywords.get("A_log") if raw_g else None
    dt_bias = keywords.get("dt_bias") if raw_g else None
    if plan.gradients:
        # FLA cannot take over in the middle of a training step, so what fails shall fail now.
        _rehearse(plan, q.device)
        call = autograd.Call(_answer, setup, scale, cu_seqlens, sigmoid)
        o, final_state = autograd.GatedDeltaRule.apply(  # type: ignore[no-untyped-call]
            call, q, k, v, g, beta, initial_state, A_log, dt_bias
        )
        return o, final_state
    results = _answer(
        *(setup, q, k, v, g, beta, scale, initial_state, cu_seqlens),
        Activations(A_log, dt_bias, sigmoid) if raw_g or sigmoid else NONE,
    )
    return results[0], results[1]


def _without_fallback(answer: Callable[..., T], *args: Any) -> T:
    """`answer(*args)` where nobody can take over: what failed at its first launch is raised."""
    try:
        return answer(*args)
    except FirstLaunchError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


def answer(decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """`run` for a call that only this package can answer."""
    return _without_fallback(run, decision, args, kwargs)


# What the low-level pair and graphs run, each with a plan of `decide`.


def forward(
    plan: Plan,
    flags: tuple[bool, bool, bool],
    cu_seqlens: torch.Tensor | None,
    inputs: tuple[Any, ...],
    *args: Any,
) -> chunk.Forward:
    """`chunk.forward` of `inputs`, its q to initial_state, with the `flags` of `Setup.of`, counted.

    A backward may follow, and does with a plan for gradients.
    """
    q, _, v, *_ = inputs
    plan = _rehearsed(plan, q.device)
    if plan.gradients:
        _without_fallback(_rehearse, plan, q.device)
    setup = Setup.of(changed(plan, gradients=True), q, v, cu_seqlens, *flags)
    return _without_fallback(_answer, setup, *inputs, cu_seqlens, *args)


def states(plan: Plan, *args: Any) -> torch.Tensor:
    """The states of `chunk.states`."""
    return chunk.states(plan, *args)[0]


def backward(
    plan: Plan,
    flags: tuple[bool, bool],
    cu_seqlens: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
) -> chunk.Gradients:
    """`chunk.backward` with the `flags` of `Setup.of`, counted."""
    plan = _rehearsed(plan, q.device)
    setup, packed = Setup.of(plan, q, v, cu_seqlens, *flags), Packed.of(q, k, v, cu_seqlens)
    launch: Callable[..., chunk.Gradients] = _launch
    gradients = _without_fallback(
        launch, "backward", plan, q.device, chunk.backward, setup, packed, *args
    )
    report.ran(plan.path("backward"))
    return gradients
