# SPDX-License-Identifier: MIT
"""The package as it is built and installed, and that README and .ci/run say what is true."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fla_flashqla
from fla_flashqla import call, env, plan, testing

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(fla_flashqla.__file__).resolve().parent
README = (ROOT / "README.md").read_text()


def distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("fla-flashqla")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-flashqla is not installed in this environment")


def block(marker: str) -> list[str]:
    """The lines of the README's code block or table that follows `<!-- marker -->`."""
    behind = README.split(f"<!-- {marker} -->\n")
    assert len(behind) == 2, f"README.md must have one place marked {marker}"
    lines = behind[1].splitlines()
    if lines[0].startswith("```"):
        return lines[1 : lines.index("```", 1)]
    return lines[: lines.index("")]


def rows(marker: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block(marker)[2:]]


def sources(folder: Path) -> dict[str, bytes]:
    """The package's files, without the caches that tools leave beside them."""
    files = {p.relative_to(folder): p for p in folder.rglob("*") if p.is_file()}
    caches = {name for name in files if any(re.match(r"\.|__pycache__", s) for s in name.parts)}
    return {name.as_posix(): files[name].read_bytes() for name in files.keys() - caches}


# README and .ci/run


@pytest.mark.parametrize("lens", [None, (3, 0, 70)])
def test_flashqla_readme_examples(lens: tuple[int, ...] | None) -> None:
    """Those in place of flash_qla, as written."""
    inputs = testing.make_inputs(testing.Case(T=70, lens=lens))
    do, dht = testing.make_output_gradients(inputs)
    names = {**inputs, "h0": inputs["initial_state"], "do": do, "dht": dht}
    names.setdefault("cu_seqlens", None)
    exec("\n".join([*block("import example"), *block("pair example")]), names)
    want = testing.oracle_gradients(inputs, do, dht)
    assert testing.relative_error(names["dg"], want["g"]) < 1e-5


def test_flashqla_readme_commands() -> None:
    """One line each, the same set-up, a new environment, an extra that exists."""
    (check,), (test,) = block("check command"), block("test command")
    assert (
        check == "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/fla-flashqla check"
    )
    setup, install, run = test.split(" && ")
    assert setup == check.split(" && ")[0]
    extra = re.fullmatch(r"\.venv/bin/pip install '\.\[(\w+)\]'", install)
    assert extra and f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text()
    assert run == ".venv/bin/pytest -k flashqla"


