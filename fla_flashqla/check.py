# SPDX-License-Identifier: MIT
"""What `fla-flashqla check` finds out about this machine, as one JSON-able record.

Every probe is guarded: what fails becomes a sentence in `problems`, when something that could work
on this machine does not, or else in `notes`. TileLang and FLA load in child processes only.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fla_flashqla import __version__, env
from fla_flashqla._probe import describe_error

SCHEMA = 1
DISTRIBUTIONS = (
    "torch",
    "triton",
    "tilelang",
    "apache-tvm-ffi",
    "fla-core",
    "flash-linear-attention",
    "flash-qla",
)
HYPOTHETICAL_SM, HYPOTHETICAL_SMS = (9, 0), 132  # what calls are planned for where there is no GPU
PROBE_TIMEOUT_S = 900  # the first call of a process may compile kernels
COMPILER_TIMEOUT_S = 120

Record = dict[str, Any]
Progress = Callable[[str], None]


def run(progress: Progress) -> Record:
    """All probes, each announced by a call of `progress`; the record's `ok` is the verdict."""
    problems: list[str] = []
    notes: list[str] = []
    progress("versions")
    record: Record = {"schema": SCHEMA, "version": __version__, "versions": _versions()}
    record["environment"] = _environment()
    progress("GPU")
    record["gpu"] = gpu = _gpu()
    fits = bool(gpu["supported"])
    if gpu["note"]:
        # With a driver there is a GPU, so a PyTorch that sees none is at fault unless it was told.
        blind = gpu["driver"] and not gpu["count"] and "CUDA_VISIBLE_DEVICES" not in os.environ
        (problems if blind else notes).append(gpu["note"])
    notes.extend(_untried(gpu, record["versions"]))
    progress("TileLang and nvcc")
    record["compiler"] = compiler = _compiler()
    if compiler["error"]:
        # Without a GPU of ours nothing would be compiled.
        (problems if fits else notes).append(compiler["error"])
    progress("typical calls")
    record["calls"] = _calls(gpu, compiler["error"] if fits else None, problems)
    device = f"cuda:{gpu['index']}" if fits else "cpu"
    record["reach"], record["correctness"] = _through_fla(device, progress, problems, notes)
    record |= {"ok": not problems, "problems": problems, "notes": notes}
    return record


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except Exception:
            found[name] = None
    return found


def _environment() -> dict[str, str]:
    """Our variables and FLA's and PyTorch's switches, as far as they are set."""
    ours = [variable.name for variable in env.VARIABLES]
    names = [*ours, "FLA_DISABLE_BACKEND_DISPATCH", "TORCH_DEVICE_BACKEND_AUTOLOAD"]
    return {name: os.environ[name] for name in names if name in os.environ}


def _gpu() -> Record:
    """The first GPU that has kernels of ours, else the first there is."""
    found: Record = {
        "count": 0,
        "index": None,
        "name": None,
        "sm": None,
        "sms": 0,  # multiprocessors
        "supported": False,
        "status": None,  # what is known of our kernels there
        "proven": False,  # whether they ever ran on one of these
        "measured": False,  # and were timed beside flash_qla
        "cuda": None,  # what this PyTorch was built for
        "driver": _driver(),
        "note": None,
    }
    try:
        import torch

        from fla_flashqla import arch

        found["cuda"] = torch.version.cuda
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        if not available:
            said = [str(w.message).splitlines()[0] for w in caught]
            why = "PyTorch finds none" if found["cuda"] else "this PyTorch is a build without CUDA"
            found["note"] = "; ".join(["no GPU is used: " + why, *said])
            return found
        found["count"] = torch.cuda.device_count()
        facts = [arch.device_facts(torch.device("cuda", i)) for i in range(found["count"])]
        rows = [None if f.is_hip or f.sm is None else arch.ARCHS.get(f.sm) for f in facts]
        ours = [i for i, row in enumerate(rows) if row is not None and row.supported]
        index = ours[0] if ours else 0
        sm = facts[index].sm
        found |= {
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "sm": list(sm) if sm else None,
            "sms": facts[index].sms,
            "supported": bool(ours),
        }
        if ours:
            row = arch.ARCHS[sm].in_form(env.form())  # type: ignore[index]
            found |= {"status": row.status, "proven": row.proven, "measured": row.measured}
        if not found["supported"]:
            found["note"] = "no kernel of ours runs on this GPU: FLA's own path answers CUDA calls"
    except Exception as error:
        found["note"] = f"the GPU could not be examined: {describe_error(error)}"
    return found


def _untried(gpu: Record, versions: dict[str, str | None]) -> Iterator[str]:
    """What is different on a GPU that we never had."""
    if not gpu["supported"]:
        return
    if not gpu["proven"] and env.self_check() != "off":
        yield f"our kernels: {gpu['status']}; each must pass a self-check on first use"
    elif not gpu["proven"]:
        yield f"our kernels: {gpu['status']}; {env.SELF_CHECK.name}=off trusts them"
    prefer = env.prefer()
    preferred = prefer == "flash_qla" or (prefer, gpu["measured"]) == ("auto", False)
    if versions["flash-qla"] and preferred and not env.strict():
        yield "flash_qla answers the calls that it takes; what follows is about ours, as with FLA_FLASH_QLA_PREFER=ours"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0]
    except Exception:
        return None


