# SPDX-License-Identifier: MIT
"""`fla-flashqla warmup` fills a cache that later processes use without a compiler."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fla_flashqla import arch, chunk, cli, segments, warmup
from fla_flashqla.call import Call
from fla_flashqla.plan import Plan, plan


def command(cache: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "fla_flashqla", "warmup", "--json", *arguments],
        env={**os.environ, "TILELANG_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.compile
def test_flashqla_warmup_replaces_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "no_nvcc").mkdir()
    nowhere = {"CUDA_HOME": str(tmp_path / "no_nvcc"), "PATH": os.defpath}
    code, record = command(tmp_path / "cache", "--beta-dtype", "float32", **nowhere)
    assert code == 1 and not record["ok"] and "nvcc" in record["plans"][0]["error"]

    code, record = command(tmp_path / "cache", "--beta-dtype", "float32")
    assert code == 0 and record["ok"] and Path(record["cache"]).is_relative_to(tmp_path)
    (row,) = record["plans"]
    assert row | {"seconds": 0} == {
        **{"arch": "sm90", "dtype": "bfloat16", "g_dtype": "float32", "beta_dtype": "float32"},
        "seconds": 0,
        "steps": ["forward", "segments", "backward", "backward_segments"],
    }
    code, again = command(tmp_path / "cache", "--beta-dtype", "float32", **nowhere)
    assert code == 0 and again["plans"][0]["seconds"] < row["seconds"] / 3


def test_flashqla_warmup_plans() -> None:
    """What the planner can ask for, and nothing twice."""
    made = warmup.plans(("bfloat16", "float16"), ("float32",), ("float32", "bfloat16"))
    assert len({p.compiled for p in made}) == len(made) == 4
    assert all(p.steps == ("forward", "backward") for p in made)
    made = warmup.plans(("bfloat16",), ("float32",), ("float32",), gradients=False)
    assert [(p.arch, p.steps) for p in made] == [("sm90", ("forward",))]
    made = warmup.plans(("bfloat16",), ("float32",), ("float32",), target="sm_100a")
    assert [p.arch for p in made] == ["sm100"]


def test_flashqla_warmup_is_enough_for_any_shape() -> None:
    """A sweep over heads, lengths, batches, flags and GPUs asks for nothing else, and for all of it."""
    (warm,) = warmup.plans(("bfloat16",), ("float32",), ("float32",))
    chosen = random.Random(0)

    def flip() -> bool:
        return chosen.random() < 0.5

    seen = set()
    for _ in range(1000):
        H, group = chosen.choice((1, 2, 4, 8, 16)), chosen.choice((1, 2, 3, 4, 8))
        varlen, tokens = flip(), int(2 ** chosen.uniform(0, 20))
        N = chosen.choice((1, 2, 3, 4, 8, 40))
        made = plan(
            Call(
                **{"device_type": "cuda", "device_index": 0, "sm": (9, 0), "is_hip": False},
                **dict.fromkeys(("q_dtype", "k_dtype", "v_dtype"), "bfloat16"),
                **dict.fromkeys(("g_dtype", "beta_dtype"), "float32"),
                **{"B": 1 if varlen else N, "T": tokens, "H": H, "HV": H * group, "N": N},
                **{"K": 128, "V": 128, "sms": chosen.choice((132, 114, 78)), "varlen": varlen},
                longest=chosen.randint(-(-tokens // N), tokens) if varlen and flip() else 0,
                needs_grad=flip(),
                state_dtype="float32" if flip() else None,
                output_final_state=flip(),
                use_qk_l2norm_in_kernel=flip(),
                use_gate_in_kernel=flip(),
                state_v_first=flip(),
            )
        )
        assert isinstance(made, Plan), made
        seen |= {made.key(step) for step in made.steps}
    assert seen == {warm.key(step) for step in warmup.steps(warm)}


def test_flashqla_warmup_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the command line are those that calls are taken on; what is here comes first."""
    assert (*warmup.targets(),) == cli._TARGETS
    for sms, target in {(): "sm_90a", ((8, 0), (10, 3)): "sm_103a", ((12, 0),): "sm_90a"}.items():
        facts = [arch.DeviceFacts("cuda", i, sm, False) for i, sm in enumerate(sms)]
        monkeypatch.setattr(torch.cuda, "device_count", lambda facts=facts: len(facts))
        monkeypatch.setattr(arch, "device_facts", lambda device, facts=facts: facts[device.index])
        assert warmup.visible() == target


@pytest.mark.parametrize("arguments", [[], ["--forward-only"]])
def test_flashqla_warmup_of_the_backward(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a call can need is compiled, and the bar counts it."""
    built: list[str] = []
    names = {
        "forward": (chunk, "build"),
        "segments": (segments, "build"),
        "backward": (chunk, "build_backward"),
        "backward_segments": (segments, "build_backward"),
    }
    for step, (module, name) in names.items():
        monkeypatch.setattr(module, name, lambda plan, step=step: built.append(step))
    assert cli.main(["warmup", "--beta-dtype", "float32", *arguments]) == 0
    assert sorted(built) == sorted([*names][: 2 if arguments else 4])
    assert f"{len(built)}/{len(built)}" in capsys.readouterr().err


def test_flashqla_warmup_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plans behind it are compiled all the same."""

    def broken(plan: Plan) -> None:
        if plan.beta_dtype == "float32":
            raise RuntimeError("no nvcc")

    for module in (chunk, segments):
        monkeypatch.setattr(module, "build", lambda plan: None)
        monkeypatch.setattr(module, "build_backward", broken)
    assert cli.main(["warmup", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["plans"]
    assert first["error"] == "RuntimeError: no nvcc" and "seconds" in second
