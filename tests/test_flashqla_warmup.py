# SPDX-License-Identifier: MIT
"""`fla-flashqla warmup` fills a cache that later processes use without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fla_flashqla import chunk, cli, warmup


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
        "steps": ["forward", "backward"],
    }
    code, again = command(tmp_path / "cache", "--beta-dtype", "float32", **nowhere)
    assert code == 0 and again["plans"][0]["seconds"] < row["seconds"] / 3


def test_flashqla_warmup_plans() -> None:
    """What the planner can ask for, and nothing twice."""
    made = warmup.plans(("bfloat16", "float16"), ("float32",), ("float32", "bfloat16"))
    assert len({p.compiled for p in made}) == len(made) == 4
    assert all(p.steps == ("forward", "backward") for p in made)
    made = warmup.plans(("bfloat16",), ("float32",), ("float32",), gradients=False)
    assert [p.steps for p in made] == [("forward",)]


@pytest.mark.parametrize("arguments", [[], ["--forward-only"]])
def test_flashqla_warmup_of_the_backward(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[str] = []
    monkeypatch.setattr(chunk, "build", lambda plan: built.append("forward"))
    monkeypatch.setattr(chunk, "build_backward", lambda plan: built.append("backward"))
    assert cli.main(["warmup", "--beta-dtype", "float32", *arguments]) == 0
    assert built == (["forward"] if arguments else ["forward", "backward"])