# `python -c` puts the current folder first on the path, where it might hide installed packages.
_COMPILER_PROBE = """
import os, sys
sys.path[:] = [p for p in sys.path if p]
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
import tilelang
print("loaded", file=out, flush=True)
from tilelang.contrib import nvcc
print(nvcc.find_cuda_path(), file=out)
"""


def _compiler() -> Record:
    """Whether TileLang loads, and the nvcc that it would use."""
    found: Record = {"tilelang_loads": False, "cuda_home": None, "nvcc": None, "error": None}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COMPILER_PROBE],
            capture_output=True,
            text=True,
            timeout=COMPILER_TIMEOUT_S,
        )
        lines = done.stdout.splitlines()
        found["tilelang_loads"] = bool(lines)
        if not lines:
            found["error"] = f"TileLang does not load: {_ending(done.returncode, done.stderr)}"
        elif len(lines) == 1:
            found["error"] = f"TileLang finds no CUDA: {_ending(done.returncode, done.stderr)}"
        else:
            found["cuda_home"] = lines[1]
            found["nvcc"] = _nvcc_version(lines[1])
    except subprocess.TimeoutExpired:
        found["error"] = f"TileLang did not load within {COMPILER_TIMEOUT_S} s"
    except OSError as error:
        found["error"] = f"nvcc does not run: {describe_error(error)}"
    except Exception as error:
        found["error"] = f"the compiler could not be examined: {describe_error(error)}"
    return found


def _nvcc_version(cuda_home: str) -> str:
    nvcc = Path(cuda_home) / "bin" / "nvcc"
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    release = re.search(r"release ([\d.]+)", done.stdout)
    if done.returncode or not release:
        raise RuntimeError(f"{nvcc} --version: {_ending(done.returncode, done.stderr)}")
    return release[1]


def _ending(code: int, stderr: str) -> str:
    """How a child process ended, with the last line that it left."""
    how = f"exit code {code}"
    if code < 0:
        try:
            how = f"killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"killed by signal {-code}"
    lines = stderr.strip().splitlines()
    return lines[-1].strip() if lines and code > 0 else "; ".join([how, *lines[-1:]])


def _typical_calls() -> Iterator[tuple[str, Record]]:
    """Calls that users make, on tensors without memory."""
    import torch

    def call(
        H: int,
        HV: int,
        K: int = 128,
        V: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        lens: int | None = None,
        grad: bool = False,
        **flags: Any,
    ) -> Record:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, device="meta", dtype=dtype)

        tensors = {
            "q": empty(1, 8192, H, K).requires_grad_(grad),
            "k": empty(1, 8192, H, K),
            "v": empty(1, 8192, HV, V),
            "g": empty(1, 8192, HV, dtype=torch.float32),
            "beta": empty(1, 8192, HV),
        }
        if lens is not None:
            tensors["cu_seqlens"] = empty(lens + 1, dtype=torch.int32)
        for name in ("A_log", "dt_bias") if flags.get("use_gate_in_kernel") else ():
            tensors[name] = empty(HV, dtype=torch.float32)
        return tensors | flags

    prefill: Record = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    layer: Record = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    }
    yield "Qwen3-Next prefill (16:32, 4 sequences)", call(16, 32, lens=4, **prefill)
    yield "a tensor-parallel rank (2:8, float16)", call(2, 8, dtype=torch.float16, **prefill)
    yield "training step (16:32)", call(16, 32, grad=True, use_qk_l2norm_in_kernel=True)
    yield "FLA's GatedDeltaNet layer (6:6)", call(6, 6, **layer)
    yield "FLA's default head sizes (6:6, K=256, V=512)", call(6, 6, 256, 512, **prefill)
    yield "float32 inputs (16:32)", call(16, 32, dtype=torch.float32, **prefill)


def _calls(gpu: Record, obstacle: str | None, problems: list[str]) -> Record:
    """The planner's answers for typical calls on this machine's GPU, or else on one of ours."""
    if not env.enabled():
        obstacle = _switched_off()
    sm, sms = tuple(gpu["sm"] or HYPOTHETICAL_SM), gpu["sms"] or HYPOTHETICAL_SMS
    found: Record = {"sm": list(sm), "hypothetical": gpu["sm"] is None, "rows": []}
    try:
        from fla_flashqla.call import describe
        from fla_flashqla.plan import Refusal, plan

        for name, arguments in _typical_calls():
            call = describe(**arguments)
            call = call._replace(sm=sm, sms=sms, form=env.form())
            answer = plan(call._replace(device_type="cuda", device_index=0))
            reason = answer.reason if isinstance(answer, Refusal) else obstacle
            path = "ours" if reason is None else "FLA"
            found["rows"].append({"name": name, "path": path, "reason": reason or str(answer)})
    except Exception as error:
        problems.append(f"the planner failed: {describe_error(error)}")
    return found


