# SPDX-License-Identifier: MIT
"""`fla-flashqla bench`, on an invented GPU with stand-ins for what it times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fla_flashqla import bench, cases, cli

MS = {"ours": 1.0, "fla": 4.0, "flashinfer": 0.5}
SHAPE = ("--heads", "16:32", "--seqs", "8192x4,1x2048")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command; returns its exit code and what it printed."""
    times: dict[str, Any] = dict(MS)
    seen = {"gpu": "NVIDIA H200", "torch": "2.11.0"}
    machine = dict.fromkeys(cases.VERSIONS) | seen

    def measure(provider: str, case: cases.Case, *_: Any) -> Any:
        print("what a library says")
        found = times[provider]
        if isinstance(found, BaseException):
            raise found
        return {"ms": found * (2 if case.step == "bwd" else 1)}

    def load(names: list[str]) -> Any:
        found = {name: name for name in names if name in times}
        return found, {name: "ImportError: no" for name in names if name not in times}

    monkeypatch.setattr(bench, "environment", lambda: machine)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "load", load)
    monkeypatch.setattr(bench, "works", lambda device: machine["driver"] != "broken")
    machine["driver"] = None

    def command(*argv: str, gpu: str | None = "NVIDIA H200", driver: Any = None, **changed: Any):
        machine.update(gpu=gpu, driver=driver)
        for name, value in changed.items():
            times.pop(name) if value is None else times.update({name: value})
        code = cli.main(["bench", *argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def test_flashqla_bench_command(run: Run) -> None:
    """A row for each shape and pass, every provider's time, what is gained, and what is missing."""
    code, out, err = run(*SHAPE)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and out.startswith("NVIDIA H200, torch 2.11.0\n")
    assert ["fwd", "16:32", "8192x4", "1.000", "4.000", "0.500", "4.00", "0.50"] in lines
    assert ["bwd", "16:32", "1x2048", "2.000", "8.000", "1.000", "4.00", "0.50"] in lines
    assert sum(line[:2] in (["fwd", "16:32"], ["bwd", "16:32"]) for line in lines) == 4
    assert "skipped: flash_qla: ImportError: no" in out
    assert out.endswith("takes 4.00 times as long as ours (geometric mean of 4 rows).\n")
    assert "[4/4] bwd 16:32 1x2048: ours" in err and "library" in err and "library" not in out


def test_flashqla_bench_command_json(run: Run) -> None:
    code, out, _ = run(*SHAPE, "--pass", "step", "--dtype", "float16", "--json")
    record = json.loads(out)
    assert code == 0 and record["ok"] is True and record["problem"] is None
    assert record["schema"] == 1 and record["environment"]["gpu"] == "NVIDIA H200"
    assert record["skipped"] == {"flash_qla": "ImportError: no"}
    assert [cases.Case.of(row) for row in record["rows"]] == [
        cases.Case("16:32", seqs, "step", "published", "float16") for seqs in ("8192x4", "1x2048")
    ]


def test_flashqla_bench_command_refused(run: Run) -> None:
    """Where ours does not answer, the reason, the others' times, and exit code 1."""
    refusal = RuntimeError("the GPU must be SM90 or SM100 or SM103, got SM80: not supported")
    code, out, _ = run(*SHAPE, "--pass", "fwd", ours=refusal)
    assert code == 1
    assert ["fwd", "16:32", "8192x4", "n/a", "4.000", "0.500", "-", "-"] in [
        line.split() for line in out.splitlines()
    ]
    assert f"n/a: ours, fwd 16:32 8192x4: RuntimeError: {refusal}" in out
    assert "as long as ours" not in out


def test_flashqla_bench_command_peer_fails(run: Run) -> None:
    code, out, _ = run(*SHAPE, fla=ValueError("out of memory"))
    assert code == 0 and "n/a: fla, bwd 16:32 1x2048: ValueError: out of memory" in out


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"gpu": None}, "nothing can be measured: PyTorch finds no GPU"),
        ({"ours": None}, "ours is called through FLA, which does not import"),
        ({"driver": "broken"}, "the GPU stopped working"),
    ],
    ids=["no GPU", "no FLA", "broken GPU"],
)
def test_flashqla_bench_command_cannot(run: Run, changed: dict[str, Any], problem: str) -> None:
    code, out, _ = run(*SHAPE, **changed)
    assert code == 1 and "problem: " in out and problem in out
    record = json.loads(run(*SHAPE, "--json", gpu=None)[1])
    assert record["ok"] is False and record["rows"] == []


def test_flashqla_bench_command_interrupted(run: Run) -> None:
    """The rows so far are printed, and the exit code is that of interrupts."""

    class Twice(float):
        left = 2

        def __mul__(self, factor: float) -> float:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return float(self) * factor

    code, out, err = run(*SHAPE, fla=Twice(4.0))
    assert code == 130 and "interrupted" in err
    assert sum(line.startswith(("fwd ", "bwd ")) for line in out.splitlines()) == 2
    assert "problem: interrupted" in out


@pytest.mark.parametrize(
    "argv, text",
    [
        ([], "required: --heads, --seqs"),
        (["--heads", "2:3", "--seqs", "8"], "HV must be a multiple of H, got '2:3'"),
        (["--heads", "2:4", "--seqs", "8x"], "lengths must be like 8192x4"),
        ([*SHAPE, "--pass", "forward"], "'forward' is none of fwd, bwd, step"),
    ],
)
def test_flashqla_bench_command_usage(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["bench", *argv])
    assert raised.value.code == 2 and text in " ".join(capsys.readouterr().err.split())


def test_flashqla_bench_command_documents_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "exit code: 0 if ours has a time in every row" in capsys.readouterr().out


def test_flashqla_cases_load_no_torch() -> None:
    """The command line answers `--help` and wrong arguments at once."""
    code = "import sys, fla_flashqla.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
