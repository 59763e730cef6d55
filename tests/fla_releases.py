# SPDX-License-Identifier: MIT
"""FLA releases beside the installed one, each in a folder of its own for PYTHONPATH."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

RELEASES = ("0.4.1", "0.4.2", "0.5.0", "0.5.1", "0.5.2", "0.6.0")
NEWEST_TRITON = (3, 6)  # that all of them import with: 0.4.2 to 0.5.2 fail with Triton 3.9
CACHE = Path(tempfile.gettempdir()) / f"fla_flashqla_tests_{os.getuid()}"

# What pip says when no index answers, as opposed to an index that lacks the release.
UNREACHABLE = (
    "connection broken by",
    "Max retries exceeded",
    "Failed to establish a new connection",
)


def fetch(*requirements: str) -> Path:
    """Folder with exactly these packages, kept between runs."""
    target = CACHE / "+".join(requirements)
    if target.is_dir():
        return target
    CACHE.mkdir(mode=0o700, exist_ok=True)
    staging = tempfile.mkdtemp(dir=CACHE)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--retries", "1"]
    # The checks pin the FLA that is installed, which is not the one that is wanted here.
    env = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    pip = subprocess.run(
        [*command, "--target", staging, *requirements], capture_output=True, text=True, env=env
    )
    if pip.returncode:
        shutil.rmtree(staging)
        offline = any(text in pip.stdout + pip.stderr for text in UNREACHABLE)
        reason = f"pip cannot fetch {requirements}: {pip.stderr[-2000:]}"
        if offline and os.environ.get("CI") != "true":
            pytest.skip(f"no package index can be reached; {reason}")
        pytest.fail(reason)
    try:
        os.rename(staging, target)
    except OSError:  # another run was faster
        shutil.rmtree(staging)
    return target


@functools.cache
def release_path(version: str) -> str:
    """PYTHONPATH on which a child process finds FLA `version` and a Triton for it."""
    paths = [fetch(f"fla-core=={version}", f"flash-linear-attention=={version}")]
    triton = importlib.metadata.version("triton").split(".")
    if (int(triton[0]), int(triton[1])) > NEWEST_TRITON:
        paths.append(fetch("triton=={}.{}.0".format(*NEWEST_TRITON)))
    return os.pathsep.join(map(str, paths))


def entry_point(folder: Path) -> Path:
    """Install our entry point in `folder`, in case the package runs from a checkout."""
    info = folder / "fla_flashqla_tests-0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: fla_flashqla_tests\nVersion: 0\n"
    )
    info.joinpath("entry_points.txt").write_text(
        "[torch.backends]\nfla_flashqla = fla_flashqla._autoload:autoload\n"
    )
    return folder
