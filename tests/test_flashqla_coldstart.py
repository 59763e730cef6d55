# SPDX-License-Identifier: MIT
"""Of processes that compile the same kernel at once, one compiles; without a lock, each does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from child_processes import HERE, environment

from fla_flashqla import chunk, kernels
from fla_flashqla.plan import Plan

LOCK = "fla_flashqla-locks/small-sm_90a.lock"


class Child:
    """A process of coldstart_driver.py, which has all imported and waits for `go`."""

    def __init__(self, cache: Path, then: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "coldstart_driver.py"), then],
            env=environment(TILELANG_CACHE_DIR=str(cache)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def children(count: int, cache: Path, then: str = "end") -> Iterator[list[Child]]:
    started = [Child(cache, then) for _ in range(count)]
    try:
        for child in started:
            assert child.says() == {"ready": True}
        yield started
    finally:
        for child in started:
            child.process.kill()
            child.process.communicate()


@pytest.fixture
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """An empty cache folder, also of this process, whose log is kept."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.DEBUG, "fla_flashqla")
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What TileLang is asked to compile from now on: that is all that happens to it."""
    import tilelang

    asked: list[Any] = []
    monkeypatch.setattr(tilelang, "compile", lambda function, **_: asked.append(function))
    return asked


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(level, text) for name, level, text in caplog.record_tuples if name == "fla_flashqla"]


@pytest.mark.compile
def test_flashqla_coldstart_compiles_once(tmp_path: Path) -> None:
    with children(3, tmp_path) as started:
        for child in started:
            child.go()
        said = [child.says() for child in started]
    assert max(s["start"] for s in said) < min(s["end"] for s in said)  # all found nothing
    assert sorted(s["compiled"] for s in said) == [0, 0, 1]
    assert len({s["source"] for s in said}) == 1 and "gdr_small" in said[0]["source"]
    assert [s["logged"] for s in said] == [[], [], []]
    assert (tmp_path / LOCK).parent.is_dir()


@pytest.mark.compile
def test_flashqla_coldstart_without_a_lock_folder(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in its place, which stops root, too."""
    from coldstart_driver import small_kernel

    (cache / LOCK).parent.write_text("")
    kernel = kernels.compile_kernel("small", small_kernel(3), {})
    assert "gdr_small" in kernel.get_kernel_source()
    ((level, text),) = logged(caplog)
    assert level == logging.INFO and text.startswith("no lock for small-sm_90a, ")
    assert "FileExistsError" in text and str((cache / LOCK).parent) in text


@pytest.mark.compile
@pytest.mark.parametrize("again", [False, True], ids=["compiled", "read"])
def test_flashqla_coldstart_launches_without_tilelangs_wrapper(cache: Path, again: bool) -> None:
    """What is called checks its arguments, without a GPU, and outlives all else that TileLang keeps."""
    from coldstart_driver import small_kernel
    from tilelang.cache import _dispatch_map as memories
    from tvm_ffi import Function

    source = "small", small_kernel(5), {}
    for _ in range(1 + again):
        (launch,) = kernels.compile_kernels([source])
        for memory in memories.values():
            memory._memory_cache.clear()
    gc.collect()
    assert type(launch) is Function
    for wrong in ((), (1, 2), (torch.zeros(127),), (torch.zeros(128),)):
        with pytest.raises(Exception, match="gdr_small|argument|device"):
            launch(*wrong)


def test_flashqla_coldstart_launches_by_the_wrapper_of_another_tilelang() -> None:
    kernel = object()
    assert kernels.launcher(kernel) is kernel


def test_flashqla_coldstart_without_locks(
    cache: Path,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a file system without them; filelock's own substitute, of which it warns, is not taken."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.compile_kernel("small", "function", {})
    assert calls == ["function"]
    ((level, text),) = logged(caplog)
    assert level == logging.INFO and "no locks here" in text


@pytest.mark.compile
def test_flashqla_coldstart_lock_that_stays_held(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from coldstart_driver import small_kernel

    monkeypatch.setattr(kernels, "LOCK_TIMEOUT_S", 0.2)
    (cache / LOCK).parent.mkdir()
    holder = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(); input()",
            str(cache / LOCK),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        kernel = kernels.compile_kernel("small", small_kernel(4), {})
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()
    assert "gdr_small" in kernel.get_kernel_source()
    ((level, text),) = logged(caplog)
    assert level == logging.WARNING and text.startswith("no lock for small-sm_90a, ")
    assert "Timeout" in text and str(cache / LOCK) in text


def test_flashqla_coldstart_killed_while_it_compiles(
    cache: Path,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernels, "LOCK_TIMEOUT_S", 60)
    with ThreadPoolExecutor(1) as pool, children(1, cache, "hang") as (child,):
        child.go()
        assert child.says() == {"hangs": True}
        waiting = pool.submit(kernels.compile_kernel, "small", "function", {})
        kernels.compile_kernel("another", "another function", {})
        assert not wait([waiting], timeout=0.5).done
        assert calls == ["another function"]
        child.process.kill()
        waiting.result()
    assert calls == ["another function", "function"] and logged(caplog) == []


def test_flashqla_coldstart_takes_no_turns_behind_the_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else all processes of a node would stand in a row to read a full cache."""
    import tilelang

    waiting, together = threading.Semaphore(0), threading.Barrier(2)

    class Lock(filelock.FileLock):
        def acquire(self, timeout: float) -> Any:
            if timeout:
                waiting.release()
            return super().acquire(timeout)

    monkeypatch.setattr(kernels, "LOCK_TIMEOUT_S", 60)
    monkeypatch.setattr(filelock, "FileLock", Lock)
    monkeypatch.setattr(tilelang, "compile", lambda *_, **__: together.wait(timeout=30))
    (cache / LOCK).parent.mkdir()
    with ThreadPoolExecutor(2) as pool:
        with filelock.UnixFileLock(str(cache / LOCK)):
            done = [pool.submit(kernels.compile_kernel, "small", "function", {}) for _ in range(2)]
            assert waiting.acquire(timeout=30) and waiting.acquire(timeout=30)
        assert sorted(future.result() for future in done) == [0, 1]
    assert logged(caplog) == []


def test_flashqla_coldstart_without_a_cache(
    cache: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited would have to compile all the same."""
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    kernels.compile_kernel("small", "function", {})
    assert calls == ["function"] and not (cache / LOCK).parent.exists()


@pytest.mark.parametrize(
    ("build", "kernels"),
    [("build", chunk.Kernels), ("build_backward", chunk.BackwardKernels)],
    ids=["forward", "backward"],
)
def test_flashqla_coldstart_kernels_of_a_plan_do_not_wait_for_each_other(
    build: str, kernels: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tilelang

    together = threading.Barrier(len(kernels._fields))

    def compile_with_the_others(function: Any, **_: Any) -> int:
        return together.wait(timeout=30)

    monkeypatch.setattr(tilelang, "compile", compile_with_the_others)
    monkeypatch.setattr(chunk, "_built", {})
    monkeypatch.setattr(chunk, "_built_backward", {})
    built = getattr(chunk, build)(Plan("sm90", "bfloat16", "float32", "float32"))
    assert sorted(built) == [*range(len(kernels._fields))]
