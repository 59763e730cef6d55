# SPDX-License-Identifier: MIT
"""Calls under torch.func, forward-mode differentiation and tracing, whose tensors look plain; no GPU, the device facts are patched."""

import pytest
import torch
from model_helpers import SM90
from test_flashqla_plan import inputs, state
from torch.autograd import forward_ad

from fla_flashqla import arch
from fla_flashqla.call import describe
from fla_flashqla.plan import Plan, Reference, Refusal, plan


@pytest.fixture(autouse=True)
def on_sm90(monkeypatch):
    monkeypatch.setattr(arch, "device_facts", lambda device: SM90)


def dual(call):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(torch.zeros(1, 64, 2, 128), torch.ones(1, 64, 2, 128)))


def func_grad(call):
    seen = []
    torch.func.grad(lambda q: (seen.append(call(q)), q.sum())[1])(torch.zeros(1, 64, 2, 128))
    return seen[0]


def vmap(call):
    seen = []
    torch.vmap(lambda q: (seen.append(call(q)), q)[1])(torch.zeros(3, 1, 64, 2, 128))
    return seen[0]


def jit_trace(call):
    seen = []
    traced = lambda q: (seen.append(call(q)), q + 1)[1]  # noqa: E731
    torch.jit.trace(traced, torch.zeros(1, 64, 2, 128), check_trace=False)
    return seen[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", [dual, func_grad, vmap, jit_trace])
def test_flashqla_transforms_are_not_for_kernels(transform):
    """Their tensors look plain, and what a kernel does to them would be lost without a word."""

    @torch.no_grad()
    def answer(q):
        half = torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16)
        call = describe(**inputs(q=q.bfloat16(), k=half))
        return plan(call), plan(call._replace(device_type="cpu"))

    on_gpu, on_cpu = transform(answer)
    assert "torch.func" in on_gpu.reason and isinstance(on_gpu, Refusal)
    assert isinstance(on_cpu, Reference)  # plain PyTorch, which they see through
    assert isinstance(answer(torch.zeros(1, 64, 2, 128))[0], Plan)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_flashqla_transforms_leave_tensors_without_memory(name):
    """What outlives `torch.func.grad` works in PyTorch, but a kernel would find no address."""
    x = inputs()
    x["initial_state"] = state(1, x["v"].shape[2], 128, 128)
    assert isinstance(plan(describe(**x)), Plan)
    kept = []
    torch.func.grad(lambda leaf: (kept.append(leaf), leaf.sum())[1])(x[name])
    with pytest.raises(RuntimeError, match="storage"):
        kept[0].data_ptr()
    assert "torch.func" in plan(describe(**x | {name: kept[0]})).reason
