# SPDX-License-Identifier: MIT
"""Where nothing of ours ever ran, a small problem decides whether the kernels of a step may answer.

A child process runs them on the same GPU and compares with float64 (`agreement.py`), so that a kernel which crashes or hangs takes nothing else down. The
outcome is kept beside TileLang's compiled kernels, in a file named after all that it may depend on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import IO, NamedTuple

import torch

from fla_flashqla import __version__, arch, env, report
from fla_flashqla.plan import Plan
from fla_flashqla.report import logger

LIMIT_S = 300  # most of it for compilers: where TileLang keeps nothing, the child compiles again
BUILT = "kernels are built"  # what the child says before it launches any
FOLDER = "fla_flashqla-selfcheck"
# What a kernel does to its process; other signals come from elsewhere.
_FAULTS = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")

Facts = dict[str, str]


class Outcome(NamedTuple):
    agrees: bool
    detail: str
    # Whether it is about the kernels: a full GPU, for instance, says nothing about them, and other processes try again.
    lasting: bool = True
    seconds: float = 0.0


_found: dict[tuple[str, ...], str | None] = {}  # why not, by kernels and device


def refusal(step: str, plan: Plan, index: int) -> str | None:
    """Why the built kernels of a step may not answer on a device; the first time a child process finds out, for which this waits."""
    mode = env.self_check()
    if mode == "off" or (mode == "auto" and arch.proven(plan.arch)):
        return None
    key = *plan.key(step), f"cuda:{index}"
    if key not in _found:
        if torch.cuda._is_in_bad_fork():
            return "CUDA cannot be used in a process forked after its first use"
        _found[key] = _decide(step, plan, index, " ".join(key))
    return _found[key]


def _decide(step: str, plan: Plan, index: int, kernels: str) -> str | None:
    """Look for a file or start a child, and say so."""
    try:
        gpu = arch.identity(index)
        outcome, file = _outcome(step, plan, gpu, _facts(step, plan, gpu.name))
    except Exception as error:
        outcome, file = Outcome(False, _summary(error), lasting=False), None
    verdict = "passed" if outcome.agrees else "failed" if outcome.lasting else "could not be made"
    text = f"the self-check of {plan.path(step)} {verdict}: {outcome.detail}"
    if file is not None and not outcome.agrees:
        text += f" (kept in {file}: delete it to try again)"
    cost = "known from an earlier process"
    if file is None or outcome.seconds:
        cost = f"it took {outcome.seconds:.1f} s"
    report.self_checked(kernels, f"{text}; {cost}")
    logger.log(logging.INFO if outcome.agrees else logging.WARNING, "%s; %s", text, cost)
    return None if outcome.agrees else text


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def _outcome(
    step: str, plan: Plan, gpu: arch.Identity, facts: Facts
) -> tuple[Outcome, Path | None]:
    """And the file that it is kept in. Of processes that start together, one starts a child."""
    from fla_flashqla.kernels import first

    file = _file(facts)
    known = _read(file, facts)
    if known is None:
        with first(file.stem):
            known = _read(file, facts)
            if known is None:
                text = "checking %s on %s before its first use, which takes a while"
                logger.warning(text, plan.path(step), gpu.name)
                outcome = _child(step, plan, gpu)
                kept = outcome.lasting and _write(file, facts, outcome)
                return outcome, file if kept else None
    return known, file


def _facts(step: str, plan: Plan, gpu: str) -> Facts:
    """All that an outcome may depend on."""
    sources = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.rglob("*.py"), *here.rglob("*.cuh")]):
        sources.update(path.read_bytes())
    return {
        "kernels": " ".join(plan.key(step)),
        "gpu": gpu,
        "driver": _driver(),
        "version": __version__,
        "sources": sources.hexdigest(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **{name: _version(name) for name in ("tilelang", "apache-tvm-ffi")},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):  # then the CUDA version that it has must do
        return str(getattr(torch._C, "_cuda_getDriverVersion", lambda: None)())


def _file(facts: Facts) -> Path:
    from fla_flashqla.kernels import cache_folder

    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return Path(cache_folder()) / FOLDER / f"selfcheck-{name}.json"


def _read(file: Path, facts: Facts) -> Outcome | None:
    """What an earlier process found out; a file that is not as we write it counts for none."""
    try:
        kept = json.loads(file.read_text())
        outcome = Outcome(kept["agrees"], kept["detail"])
        right = kept["facts"] == facts and isinstance(outcome.agrees, bool)
        return outcome if right and isinstance(outcome.detail, str) else None
    except Exception:
        return None


def _write(file: Path, facts: Facts, outcome: Outcome) -> bool:
    """Whether the outcome could be kept."""
    new = file.with_suffix(f".{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps({**outcome._asdict(), "facts": facts}, indent=1))
        new.replace(file)
    except OSError as error:
        logger.info("every process checks for itself: %s", error)
        with contextlib.suppress(OSError):
            new.unlink()
        return False
    return True


# The child imports what we would, wherever we got it from, and nothing from the current folder before.
_START = "import sys; sys.path[:] = sys.argv.pop(1).split(chr(10)); from fla_flashqla import selfcheck; selfcheck.main(*sys.argv[1:])"


def _command(*args: str) -> list[str]:
    return [sys.executable, "-c", _START, "\n".join(map(str, sys.path)), *args]


def _child(step: str, plan: Plan, gpu: arch.Identity) -> Outcome:
    """Run the check in a process of its own."""
    from fla_flashqla import agreement  # nobody else needs it

    start = time.perf_counter()
    # Kernels are built side by side here, with no limit but a compiler's own; the child reads them.
    agreement.build(step, plan)
    # Files, since a pipe could be held open; a session, so that no compiler outlives the child.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            _command(step, json.dumps(plan.compiled), json.dumps(gpu), str(LIMIT_S)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(LIMIT_S)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)  # a driver that hangs does not let it go
        outcome = _judged(code, _lines(out), _lines(err)[-1])
    return outcome._replace(seconds=time.perf_counter() - start)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines() or [""]


def _judged(code: int | None, said: list[str], complaint: str) -> Outcome:
    """What the end of the child means: its exit code, `None` if it did not end, what it said and the last line of its errors.

    What happens before it launches a kernel says nothing about kernels.
    """
    launched = BUILT in said
    if code is None:
        return Outcome(False, f"no answer within {LIMIT_S} s", lasting=launched)
    with contextlib.suppress(Exception):
        found = json.loads(said[-1])
        outcome = Outcome(found["agrees"], found["detail"], found["lasting"])
        if code == 0 and (type(outcome.agrees), type(outcome.detail)) == (bool, str):
            return outcome
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    fault = any(-code == getattr(signal, name, None) for name in _FAULTS)
    return Outcome(False, f"{how}; {complaint}".strip("; "), lasting=launched and fault)


def main(step: str, compiled: str, gpu: str, limit_s: str) -> None:
    """In the child: check, and write the outcome as one line of JSON."""
    import resource

    from fla_flashqla import agreement

    signal.alarm(int(limit_s) + 30)  # whoever waits for us may have died
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash shall leave nothing behind
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    torch.set_num_threads(1)  # the problem is small, and others start on these cores
    launched = False
    try:
        device, plan = _device(arch.Identity(*json.loads(gpu))), Plan(*json.loads(compiled))
        agreement.build(step, plan)
        print(BUILT, file=out, flush=True)
        launched = True
        outcome = Outcome(*agreement.compare(step, plan, device))
    except Exception as error:
        full = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
        outcome = Outcome(False, _summary(error), lasting=launched and not full)
    print(json.dumps(outcome._asdict()), file=out, flush=True)


def _device(gpu: arch.Identity) -> torch.device:
    """The GPU that the parent means, and that a second process can use."""
    for index in range(torch.cuda.device_count()):
        if arch.identity(index) == gpu:
            device = torch.device("cuda", index)
            torch.zeros(1, device=device).item()
            return device
    raise RuntimeError(f"no {gpu.name} with UUID {gpu.uuid} is visible")