@pytest.mark.skipif(os.name != "posix", reason="needs bash")
def test_flashqla_ci_runs_the_readme_command() -> None:
    shown = subprocess.run(
        ["bash", ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == block("test command")
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    assert "- run: bash .ci/run" in workflow
    assert all(name.startswith("actions/") for name in re.findall(r"uses: (\S+)", workflow))


def test_flashqla_selection_is_the_suite() -> None:
    """`pytest -k flashqla` takes every test, since each file has the word in its name."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert names and all(name.startswith("test_flashqla_") for name in names)


def test_flashqla_readme_variables() -> None:
    table = [[f"`{v.name}`", f"`{v.default}`", v.meaning] for v in env.VARIABLES]
    assert rows("environment variables") == table
    assert all(v.name.startswith("FLA_FLASH_QLA") for v in env.VARIABLES)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def described(T: int = 64, K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16, **kw):
    """A call on an SM90, with what the case changes."""
    q, k, v = (
        meta(1, T, 2, K, dtype=dtype),
        meta(1, T, 2, K, dtype=dtype),
        meta(1, T, 4, V, dtype=dtype),
    )
    q.requires_grad_(kw.pop("grad", False))
    facts = {"device_type": "cuda", "device_index": 0, "sm": (9, 0)} | kw.pop("facts", {})
    g, beta = meta(1, T, 4), meta(1, T, 4)
    return call.describe(q, k, v, g, beta, **kw)._replace(**facts)


REFUSALS = {
    "under `torch.vmap`, `torch.func.grad`, ...": {"facts": {"transformed": True}},
    "`cp_context`": {"cp_context": object()},
    "a keyword that we do not know": {"answer": 42},
    "K = 256, V = 512": {"K": 256, "V": 512},
    "float32 q, k, v": {"dtype": torch.float32},
    "q, k, v of two dtypes": {"facts": {"k_dtype": "float16"}},
    "float64 g": {"facts": {"g_dtype": "float64"}},
    "float64 beta": {"facts": {"beta_dtype": "float64"}},
    "float64 initial_state": {"facts": {"state_dtype": "float64"}},
    "consumer Blackwell": {"facts": {"sm": (12, 0)}},
    "other GPUs": {"facts": {"sm": (8, 0)}},
    "ROCm": {"facts": {"is_hip": True}},
    "other devices": {"facts": {"device_type": "xpu"}},
    "no tokens": {"T": 0},
    "two billion tokens": {"T": 2**31},
}


def test_flashqla_readme_refusals() -> None:
    """The README's table holds what the planner answers, word for word."""
    table = {name: reason.strip("`") for name, reason in rows("refusals")}
    assert table.keys() == REFUSALS.keys()
    for name, changes in REFUSALS.items():
        answer = plan.plan(described(**changes))
        assert isinstance(answer, plan.Refusal), name
        assert answer.reason == table[name]
    for grad in (False, True):
        answer = plan.plan(described(grad=grad))
        assert isinstance(answer, plan.Plan) and answer.gradients is grad


# The built wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "fla_flashqla", tree / "fla_flashqla")
    shutil.copytree(ROOT / "tests", tree / "tests")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", tree / "dist", tree], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "dist").glob("*.whl")
    assert path.name == f"fla_flashqla-{fla_flashqla.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_flashqla_wheel_contents(wheel: zipfile.ZipFile) -> None:
    """All of the package, with its subpackages, kernel headers and `py.typed`; nothing else."""
    tree = {f"fla_flashqla/{name}" for name in sources(ROOT / "fla_flashqla")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == tree
    assert {"fla_flashqla/py.typed", "fla_flashqla/kernels/__init__.py"} <= packed


def test_flashqla_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser()
    points.read_string(dist_info(wheel, "entry_points.txt"))
    assert dict(points["torch.backends"]) == {"fla_flashqla": "fla_flashqla._autoload:autoload"}
    assert dict(points["console_scripts"]) == {"fla-flashqla": "fla_flashqla.cli:main"}
    metadata = dist_info(wheel, "METADATA")
    assert "License-Expression: MIT" in metadata and "Requires-Python: >=3.10" in metadata
    # Ranges: an exact version would replace a user's torch or FLA.
    needs = [n for n in re.findall(r"Requires-Dist: (.+)", metadata) if "extra ==" not in n]
    names = {re.match(r"[\w-]+", need)[0] for need in needs}
    assert names == {"torch", "fla-core", "triton", "packaging", "filelock", "tqdm", "tilelang"}
    assert not any("==" in n.split(";")[0] for n in needs)


# The installed package


def test_flashqla_installed_copy_is_this_tree() -> None:
    """What is tested is what is installed: a stale copy would test yesterday's code."""
    dist = distribution()
    direct = json.loads(dist.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        assert PACKAGE == ROOT / "fla_flashqla"
    else:
        assert Path(str(dist.locate_file("fla_flashqla"))).resolve() == PACKAGE
        installed, tree = sources(PACKAGE), sources(ROOT / "fla_flashqla")
        stale = {n for n in installed.keys() | tree.keys() if installed.get(n) != tree.get(n)}
        assert not stale, "remove build/ and run `pip install .` again"


def test_flashqla_installed_metadata() -> None:
    dist = distribution()
    assert dist.version == fla_flashqla.__version__
    (point,) = dist.entry_points.select(group="torch.backends")
    assert callable(point.load())
    (script,) = dist.entry_points.select(group="console_scripts")
    assert callable(script.load())


# The source tree


def test_flashqla_test_files() -> None:
    """Licence line first, none too long to read; test_flashqla_import.py looks at the package."""
    for path in (ROOT / "tests").rglob("*.py"):
        lines = path.read_text().splitlines()
        assert lines[:1] == ["# SPDX-License-Identifier: MIT"], path
        assert len(lines) <= 500, path
