# SPDX-License-Identifier: MIT
"""FLA's operator reaches us in every release, proved by counters: one process per import order."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

import fla_releases
import pytest
from child_processes import assert_passed, checks_of, environment, finish, start
from fla_releases import RELEASES, entry_point, release_path

DRIVER = "reach_driver.py"
FLASH_QLA = """
ANSWER, calls = ("answered by flash_qla", None), []
def chunk_gated_delta_rule(**kwargs):
    calls.append(kwargs)
    return ANSWER
"""


def orders(version: str) -> tuple[str, ...]:
    return ("autoload", "late", *(["old_torch"] if version == "0.5.2" else []))


@functools.cache
def site() -> str:
    """A folder with our entry point and a stand-in for the flash_qla package."""
    folder = entry_point(Path(tempfile.mkdtemp(prefix="fla_flashqla_")))
    folder.joinpath("flash_qla.py").write_text(FLASH_QLA)
    return str(folder)


@functools.cache
def outcomes(version: str) -> dict[str, dict[str, str]]:
    """What went wrong in each import order, which run side by side."""
    env = environment(os.pathsep.join((site(), release_path(version))))
    children = {order: start(DRIVER, order, env=env) for order in orders(version)}
    return {order: finish(child) for order, child in children.items()}


@pytest.mark.parametrize("check", checks_of(DRIVER))
@pytest.mark.parametrize(("version", "order"), [(v, o) for v in RELEASES for o in orders(v)])
def test_flashqla_reach(version: str, order: str, check: str) -> None:
    assert_passed(outcomes(version)[order], check)


def test_flashqla_releases_are_fetched_whatever_is_pinned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """.ci/run pins one release of FLA for the whole environment."""
    monkeypatch.setattr(fla_releases, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    pip = MagicMock(return_value=MagicMock(returncode=0))
    monkeypatch.setattr(fla_releases.subprocess, "run", pip)
    assert fla_releases.fetch("fla-core==0.4.1") == tmp_path / "fla-core==0.4.1"
    assert "PIP_CONSTRAINT" not in pip.call_args.kwargs["env"]


@pytest.mark.parametrize("version", ["0.5.1", "0.6.0"])
def test_flashqla_reach_bypassed(version: str) -> None:
    """FLA's switch for all dispatch holds for the dispatch point that we install, too."""
    env = environment(
        os.pathsep.join((site(), release_path(version))), FLA_DISABLE_BACKEND_DISPATCH="1"
    )
    assert_passed(finish(start("bypass_driver.py", env=env)), "bypassed")
