# SPDX-License-Identifier: MIT
"""How long a pass takes with sequences whole, as planned, and cut in other ways: what `plan.segment` is fitted to.

    python benchmarks/segments_choice.py --heads 2:8 --seqs 1x32768,1x8192 --gates published,zero --out choice.jsonl
    python benchmarks/segments_choice.py --pass bwd --random 30 --out choice.jsonl

Each row has the milliseconds (median of CUDA-graph replays) by "tokens of a segment/blocks that share a head", "0/1" being whole
sequences, the planner's choice, and its loss, which is its time by the best time, less 1. Exit codes: 0 if all was measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fla_flashqla import (
    api,
    arch,
    bench,
    cases,
    chunk_gated_delta_rule,
    dispatch_report,
    testing,
)
from fla_flashqla.plan import CHUNK, Plan, plan, splits

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def shapes(n: int, seed: int) -> list[tuple[str, str]]:
    """Random heads and lengths."""
    chosen = random.Random(seed)
    found = []
    for _ in range(n):
        HV = chosen.choice((1, 2, 4, 8, 16, 24, 32, 64))
        tokens = 64 * round(2 ** chosen.uniform(5, 11))
        sequences = chosen.choice((1, 1, 1, 2, 4))
        seqs = f"1x{tokens}" if sequences == 1 else f"rand{sequences}_{tokens}"
        found.append((f"{max(HV // 4, 1)}:{HV}", seqs))
    return found


def options(tokens: int, N: int, HV: int, sms: int) -> list[tuple[int, int]]:
    chunks = -(-tokens // (N * CHUNK))
    found = [(0, 1)]
    for count in COUNTS:
        length = -(-chunks // count)
        if length < 1 or count > chunks:
            break
        chains = N * HV * -(-chunks // length)
        if chains > 4 * sms:
            break
        found += [(length * CHUNK, shares) for shares in range(1, splits(chains, sms) + 1)]
    return list(dict.fromkeys(found))


def timed(inputs: dict[str, Any], step: str) -> Callable[[], Any]:
    """What is timed: a forward, or the backward of one."""
    if step == "fwd":
        return lambda: chunk_gated_delta_rule(**inputs)
    leaves = [inputs[name] for name in bench.DIFFERENTIATED]
    results: Any = chunk_gated_delta_rule(**inputs)
    given = testing.make_output_gradients(inputs)
    return lambda: torch.autograd.grad(results, leaves, given, retain_graph=True)


def measure(step: str, heads: str, seqs: str, gates: str, dtype: str, mode: str) -> dict[str, Any]:
    H, HV = cases.parse_heads(heads)
    lens = tuple(cases.parse_seqs(seqs))
    case = testing.Case(H, HV, lens=lens, dtype=dtype, gates=gates)
    inputs = testing.make_inputs(case, "cuda")
    for name in bench.DIFFERENTIATED:
        inputs[name].requires_grad_(step == "bwd")
    fields = {
        "fwd": ("segment", "segment_splits"),
        "bwd": ("backward_segment", "backward_splits"),
    }[step]
    planned = api.decide((), inputs)
    assert isinstance(planned, Plan), planned
    choice = tuple(getattr(planned, field) for field in fields)
    sms = arch.device_facts(inputs["q"].device).sms
    times: dict[str, float] = {}
    for tokens, shares in dict.fromkeys((choice, *options(sum(lens), len(lens), HV, sms))):

        def forced(call: Any, tokens: int = tokens, shares: int = shares) -> Any:
            made = plan(call)
            assert isinstance(made, Plan)
            changed: dict[str, Any] = dict(zip(fields, (tokens, shares), strict=True))
            return replace(made, **changed)

        with mock.patch.object(api, "plan", forced):
            times[f"{tokens}/{shares}"] = bench.time_graph(lambda: timed(inputs, step))
    chosen = times[f"{choice[0]}/{choice[1]}"]
    return {
        **{
            "pass": step,
            "heads": heads,
            "seqs": seqs,
            "gates": gates,
            "dtype": dtype,
            "mode": mode,
        },
        **{"ms": times, "choice": f"{choice[0]}/{choice[1]}"},
        "loss": round(chosen / min(times.values()) - 1, 4),
        "by_whole": round(times["0/1"] / chosen, 4),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pass", dest="step", default="fwd", choices=("fwd", "bwd"))
    parser.add_argument("--heads", default="2:8,4:16,8:32")
    parser.add_argument("--seqs", default="1x32768,4096+28672,8192x4,1x8192,1x2048")
    parser.add_argument("--gates", default="published,zero")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--modes", default="auto", help="of FLA_FLASH_QLA_CP: exact, auto")
    parser.add_argument("--random", type=int, default=0, help="so many random shapes instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    wanted = [(h, s) for h in args.heads.split(",") for s in args.seqs.split(",")]
    losses = []
    for mode in args.modes.split(","):
        for heads, seqs in shapes(args.random, args.seed) or wanted:
            for gates in args.gates.split(","):
                with mock.patch.dict("os.environ", {"FLA_FLASH_QLA_CP": mode}):
                    row = measure(args.step, heads, seqs, gates, args.dtype, mode)
                losses.append(row["loss"])
                print(json.dumps(row), flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print(
        f"median loss {statistics.median(losses):.1%}; {dispatch_report()['ran']}", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
