# SPDX-License-Identifier: MIT
"""`fla-flashqla check`: its record, exit codes, and plain sentences where something is missing.

Machines on which something is missing are made by folders on PYTHONPATH that hide real packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fla_flashqla
from fla_flashqla import check, cli

SWITCHES = (
    "FLA_FLASH_QLA",
    "FLA_FLASH_QLA_STRICT",
    "FLA_FLASH_QLA_CP",
    "FLA_FLASH_QLA_FORM",
    "FLA_DISABLE_BACKEND_DISPATCH",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "CUDA_VISIBLE_DEVICES",
)
INSTALLED = check._why_not_loaded() == "PyTorch did not load its entry point"
needs_install = pytest.mark.skipif(not INSTALLED, reason="needs the package installed with pip")
pytestmark = pytest.mark.fla


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, body: str) -> None:
    """Put a package in front of the real one for child processes."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(body)
    path = [str(folder), str(Path(fla_flashqla.__file__).parent.parent)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def through_fla(device: str = "cpu") -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    problems: list[str] = []
    notes: list[str] = []
    reach, correctness = check._through_fla(device, lambda text: None, problems, notes)
    return reach, correctness, problems, notes


# One whole run


@pytest.fixture(scope="module")
def whole_run() -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in SWITCHES}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # the same everywhere
    command = [sys.executable, "-m", "fla_flashqla", "check", "--json"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@needs_install
def test_flashqla_check_passes(whole_run: subprocess.CompletedProcess[str]) -> None:
    record = json.loads(whole_run.stdout)
    assert record["problems"] == [] and record["ok"] is True
    assert whole_run.returncode == 0
    assert record["reach"]["loaded_by"] == "import torch"


def test_flashqla_check_json(whole_run: subprocess.CompletedProcess[str]) -> None:
    """Standard output is one JSON object; progress and library chatter are not in it."""
    record = json.loads(whole_run.stdout)
    assert record.keys() == {
        "schema",
        "version",
        "versions",
        "environment",
        "gpu",
        "compiler",
        "calls",
        "reach",
        "correctness",
        "ok",
        "problems",
        "notes",
    }
    assert record["schema"] == check.SCHEMA
    assert record["version"] == fla_flashqla.__version__
    assert record["versions"].keys() == {"python", "platform", *check.DISTRIBUTIONS}
    assert record["ok"] is (record["problems"] == [])
    assert whole_run.returncode == (0 if record["ok"] else 1)
    assert "... importing FLA\n" in whole_run.stderr
    assert "Traceback" not in whole_run.stderr


def test_flashqla_check_reach_is_proved(whole_run: subprocess.CompletedProcess[str]) -> None:
    """By counters of a call through FLA's operator; on the CPU the reference answers."""
    record = json.loads(whole_run.stdout)
    assert record["reach"]["answered"] == "reference"
    assert record["reach"]["mechanism"]
    cases = record["correctness"]["cases"]
    assert len(cases) == 8
    for case in cases:
        assert case["ok"] and case["answered"] == "reference"
        assert all(0 < error <= case["bound"] for error in case["relative_errors"].values())
        assert len(case["gradient_errors"]) == 5 + ("seq" in case["name"])
        assert all(0 < e <= case["gradient_bound"] for e in case["gradient_errors"].values())


def test_flashqla_check_typical_calls(whole_run: subprocess.CompletedProcess[str]) -> None:
    calls = json.loads(whole_run.stdout)["calls"]
    assert calls["hypothetical"] is True and calls["sm"] == [9, 0]
    paths = [(row["path"], row["reason"]) for row in calls["rows"]]
    assert [path for path, _ in paths] == ["ours", "ours", "ours", "ours", "FLA", "FLA"]
    assert paths[0][1].startswith("Plan(arch='sm90'")
    assert "gradients=True" in paths[2][1] and "float32" in paths[5][1]


def test_flashqla_check_text(whole_run: subprocess.CompletedProcess[str]) -> None:
    record = json.loads(whole_run.stdout)
    text = "\n".join(cli.render(record))
    for part in (
        "torch ",
        "answered by",
        "our CPU reference",
        "there is none here",
        "note: no GPU",
    ):
        assert part in text
    assert text.count("\n  ok    ") == 8 and "FAIL" not in text
    record["correctness"]["cases"][0] |= {"ok": False, "error": "ValueError: broken"}
    record |= {"ok": False, "problems": ["it is broken"]}
    text = "\n".join(cli.render(record))
    assert "FAIL" in text and "ValueError: broken" in text and "problem: it is broken" in text


# Exit codes


@pytest.mark.parametrize("problems, code", [([], 0), (["something is wrong"], 1)])
def test_flashqla_check_exit_code(
    problems: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "run", lambda progress: {"ok": not problems, "problems": problems})
    assert cli.main(["check", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["problems"] == problems


def test_flashqla_cli_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["unknown"], ["check", "--unknown"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(arguments)
        assert raised.value.code == 2
    with pytest.raises(SystemExit) as raised:
        cli.main(["check", "--help"])
    assert raised.value.code == 0
    assert "exit code: 0 if" in capsys.readouterr().out


def test_flashqla_cli_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(progress: check.Progress) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupted)
    assert cli.main(["check"]) == 130


# FLA missing, broken, switched off


@pytest.mark.parametrize(
    "body, expected",
    [
        (
            "raise ModuleNotFoundError(\"No module named 'fla'\", name='fla')",
            "does not import: ModuleNotFoundError: No module named 'fla'",
        ),
        ("1 / 0", "does not import: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no')", "does not import: SystemExit: no"),
        ("import os; os.abort()", "ended while FLA was imported: killed by SIGABRT"),
        ("import os; os._exit(3)", "ended while FLA was imported: exit code 3"),
    ],
    ids=["missing", "raises", "exits", "aborts", "leaves"],
)
def test_flashqla_check_without_fla(
    body: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide(monkeypatch, tmp_path, "fla", body)
    reach, correctness, problems, _ = through_fla()
    assert len(problems) == 1 and expected in problems[0]
    assert reach["answered"] == "none" and correctness["cases"] == []


def test_flashqla_check_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole command, since nothing of it may need torch to say that torch is missing."""
    hide(monkeypatch, tmp_path, "torch", "raise ImportError('libcudart.so.13: cannot open')")
    command = [sys.executable, "-m", "fla_flashqla", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "problem: PyTorch does not import: ImportError: libcudart.so.13" in done.stdout


@pytest.mark.parametrize(
    "name, value", [("FLA_FLASH_QLA", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1")]
)
def test_flashqla_check_switched_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    reach, correctness, problems, _ = through_fla()
    assert reach["answered"] == "none" and correctness["cases"] == []
    assert any(name in problem for problem in problems)
    if name == "FLA_FLASH_QLA":
        calls = check._calls({"sm": None, "sms": 0}, None, [])
        assert {row["path"] for row in calls["rows"]} == {"FLA"}


def test_flashqla_check_not_loaded_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch's loading the import by hand is what reaches FLA, and the check says so."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    reach, correctness, problems, _ = through_fla()
    assert reach["loaded_by"] == "import fla_flashqla" and reach["answered"] == "reference"
    assert all(case["ok"] for case in correctness["cases"])
    assert len(problems) == 1 and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in problems[0]


def test_flashqla_check_gives_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, tmp_path, "fla", "import time; time.sleep(600)")
    monkeypatch.setattr(check, "PROBE_TIMEOUT_S", 12)
    _, _, problems, _ = through_fla()
    assert problems == ["gave up after 12 s while FLA was imported"]


# The compiler and the GPU


@pytest.mark.parametrize(
    "body, expected",
    [
        ("raise ModuleNotFoundError(\"No module named 'tilelang'\")", "No module named 'tilelang'"),
        ("raise OSError('libtvm_ffi.so: undefined symbol')", "undefined symbol"),
        ("import os; os.abort()", "killed by SIGABRT"),
    ],
    ids=["missing", "broken", "aborts"],
)
def test_flashqla_check_without_tilelang(
    body: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide(monkeypatch, tmp_path, "tilelang", body)
    found = check._compiler()
    assert found["tilelang_loads"] is False
    assert found["error"].startswith("TileLang does not load: ") and expected in found["error"]


def test_flashqla_check_without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("tilelang")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = check._compiler()
    assert found["tilelang_loads"] is True and found["nvcc"] is None
    assert "nvcc" in found["error"]


GPU = {
    "count": 1,
    "index": 0,
    "name": "NVIDIA H200",
    "sm": [9, 0],
    "sms": 132,
    "supported": True,
    "status": "run on hardware",
    "proven": True,
    "measured": True,
    "cuda": "13.0",
    "driver": "580.65.06",
    "note": None,
}
NO_COMPILER = {"tilelang_loads": False, "cuda_home": None, "nvcc": None, "error": "no TileLang"}


@pytest.mark.parametrize("supported", [True, False])
def test_flashqla_check_compiler_matters_with_a_gpu(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler is a problem where kernels could run, and a note elsewhere."""
    asked = []

    def through(device: str, *_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.append(device)
        return {"device": device, "answered": "none", "loaded_by": None, "mechanism": None}, {
            "cases": []
        }

    monkeypatch.setattr(check, "_gpu", lambda: GPU | {"supported": supported})
    monkeypatch.setattr(check, "_compiler", lambda: NO_COMPILER)
    monkeypatch.setattr(check, "_through_fla", through)
    record = check.run(lambda text: None)
    assert asked == ["cuda:0" if supported else "cpu"]
    assert record["problems"] == (["no TileLang"] if supported else [])
    assert record["notes"] == ([] if supported else ["no TileLang"])
    assert record["calls"]["hypothetical"] is False
    if supported:
        assert record["calls"]["rows"][0] == {
            "name": "Qwen3-Next prefill (16:32, 4 sequences)",
            "path": "FLA",
            "reason": "no TileLang",
        }
    assert "NVIDIA H200, SM 9.0, cuda:0" in "\n".join(cli.render(record))


@pytest.mark.parametrize(
    ("change", "variables", "notes"),
    [
        ({}, {}, []),
        ({"measured": False}, {}, ["flash_qla answers"]),
        ({"measured": False}, {"FLA_FLASH_QLA_PREFER": "ours"}, []),
        ({}, {"FLA_FLASH_QLA_PREFER": "flash_qla"}, ["flash_qla answers"]),
        ({"proven": False}, {}, ["our kernels: run on hardware; each must pass"]),
        (
            {"proven": False},
            {"FLA_FLASH_QLA_SELFCHECK": "off"},
            ["our kernels: run on hardware; FLA_FLASH_QLA_SELFCHECK=off"],
        ),
        ({"supported": False, "proven": False, "measured": False}, {}, []),
    ],
)
def test_flashqla_check_on_a_gpu_that_we_never_had(
    change: dict[str, bool],
    variables: dict[str, str],
    notes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FLA_FLASH_QLA_PREFER", "FLA_FLASH_QLA_SELFCHECK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = [*check._untried(GPU | change, {"flash-qla": "0.1.3"})]
    assert len(found) == len(notes)
    assert all(text.startswith(start) for text, start in zip(found, notes, strict=True))
    assert not any(
        "flash_qla" in text for text in check._untried(GPU | change, {"flash-qla": None})
    )


def test_flashqla_check_driver_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and a PyTorch that sees no GPU: something that could work does not."""
    gpu = GPU | {"count": 0, "index": None, "name": None, "sm": None, "sms": 0, "supported": False}
    monkeypatch.setattr(check, "_gpu", lambda: gpu | {"note": "no GPU is used: a CPU build"})
    monkeypatch.setattr(check, "_compiler", lambda: NO_COMPILER)
    monkeypatch.setattr(check, "_through_fla", lambda *_: ({}, {}))
    assert check.run(lambda text: None)["problems"] == ["no GPU is used: a CPU build"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check.run(lambda text: None)["problems"] == []


@pytest.mark.sm90
def test_flashqla_check_on_hopper() -> None:
    """Our kernels answer, by counters, and agree with float64."""
    reach, correctness, problems, _ = through_fla("cuda:0")
    assert problems == [] and reach["answered"] == "kernels"
    assert [case["answered"] for case in correctness["cases"]] == ["kernels"] * 8
