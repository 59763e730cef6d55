# SPDX-License-Identifier: MIT
"""Gradients beside the recurrences on their own hardware: the same bits as behind them, whoever takes which chunk when."""

import pytest
import torch
from gpu_helpers import DEVICE, LAYER, planner
from test_flashqla_backward import assert_same, compare, run, trained
from test_flashqla_segments_gpu import inputs

from fla_flashqla import api
from fla_flashqla.call import describe
from fla_flashqla.plan import Beside, plan
from fla_flashqla.testing import DIFFERENTIABLE, make_output_gradients, oracle_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.fla]

CASES = {
    "one": {"T": 1100, "H": 1, "HV": 1},
    "dense": {"B": 3, "T": 1100, "H": 2, "HV": 8},
    "varlen": {"lens": (0, 1, 1500, 0, 64, 1111, 65), "tail": 70, "HV": 6},
    "layer": {"lens": (2000, 3, 700), "cu_dtype": "int64", **LAYER},
    "float16": {"T": 1300, "H": 4, "HV": 4, "dtype": "float16", "l2norm": True},
}
# Blocks that share a head in states.py and reverse.py, which of the two is waited for, and fields of the same plan without
WAYS = {
    "whole": (Beside(1, 1, False), {"splits": 1, "states_whole": True}),
    "halves": (Beside(2, 2, False), {"splits": 2, "states_whole": False}),
    "mixed": (Beside(1, 2, False), {"splits": 2, "states_whole": True}),
    "whole_ahead": (Beside(1, 1, True), {"splits": 1, "states_whole": True}),
    "halves_ahead": (Beside(2, 2, True), {"splits": 2, "states_whole": False}),
}


@pytest.fixture
def planned(monkeypatch):
    """Backwards have that plan, and are cut into segments of so many tokens."""

    def planned(beside, fields, segment=0):
        cut = {"backward_segment": segment, "backward_splits": fields["splits"]}
        monkeypatch.setattr(api, "plan", planner(**fields, **cut, beside=beside))

    return planned


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("segment", [0, 1024])
@pytest.mark.parametrize("case", CASES)
def test_flashqla_beside_gpu(case, segment, way, planned):
    beside, fields = WAYS[way]
    if segment and "mixed" in way:
        pytest.skip("states of segments have the blocks of their gradients")
    x = inputs(**CASES[case])
    do, dht = make_output_gradients(x)
    planned(None, fields, segment)
    want = run(x, do, dht)
    compare(x, want, oracle_gradients(x, do, dht))
    planned(beside, fields, segment)
    load, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for i in range(20):
        if i % 2:
            with torch.cuda.stream(load):  # which SMs are free, and when
                a @ a
        assert_same(run(x, do, dht), want)
    load.synchronize()


def test_flashqla_beside_gpu_many_chains(planned):
    """More blocks than SMs: gradients start when the last of them have."""
    x = inputs(B=12, T=1100, H=4, HV=16)
    do, dht = make_output_gradients(x)
    for beside, fields in WAYS.values():
        planned(None, fields)
        want = run(x, do, dht)
        planned(beside, fields)
        for _ in range(5):
            assert_same(run(x, do, dht), want)


@pytest.mark.parametrize("wanted", [("q",), ("v",), ("g", "beta"), ("initial_state",)])
def test_flashqla_beside_gpu_subsets(wanted, planned):
    x = inputs(B=2, T=1100, HV=4)
    do, dht = make_output_gradients(x)
    beside, fields = WAYS["mixed"]
    planned(None, fields)
    want = run(x, do, dht, wanted)
    planned(beside, fields)
    assert_same(run(x, do, dht, wanted), want)


def test_flashqla_beside_gpu_in_a_graph():
    """As planned; each replay counts chunks from zero."""
    x = inputs(T=2048, H=2, HV=8)
    assert plan(describe(**trained(x))).beside
    do, dht = make_output_gradients(x)
    run(x, do, dht)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, do, dht)
    for seed in (1, 2, 3):
        new = inputs(seed, T=2048, H=2, HV=8)
        for name in DIFFERENTIABLE:
            x[name].copy_(new[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, run(x, do, dht))
