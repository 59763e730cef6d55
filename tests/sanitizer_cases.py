# SPDX-License-Identifier: MIT
"""Small calls of every kernel for compute-sanitizer: `compute-sanitizer --tool memcheck python tests/sanitizer_cases.py`.

Numbers behind it choose cases, as racecheck takes minutes for each.
"""

import sys

import torch

from fla_flashqla import chunk_gated_delta_rule, dispatch_report
from fla_flashqla.testing import (
    DIFFERENTIABLE,
    PARAMETERS,
    Case,
    make_inputs,
    make_output_gradients,
    oracle,
    oracle_gradients,
    relative_error,
)

# Tails, an empty sequence, rows behind the last boundary, negative betas, and enough chunks to use each of three stages more than
# twice; few chains (half a head a block) and many; then blocks of `gradients.py` take several items, tails among them, and
# sequences start in the order of their lengths; then gates and betas that the kernels make; at last three that the planner cuts into
# segments in both passes, without and with decay, the last with an empty sequence.
CASES = (
    Case(1, 2, B=1, T=580),
    Case(1, 2, lens=(1, 64, 0, 70, 580), tail=3, l2norm=True, dtype="float16"),
    Case(1, 2, lens=(1, 64, 0, 580, *[5] * 40), tail=3, l2norm=True),
    Case(2, 10, B=7, T=130, state_v_first=True, dtype="float16"),
    Case(16, 16, lens=(70, 0, 130, *[70] * 7)),
    Case(1, 2, lens=(1, 64, 0, 450), tail=70, raw_g="bias", raw_beta=2, beta_dtype="bfloat16"),
    Case(2, 10, B=7, T=130, l2norm=True, raw_g="no_bias", raw_beta=1),
    Case(1, 2, T=8200, state_v_first=True, gates="zero"),
    Case(1, 2, T=8200, gates="strong", dtype="float16"),
    Case(1, 2, lens=(0, 8400), tail=70, gates="mild", l2norm=True),
)

if __name__ == "__main__":
    for number in map(int, sys.argv[1:] or range(len(CASES))):
        case = CASES[number]
        inputs = make_inputs(case, "cuda")
        inputs["beta"][:, 5::7] *= -1
        with torch.no_grad():
            o, _ = chunk_gated_delta_rule(**inputs)
        end = None if case.lens is None else sum(case.lens)
        error = relative_error(o[:, :end], oracle(inputs)[0][:, :end])
        assert error < 8e-3, error
        do, dht = make_output_gradients(inputs)
        want = oracle_gradients(inputs, do, dht)
        names = [n for n in (*DIFFERENTIABLE, *PARAMETERS) if n in inputs]
        leaves = {n: inputs[n].requires_grad_() for n in names}
        found = torch.autograd.grad(chunk_gated_delta_rule(**inputs), [*leaves.values()], [do, dht])
        errors = [relative_error(x, want[n]) for n, x in zip(leaves, found, strict=True)]
        assert max(errors) < 1e-2, dict(zip(leaves, errors, strict=True))
        print(f"{case.id}: o {error:.1e}, gradients at most {max(errors):.1e}")
    print(dispatch_report())
