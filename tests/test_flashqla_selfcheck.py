# SPDX-License-Identifier: MIT
"""The self-check: wrong, crashing and hanging kernels are refused, right ones accepted once; and what it leaves alone."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_helpers
import kernel_models
import pytest
import torch
from child_processes import HERE, environment

import fla_flashqla
from fla_flashqla import agreement, api, arch, chunk, env, segments, selfcheck, testing
from fla_flashqla.plan import Plan, Refusal

SM = (9, 9)  # a row of its own: plans are cached
NEW = replace(arch.ARCHS[9, 0], name="new", sm=SM, status="never run", proven=False)
GPU = arch.Identity("A new GPU", "GPU-0")
PLAN = Plan("new", "bfloat16", "float32", "float32")
AGREES = '{"agrees": true, "detail": "close", "lasting": true}'
DIFFERS = '{"agrees": false, "detail": "o is off", "lasting": true}'
DRIVER = str(HERE / "selfcheck_driver.py")


class Children:
    """What children do from now on, and how many were started, in all processes."""

    def __init__(self, folder: Path) -> None:
        self.count = folder / "count"
        self.command: list[str] = []
        self.says(AGREES)

    def does(self, code: str) -> None:
        note = f"open({str(self.count)!r}, 'a').write('x');"
        self.command = [sys.executable, "-S", "-c", f"{note}import sys;{code}"]

    def says(self, line: str) -> None:
        self.does(f"print({line!r})")

    def hangs(self, behind: str) -> None:
        self.does(f"import time; print({behind!r}, flush=True); time.sleep(60)")
        self.command[3] = self.command[3].partition(";")[2]  # not counted

    def drive(self, kind: str) -> None:
        self.command = [sys.executable, DRIVER, kind]

    @property
    def started(self) -> int:
        return len(self.count.read_text()) if self.count.exists() else 0


@pytest.fixture
def children(
    launched: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Children:
    """CPU tensors look like those of a GPU on which nothing of ours ran; what the self-check starts does as told."""
    pytest.importorskip("tilelang")
    started = Children(tmp_path)
    monkeypatch.setitem(arch.ARCHS, SM, NEW)
    facts = arch.DeviceFacts("cuda", -1, SM, False, 132)
    monkeypatch.setattr(arch, "device_facts", lambda device: facts)
    monkeypatch.setattr(arch, "identity", lambda index: GPU)
    monkeypatch.setattr(selfcheck, "_found", {})
    monkeypatch.setattr(selfcheck, "_command", lambda *args: [*started.command, *args])
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    caplog.set_level(logging.INFO, "fla_flashqla")
    return started


def call(**fields: Any) -> dict[str, Any]:
    return testing.make_inputs(testing.Case(**{"T": 64, **fields}))


def decided(**fields: Any) -> str | None:
    """Why a call is refused."""
    decision = api.decide((), call(**fields))
    return decision.reason if isinstance(decision, Refusal) else None


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / selfcheck.FOLDER).glob("*"))


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on it is as if this were one."""

    def forget() -> None:
        monkeypatch.setattr(selfcheck, "_found", {})
        monkeypatch.setattr(api, "_kernels", {})

    return forget


# What is compared.


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a child."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("step", "dtype"),
    [*((step, "bfloat16") for step in agreement.FORMS), ("segments", "float16")],
)
def test_flashqla_selfcheck_accepts_models(step: str, dtype: str, launched: list[str]) -> None:
    """And launches each kernel of a step, but for forms that only another step asks for."""
    plan = Plan("sm90", dtype, "float32", "bfloat16")
    agrees, detail = agreement.compare(step, plan, torch.device("cpu"))
    assert agrees, detail
    kernels = {
        "forward": chunk.Kernels._fields,
        "segments": segments.SegmentKernels._fields,
        "backward": chunk.BackwardKernels._fields,
        "backward_segments": segments.ReverseSegmentKernels._fields,
    }
    assert {*kernels[step]} <= {*launched}


