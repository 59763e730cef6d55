# SPDX-License-Identifier: MIT
"""Small calls of every kernel for compute-sanitizer: `compute-sanitizer --tool memcheck python tests/sanitizer_cases.py`.

Numbers behind it choose cases. Whatever is not under test runs on the CPU, which no sanitizer slows down.
"""

import contextlib
import sys
from unittest import mock

import torch
from gpu_helpers import planner

from fla_flashqla import api, arch, chunk_gated_delta_rule, dispatch_report
from fla_flashqla.testing import (
    BOUNDS,
    DIFFERENTIABLE,
    GRADIENT_BOUNDS,
    GRADIENT_FACTORS,
    PARAMETERS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle,
    oracle_gradients,
    relative_error,
)


def cut(tokens, shares):
    """Fields of plans that cut sequences into segments of so many tokens in both passes, whose heads so many blocks share."""
    forward = {"segment": tokens, "segment_splits": shares}
    return {**forward, "backward_segment": tokens, "backward_splits": shares}


# Tails, an empty sequence, rows behind the last boundary, negative betas, and enough chunks to use each of three stages more than
# twice; few chains (half a head a block) and many; then blocks of `gradients.py` take several items, tails among them, and
# sequences start in the order of their lengths; then gates and betas that the kernels make; then three that are cut into segments in
# both passes: nothing decays and a segment uses each stage more than twice, states decay until they are dropped, and packed
# sequences keep decayed states; at last several items a block again, on so few SMs that racecheck has room for all it finds.
CASES = (
    (Case(1, 2, B=1, T=580), {}),
    (Case(1, 2, lens=(1, 64, 0, 70, 580), tail=3, l2norm=True, dtype="float16"), {}),
    (Case(1, 2, lens=(1, 64, 0, 580, *[5] * 40), tail=3, l2norm=True), {}),
    (Case(2, 10, B=7, T=130, state_v_first=True, dtype="float16"), {}),
    (Case(16, 16, lens=(70, 0, 130, *[70] * 7)), {}),
    (
        Case(1, 2, lens=(1, 64, 0, 450), tail=70, raw_g="bias", raw_beta=2, beta_dtype="bfloat16"),
        {},
    ),
    (Case(2, 10, B=7, T=130, l2norm=True, raw_g="no_bias", raw_beta=1), {}),
    (Case(1, 2, T=900, state_v_first=True, gates="zero"), cut(448, 2)),
    (Case(1, 2, T=700, gates="strong", dtype="float16"), cut(192, 1)),
    (Case(1, 2, lens=(1, 0, 450, 250), tail=70, gates="mild", l2norm=True), cut(128, 1)),
    (Case(2, 2, lens=(70, 0, 130, *[70] * 7)), {"sms": 7}),
)


@contextlib.contextmanager
def planned(sms=None, **fields):
    """Plans have these fields; `sms` is how many SMs the device seems to have."""
    facts = arch.device_facts
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(api, "plan", planner(**fields)))
        if sms:
            fewer = mock.patch.object(arch, "device_facts", lambda x: facts(x)._replace(sms=sms))
            stack.enter_context(fewer)
        yield


def check(case, fields, device="cuda"):
    """Relative errors of o and of all gradients as parts of their bounds."""
    inputs = make_inputs(case)
    inputs["beta"][:, 5::7] *= -1
    given = make_output_gradients(inputs)
    want = {"o": oracle(inputs)[0], **oracle_gradients(inputs, *given)}
    x = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
    with planned(**fields):
        with torch.no_grad():
            o, _ = chunk_gated_delta_rule(**x)
        names = [n for n in (*DIFFERENTIABLE, *PARAMETERS) if n in x]
        leaves = [x[n].requires_grad_() for n in names]
        results = chunk_gated_delta_rule(**x)
        found = torch.autograd.grad(results, leaves, [t.to(device) for t in given])
        made = api.decide((), x)
    for name, value in fields.items():  # kernels that fail leave sequences whole
        assert name == "sms" or getattr(made, name) == value, made
    rows = slice(None if case.lens is None else sum(case.lens))
    errors = {"o": relative_error(o[:, rows].cpu(), want["o"][:, rows]) / BOUNDS[case.dtype]}
    for name, dx in zip(names, found, strict=True):
        bound = GRADIENT_BOUNDS[case.dtype] * GRADIENT_FACTORS.get(name, 1)
        errors[name] = relative_error(dx.cpu(), want[name]) / bound
    return errors


if __name__ == "__main__":
    wrong = []
    for number in map(int, sys.argv[1:] or range(len(CASES))):
        errors = check(*CASES[number])
        print(number, CASES[number][0].id, {n: round(x, 2) for n, x in errors.items()}, flush=True)
        wrong += [number] * (not all(x <= 1 for x in errors.values()))
    print(dispatch_report())
    sys.exit(f"errors above their bounds in cases {wrong}" if wrong else 0)
