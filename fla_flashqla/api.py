# SPDX-License-Identifier: MIT
"""The public operator: describe the call, plan it, run what was planned."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fla_flashqla import arch, autograd, chunk, env, reference, report, segments
from fla_flashqla.activations import Activations
from fla_flashqla.call import Unsupported, describe
from fla_flashqla.layout import Layout
from fla_flashqla.plan import Plan, Reference, Refusal, plan
from fla_flashqla.report import logger

Decision = Plan | Reference | Refusal
Result = tuple[torch.Tensor, torch.Tensor | None]
T = TypeVar("T")


class FirstLaunchError(Exception):
    """A plan failed before it ever succeeded; it is refused from now on. Has the error as cause."""


Place = tuple[int, int, int]  # splits, warps and device: each kernel of a step, loaded once
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
    """Why a step of a plan cannot run, else its kernels are built."""
    kernels = _kernels.get(plan.key(step))
    place = plan.blocks(step), plan.warps, device_index
    if (kernels is None or place not in kernels.proven) and capturing():
        return "kernels must have run before a CUDA graph is captured with them"
    refused = (kernels or _build(step, plan)).refused
    return (refused.get(None) or refused.get(place)) if refused else None


def _cut(plan: Plan, device_index: int) -> Plan:
    """The plan as the user has it, without segments where they are off or cannot run."""
    mode = env.segments()
    for step in ("segments", "backward_segments"):
        if step in plan.steps and (mode == "off" or _obstacle(step, plan, device_index)):
            plan = plan.without(step)
    return replace(plan, exact=True) if mode == "exact" else plan


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
        report.refused(decision.reason)
        raise Unsupported(decision.reason)
    result = reference.chunk_gated_delta_rule(*args, **kwargs)
    report.reference_ran()
    return result


def _place(step: str, plan: Plan, device: torch.device) -> Place:
    return plan.blocks(step), plan.warps, arch.device_facts(device).device_index


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


def _answer(plan: Plan, q: torch.Tensor, *args: Any) -> chunk.Forward:
    forward: chunk.Forward = _launch("forward", plan, q.device, chunk.forward, plan, q, *args)
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
    passed = (
        *(plan, q, k, v, g, beta, q.shape[-1] ** -0.5 if scale is None else float(scale)),
        initial_state,
        bool(output_final_state),  # FLA's layers pass None, too
        bool(use_qk_l2norm_in_kernel),
        bool(state_v_first),
        cu_seqlens,
    )
    gating = (
        keywords.get("A_log") if raw_g else None,
        keywords.get("dt_bias") if raw_g else None,
        sigmoid,
    )
    if plan.gradients:
        # FLA cannot take over in the middle of a training step, so what fails shall fail now.
        _rehearse(plan, q.device)
        o, final_state = autograd.GatedDeltaRule.apply(_answer, *passed, *gating)  # type: ignore[no-untyped-call]
        return o, final_state
    results = _answer(*passed, Activations(*gating))
    return results[0], results[1]


# As FLA's operator: a graph would be specialised on all that a plan depends on.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunk_gated_delta_rule(
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
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    *,
    head_first: bool = False,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    force_intra_cp: bool = False,
    **kwargs: Any,
) -> Result:
    """Run the chunked Gated Delta Rule: arguments and results of FLA 0.6.0's operator, without FLA.

    It takes the arguments of flash_qla 0.1.3's function, too. Positions are FLA's, which are the same up to
    `use_qk_l2norm_in_kernel`; what comes behind, above all `cu_seqlens`, is best given by name.

    Args:
        q (torch.Tensor):
            Queries, `[B, T, H, K]`; float16 or bfloat16 on a GPU, any float dtype on the CPU.
        k (torch.Tensor):
            Keys, `[B, T, H, K]`.
        v (torch.Tensor):
            Values, `[B, T, HV, V]`; HV is a multiple of H.
        g (torch.Tensor):
            Log-space decay (natural log), `[B, T, HV]`; with `use_gate_in_kernel` what it is made from.
        beta (torch.Tensor):
            Step sizes, `[B, T, HV]`; with `use_beta_sigmoid_in_kernel` what they are made from.
        scale (float, Optional):
            Factor of the output. Default: `K ** -0.5`.
        initial_state (torch.Tensor, Optional):
            `[N, HV, K, V]`. Default: `None` (zero).
        output_final_state (bool):
            Whether to return the final state. Default: `False`.
        use_qk_l2norm_in_kernel (bool):
            Whether q and k are normalised here. Default: `False`.
        use_beta_sigmoid_in_kernel (bool):
            Whether beta passes through a sigmoid here. Default: `False`.
        allow_neg_eigval (bool):
            Whether that sigmoid is doubled. Default: `False`.
        state_v_first (bool):
            Whether states are `[N, HV, V, K]`. Default: `False`.
        cu_seqlens (torch.Tensor, Optional):
            Boundaries of N packed sequences, `[N + 1]`, int32 or int64, with B = 1.
        cu_seqlens_cpu (torch.Tensor, Optional):
            The same on the CPU: the planner then knows the longest sequence.
        chunk_indices (torch.Tensor, Optional):
            Derived from `cu_seqlens`; not read.
        cp_context (Any, Optional):
            Context parallelism; refused.
        head_first (bool):
            flash_qla's and FLA's former argument: `True` is refused. Default: `False`.
        auto_cp, enable_fwd_cp_cache, force_intra_cp (bool):
            How flash_qla splits sequences; not read, the results are the same.
        **kwargs (Any):
            FLA's `use_gate_in_kernel`, with `A_log` and `dt_bias` (optional) of HV elements:
            `g <- -exp(A_log) softplus(g + dt_bias)`. FLA's `chunk_size`, 16, 32 or 64, which tunes its kernels and does not
            change the function. The deprecated `transpose_state_layout` for `state_v_first`.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the float32 final state or `None`.

    Raises:
        Unsupported: no kernel of ours answers this call; the text says why.
    """
    flag: object = use_beta_sigmoid_in_kernel  # flash_qla has cu_seqlens in this position
    if isinstance(flag, torch.Tensor):
        raise Unsupported("use_beta_sigmoid_in_kernel must be a flag: give cu_seqlens by name")
    if head_first:
        kwargs["head_first"] = True
    args = (
        *(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first),
        *(cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context),
    )
    return _without_fallback(run, decide(args, kwargs), args, kwargs)


def _without_fallback(answer: Callable[..., T], *args: Any) -> T:
    """`answer(*args)` where nobody can take over: what failed at its first launch is raised."""
    try:
        return answer(*args)
    except FirstLaunchError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


# What the low-level pair runs, each with a plan of `decide`.


def forward(plan: Plan, q: torch.Tensor, *args: Any) -> chunk.Forward:
    """`chunk.forward`, counted; a backward may follow."""
    plan = replace(_rehearsed(plan, q.device), gradients=True)
    return _without_fallback(_answer, plan, q, *args)


def states(plan: Plan, at: Layout, k: torch.Tensor, *args: Any) -> torch.Tensor:
    """The states of `chunk.states`."""
    _without_fallback(_rehearse, plan, k.device)
    return chunk.states(plan, at, k, *args)[0]


def backward(plan: Plan, q: torch.Tensor, *args: Any) -> chunk.Gradients:
    """`chunk.backward`, counted."""
    plan = _rehearsed(plan, q.device)
    launch: Callable[..., chunk.Gradients] = _launch
    gradients = _without_fallback(
        launch, "backward", plan, q.device, chunk.backward, plan, q, *args
    )
    report.ran(plan.path("backward"))
    return gradients
