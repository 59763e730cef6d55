# SPDX-License-Identifier: MIT
"""Checks that need a process of their own: a driver script holds many, one test reports each."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TIMEOUT_S = 120


def run_checks(namespace: Mapping[str, Any]) -> None:
    """In the child: call each `check_*` in order, and print its name and what went wrong."""
    for name, check in list(namespace.items()):
        if name.startswith("check_"):
            outcome = ""
            try:
                check()
            except BaseException:
                outcome = traceback.format_exc()
            print(json.dumps([name.removeprefix("check_"), outcome]), flush=True)


def checks_of(driver: str) -> list[str]:
    body = ast.parse((HERE / driver).read_text()).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("check_") for name in names if name.startswith("check_")]


def environment(python_path: str = "", **variables: str) -> dict[str, str]:
    """Environment of a child without the switches that a user may have set."""
    switches = ("FLA_FLASH_QLA", "FLA_DISABLE_BACKEND", "TORCH_DEVICE_BACKEND", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(switches)}
    # One thread: a forked child must not wait for its parent's, and children share the cores.
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    paths = [python_path, *package_path(), str(HERE)]
    return {**kept, **threads, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **variables}


def package_path() -> list[str]:
    """What PYTHONPATH needs for the copy of the package that is under test: none if installed."""
    import fla_flashqla

    folder = Path(fla_flashqla.__file__).resolve().parent.parent
    return [str(folder)] if folder == ROOT else []


def start(driver: str, *args: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / driver), *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> dict[str, str]:
    """What went wrong in each check that was reached, and all output under "output"."""
    try:
        output = child.communicate(timeout=TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        output = child.communicate()[0] + f"\nstopped after {TIMEOUT_S} s"
    found = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    return {**dict(found), "output": output}


def assert_passed(outcome: Mapping[str, str], check: str) -> None:
    assert check in outcome, outcome["output"][-4000:]
    assert not outcome[check], outcome[check]