def _through_fla(
    device: str, progress: Progress, problems: list[str], notes: list[str]
) -> tuple[Record, Record]:
    """Proof of reach, and the comparison with float64, both through FLA's operator."""
    reach: Record = {
        "device": device,
        "loaded_by": None,  # "import torch" | "import fla_flashqla"
        "answered": "none",  # "kernels" | "reference" | "refused" | "none"
        "detail": None,
        "mechanism": None,
        "error": None,
        "file": None,
    }
    correctness: Record = {"device": device, "cases": []}
    try:
        for event in _probe_events(device, progress):
            kind = event.pop("event")
            if kind == "reach":
                reach |= event
                problems.extend(_reach_problems(reach))
            elif kind == "case":
                correctness["cases"].append(event)
                if not event["ok"]:
                    problems.append(_case_problem(event))
            elif kind == "warning":
                notes.append(event["text"])
            elif kind == "done" and not event["error"]:  # those that failed have warned
                notes.extend(text for text in event["self_checks"] if text not in notes)
            elif event.get("error"):
                problems.append(f"{_FAILED[kind]}: {event['error']}")
    except Exception as error:
        problems.append(str(error) or describe_error(error))
    here = Path(__file__).resolve().parent
    if reach["file"] and Path(reach["file"]).resolve().parent != here:
        notes.append(f"two copies are in use: this command's in {here}, and {reach['file']}")
    return reach, correctness


_FAILED = {
    "torch": "PyTorch does not import",
    "fla": "flash-linear-attention (fla-core) does not import",
    "done": "the comparison with float64 could not start",
}


def _probe_events(device: str, progress: Progress) -> Iterator[Record]:
    """Run `_probe.py` and yield what it reports; raises with one sentence if it ended early."""
    package = Path(__file__).resolve().parent
    command = [sys.executable, str(package / "_probe.py"), device, str(package.parent)]
    stage, finished, event = "PyTorch was imported", False, {}
    progress("importing PyTorch")
    with tempfile.TemporaryFile("w+") as stderr:
        variables = {**os.environ, env.PREFER.name: "ours"}
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables
        )
        timer = threading.Timer(PROBE_TIMEOUT_S, child.kill)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                event = json.loads(line)
                if event["event"] != "warning":
                    finished = event["event"] in ("reach", "done") or bool(event.get("error"))
                if event["event"] == "torch":
                    stage = "FLA was imported"
                    progress("importing FLA")
                elif event["event"] == "fla":
                    stage = "FLA's operator was called"
                    compiles = "" if device == "cpu" else " (the first call compiles kernels)"
                    progress(f"calling FLA's operator on {device}{compiles}")
                elif event["event"] == "start":
                    stage = f"{event['name']} was compared"
                    progress(f"comparing with float64: {event['name']}")
                if event["event"] != "start":
                    yield event
            code = child.wait()
        finally:
            expired = not timer.is_alive()
            timer.cancel()
            child.kill()
            child.wait()
        stderr.seek(0)
        text = stderr.read()
    if expired:
        raise RuntimeError(f"gave up after {PROBE_TIMEOUT_S} s while {stage}")
    if code or not finished:
        raise RuntimeError(f"the process ended while {stage}: {_ending(code, text)}")


def _reach_problems(reach: Record) -> Iterator[str]:
    """Why FLA's operator did not come to us, or came and went without an answer."""
    error = reach["error"]
    if reach["answered"] == "refused":
        yield f"FLA reached this package, which did not answer: {reach['detail']}"
    elif reach["answered"] == "none":
        why = f"the call ended with {error}" if error else "FLA answered without asking"
        if not env.enabled():
            why = _switched_off()
        if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
            why = "FLA_DISABLE_BACKEND_DISPATCH switches all dispatching off"
        yield f"FLA's operator does not reach this package: {why}"
    elif error:
        yield f"the call through FLA's operator failed: {error}"
    if reach["loaded_by"] != "import torch" and reach["answered"] != "none":
        yield f"FLA reaches this package only after `import fla_flashqla`: {_why_not_loaded()}"


def _switched_off() -> str:
    return f"{env.SWITCH.name}={os.environ[env.SWITCH.name]} switches it off"


def _why_not_loaded() -> str:
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if autoload != "1":
        return f"TORCH_DEVICE_BACKEND_AUTOLOAD={autoload} stops PyTorch from loading it"
    try:
        names = {point.name for point in importlib.metadata.entry_points(group="torch.backends")}
    except Exception:
        names = set()
    if "fla_flashqla" not in names:
        return "it is not installed (run `pip install .`), only found on the path"
    return "PyTorch did not load its entry point"


def _case_problem(case: Record) -> str:
    if case["error"]:
        return f"{case['name']} failed: {case['error']}"
    kinds = (("relative_errors", "bound"), ("gradient_errors", "gradient_bound"))
    found = "; ".join(
        f"{', '.join(f'{name} {x:.1e}' for name, x in case[errors].items())} (at most {case[bound]:.1e})"
        for errors, bound in kinds
    )
    detail = f" ({case['detail']})" if case["detail"] else ""
    return f"{case['name']}: {found}; by {case['answered']}{detail}"