def off(kernel: Any, argument: int, factor: float) -> Any:
    def launch(*args: Any) -> None:
        kernel(*args)
        args[argument].mul_(factor)

    return launch


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_flashqla_selfcheck_names_what_differs(
    factor: float, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = off(kernel_models.gradients, 16, factor)  # dbeta
    kernels = kernel_models.BACKWARD._replace(gradients=wrong)
    monkeypatch.setattr(chunk, "build_backward", lambda plan: kernels)
    agrees, detail = agreement.compare("backward", PLAN, torch.device("cpu"))
    assert not agrees and detail.startswith("beta of B2-T500-H2-HV4-bfloat16")


# Kernels in a child process.


def test_flashqla_selfcheck_accepts_a_right_kernel_once(
    children: Children,
    tmp_path: Path,
    another_process: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    children.drive("right")
    assert decided() is None and decided() is None
    name = "forward new bfloat16 float32 float32 cuda:-1"
    said = fla_flashqla.dispatch_report()["self_check"][name]
    assert said.startswith("the self-check of forward new bfloat16 passed: errors up to 0.")
    assert said.endswith(" s") and "; it took " in said and said in caplog.text
    (file,) = kept(tmp_path)
    record = json.loads(file.read_text())
    assert record["agrees"] and record["facts"]["gpu"] == GPU.name
    another_process()
    children.does("sys.exit(1)")
    assert decided() is None and children.started == 0
    said = fla_flashqla.dispatch_report()["self_check"][name]
    assert said.endswith("; known from an earlier process")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("wrong", "failed: o of B2-T500-H2-HV4-bfloat16"),
        ("failing", "failed: RuntimeError: CUDA error: an illegal memory access was encountered ("),
        ("crashing", "failed: killed by signal 6"),
        ("hanging", "failed: no answer within 3 s"),
    ],
)
def test_flashqla_selfcheck_refuses_a_broken_kernel(
    kind: str,
    reason: str,
    children: Children,
    tmp_path: Path,
    another_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In other processes, too, until its file is deleted, which the reason names."""
    children.drive(kind)
    if kind == "hanging":  # after its start, which takes a while
        monkeypatch.setattr(selfcheck, "LIMIT_S", 3)
        children.hangs(selfcheck.BUILT)
    refused = decided()
    assert refused is not None
    assert refused.startswith(f"the self-check of forward new bfloat16 {reason}")
    (file,) = kept(tmp_path)
    assert f"(kept in {file}: delete it to try again)" in refused
    another_process()
    children.says(AGREES)
    assert decided() == refused and children.started == 0
    file.unlink()
    another_process()
    assert decided() is None and children.started == 1


def test_flashqla_selfcheck_without_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real child; what it says about this GPU holds for this process alone."""
    pytest.importorskip("tilelang")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(arch, "identity", lambda index: GPU)
    monkeypatch.setattr(agreement, "build", lambda *_: None)  # which the child does not come to
    monkeypatch.setattr(selfcheck, "_found", {})
    monkeypatch.setenv("FLA_FLASH_QLA_SELFCHECK", "force")
    refused = selfcheck.refusal("forward", PLAN, 0)
    assert refused == (
        "the self-check of forward new bfloat16 could not be made: "
        "RuntimeError: no A new GPU with UUID GPU-0 is visible"
    )
    assert kept(tmp_path) == []


def test_flashqla_selfcheck_that_has_launched_nothing(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that hangs or crashes says nothing of the kernels."""
    monkeypatch.setattr(selfcheck, "LIMIT_S", 1)
    children.hangs("importing")
    refused = decided()
    assert refused is not None and "could not be made: no answer within 1 s" in refused
    assert kept(tmp_path) == []
    for said, lasting in (([selfcheck.BUILT, "{"], True), (["{"], False)):
        for code in (-6, -11):
            assert selfcheck._judged(code, said, "").lasting is lasting
        assert not selfcheck._judged(-9, said, "").lasting


@pytest.mark.parametrize("error", ["no nvcc", "CUDA_ERROR_OUT_OF_MEMORY: out of memory"])
def test_flashqla_selfcheck_errors_that_are_not_the_kernels(
    error: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first while compilers run, the second while the driver loads what they made."""

    def fails(*_: Any) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(selfcheck, "_device", lambda gpu: torch.device("cpu"))
    monkeypatch.setattr(agreement, "build", fails if error == "no nvcc" else lambda *_: None)
    monkeypatch.setattr(agreement, "compare", fails)
    for name in ("alarm", "setrlimit", "dup2"):
        owner = {"alarm": signal, "setrlimit": resource}.get(name, os)
        monkeypatch.setattr(owner, name, lambda *_: None)
    selfcheck.main("forward", json.dumps(PLAN.compiled), json.dumps(GPU), "9")
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert not told["agrees"] and not told["lasting"] and error in told["detail"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('garbage')", "exit code 0"),
        ("print('{}'); sys.stdout.buffer.write(bytes([200]))", "exit code 0"),
        (f"print({AGREES.replace('true', '1')!r})", "exit code 0"),
        ("sys.exit('no torch')", "exit code 1; no torch"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
        ('print(\'{"agrees": false, "detail": "full", "lasting": false}\')', "full"),
        (f"print({AGREES!r}); sys.exit(3)", "exit code 3"),
    ],
)
def test_flashqla_selfcheck_that_says_nothing_of_the_kernels(
    code: str, reason: str, children: Children, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    """Refused, and tried again by the next process."""
    children.does(code)
    want = f"the self-check of forward new bfloat16 could not be made: {reason}"
    assert decided() == decided() == want and children.started == 1
    assert kept(tmp_path) == []
    another_process()
    children.says(AGREES)
    assert decided() is None


def test_flashqla_selfcheck_child_cannot_be_started(children: Children, tmp_path: Path) -> None:
    children.command = [str(tmp_path / "nothing")]
    refused = decided()
    assert refused is not None and "could not be made: FileNotFoundError" in refused
    assert "it took 0.0 s" in str(fla_flashqla.dispatch_report()["self_check"])


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("step", agreement.FORMS)
def test_flashqla_selfcheck_on_gpu(
    step: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are known to be right pass, though nothing is known of them."""
    monkeypatch.setattr(selfcheck, "FOLDER", str(tmp_path))
    monkeypatch.setattr(selfcheck, "_found", {})
    monkeypatch.setenv("FLA_FLASH_QLA_SELFCHECK", "force")
    plan = Plan(gpu_helpers.ARCH, dtype, "float32", "float32")
    assert selfcheck.refusal(step, plan, 0) is None
    print(fla_flashqla.dispatch_report()["self_check"])
    assert len([*tmp_path.iterdir()]) == 1


# The file.


def test_flashqla_selfcheck_file_that_is_not_ours(
    children: Children, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    decided()
    (file,) = kept(tmp_path)
    right = json.loads(file.read_text())
    facts = {**right, "facts": {**right["facts"], "driver": "another"}}
    contents = ["", "{", "[]", "null", '{"agrees": true}', *map(json.dumps, (facts,))]
    contents += [json.dumps({**right, "agrees": "yes"}), json.dumps({**right, "detail": None})]
    for number, content in enumerate(contents, 2):
        file.write_text(content)
        another_process()
        assert decided() is None and children.started == number, content
        assert json.loads(file.read_text())["agrees"] is True
    file.write_bytes(b"\xff\xfe")
    another_process()
    assert decided() is None and children.started == len(contents) + 2


@pytest.mark.parametrize("line", [AGREES, DIFFERS])
def test_flashqla_selfcheck_folder_that_cannot_be_written(
    line: str, children: Children, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    """A file in its place, which stops root, too: each process checks for itself."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / selfcheck.FOLDER).write_text("")
    children.says(line)
    for number in (1, 2):
        refused = decided()
        assert decided() == refused and children.started == number
        assert (refused is None) == (line == AGREES)
        assert refused is None or refused.endswith("failed: o is off")
        another_process()


def test_flashqla_selfcheck_again_after_a_change(
    children: Children,
    tmp_path: Path,
    another_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children.says(DIFFERS)
    assert decided() is not None
    children.says(AGREES)
    changes = [
        (selfcheck, "__version__", "0.0.0"),
        (selfcheck, "_driver", lambda: "another"),
        (arch, "identity", lambda index: arch.Identity("Another GPU", "GPU-0")),
        (torch, "__version__", "0.0.0"),
        (torch.version, "cuda", "0.0"),
        (selfcheck.importlib.metadata, "version", lambda name: "0.0.0"),
    ]
    for number, change in enumerate(changes, 2):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            another_process()
            assert decided() is None and children.started == number, change[1]
            assert len(kept(tmp_path)) == number
    another_process()
    assert decided() is not None


def test_flashqla_selfcheck_of_each_kernel(children: Children, tmp_path: Path) -> None:
    """Dtypes and steps are checked apart, lengths and heads are not."""
    for fields in ({}, {"T": 200}, {"H": 1}, {"dtype": "float16"}, {"beta_dtype": "bfloat16"}):
        assert decided(**fields) is None
    assert children.started == 3
    inputs = call(T=64)
    inputs["q"].requires_grad_()
    api.decide((), inputs)
    assert children.started == 4
    assert {Path(f).suffix for f in kept(tmp_path)} == {".json"} and len(kept(tmp_path)) == 4


def test_flashqla_selfcheck_once_for_processes_that_start_together(
    children: Children, tmp_path: Path
) -> None:
    children.does(f"import time; time.sleep(0.5); print({AGREES!r})")
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if selfcheck.refusal("forward", PLAN, 0) is None else 1)
            finally:
                os._exit(2)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * 4 and children.started == 1 and len(kept(tmp_path)) == 1


# Where it is not made.


def test_flashqla_selfcheck_not_while_a_graph_is_captured(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(api, "capturing", lambda: True)
        refused = decided()
        assert refused is not None and "captured" in refused and children.started == 0
    assert decided() is None and children.started == 1


def test_flashqla_selfcheck_not_in_a_forked_process(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CUDA does not work; the parent goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        refused = decided()
        assert refused == "CUDA cannot be used in a process forked after its first use"
    assert children.started == 0 and decided() is None


@pytest.mark.parametrize(
    ("proven", "mode", "count"),
    [(True, "auto", 0), (True, "force", 1), (True, "off", 0), (False, "off", 0), (False, "x", 1)],
)
def test_flashqla_selfcheck_switch(
    proven: bool,
    mode: str,
    count: int,
    children: Children,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(arch.ARCHS, SM, replace(NEW, proven=proven))
    monkeypatch.setenv("FLA_FLASH_QLA_SELFCHECK", mode)
    assert decided() is None and children.started == len(kept(tmp_path)) == count
    assert len(fla_flashqla.dispatch_report()["self_check"]) == count


def test_flashqla_selfcheck_of_hopper_is_not_needed() -> None:
    assert arch.proven("sm90") and not arch.proven("sm90-mma")
    assert all(not row.proven or row.supported for row in arch.ARCHS.values())


def test_flashqla_selfcheck_after_the_first_run_costs_nothing(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = call()
    decision = api.decide((), inputs)
    api.run(decision, (), inputs)
    monkeypatch.setattr(selfcheck, "refusal", None)
    assert api.decide((), inputs) == decision


def test_flashqla_selfcheck_of_segments_leaves_sequences_whole(children: Children) -> None:
    children.does(f"print({AGREES!r} if sys.argv[1] == 'forward' else {DIFFERS!r})")
    inputs = call(T=8192, H=1, HV=1)
    decision = api.decide((), inputs)
    assert isinstance(decision, Plan) and decision.segment == 0 and children.started == 2
    inputs["q"].requires_grad_()
    decision = api.decide((), inputs)
    assert isinstance(decision, Refusal) and "self-check of backward new" in decision.reason


@pytest.fixture(autouse=True)
def no_notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fla_flashqla.report, "_self_checks", {})
    yield
