# SPDX-License-Identifier: MIT
"""Importing is free and harmless, hooks never raise, and modules depend on each other one way."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_processes import assert_passed, checks_of, environment, finish, start

import fla_flashqla
from fla_flashqla import env

PACKAGE = Path(fla_flashqla.__file__).resolve().parent
MODULES = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in PACKAGE.rglob("*.py")}
# Each imports only from what is left of it.
LAYERS = (
    ("env",),
    ("_autoload", "arch", "report", "layout"),
    ("call",),
    ("plan", "reference"),
    ("kernels", "testing"),
    ("segments", "l2norm"),
    ("chunk",),
    ("autograd",),
    ("agreement",),
    ("selfcheck",),
    ("api", "compat"),
    ("backend", "low_level", "op"),
    ("__init__",),
)


def python(code: str, **variables: str) -> str:
    command = [sys.executable, "-c", code]
    child = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@functools.cache
def hooks(folder: Path) -> dict[str, str]:
    return finish(start("hooks_driver.py", str(folder), env=environment()))


@pytest.mark.parametrize("check", checks_of("hooks_driver.py"))
def test_flashqla_hooks(check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "fla_flashqla_hooks"
    folder.mkdir(exist_ok=True)
    assert_passed(hooks(folder), check)


def test_flashqla_import_loads_nothing() -> None:
    code = """
import sys, fla_flashqla
assert fla_flashqla.__version__ and set(fla_flashqla.__all__) <= set(dir(fla_flashqla))
print(*{name.split(".")[0] for name in sys.modules} & {"torch", "fla", "tilelang", "triton", "tvm"})
"""
    assert python(code).split() == []


def test_flashqla_import_leaves_the_gpu_alone() -> None:
    code = f"""
import importlib, sys, torch, fla_flashqla
for name in {[name for layer in LAYERS for name in layer]}:
    importlib.import_module("fla_flashqla." + name)
for name in fla_flashqla.__all__:
    getattr(fla_flashqla, name)
assert not torch.cuda.is_initialized()
print(*{{name.split(".")[0] for name in sys.modules}} & {{"fla", "tilelang", "tvm"}})
"""
    assert python(code).split() == []


def test_flashqla_import_takes_less_than_a_millisecond(tmp_path: Path) -> None:
    """What `import torch` pays, which has loaded the standard modules that we use."""
    code = """
import importlib.metadata, logging, sys, time, typing
try:
    import no_such_module_to_fill_the_caches_of_the_path
except ImportError:
    pass
start = time.perf_counter()
from fla_flashqla._autoload import autoload
autoload()
print(time.perf_counter() - start)
"""
    seconds = [
        float(python(code, PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE=""))
        for _ in range(6)
    ]
    assert min(seconds[1:]) < 1e-3, seconds


def test_flashqla_import_of_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fla_flashqla.nothing  # noqa: B018


def imports(source: str) -> set[str]:
    """Our modules that a source imports when it is loaded or later, type checking aside."""
    found = set()
    skipped = {
        child
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in (ast.unparse(n) for n in node.body)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and ast.unparse(node) not in skipped:
            module = node.module or ""
            if node.level or module.split(".")[0] == "fla_flashqla":
                rest = module if node.level else module.removeprefix("fla_flashqla").lstrip(".")
                found |= {rest.split(".")[0]} if rest else {alias.name for alias in node.names}
    return found


def test_flashqla_modules_import_one_way() -> None:
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for file, source in MODULES.items():
        name = file.removesuffix(".py").split("/")[0]
        # The hook and the lazy names are strings or run long after the import.
        if name in rank and name not in ("_autoload", "__init__", "kernels"):
            for other in imports(source) - {"__init__"}:
                assert rank.get(other, -1) < rank[name], f"{name} imports {other}"


def test_flashqla_tilelang_only_in_kernels() -> None:
    for file, source in MODULES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not file.startswith("kernels/"):
                assert "tilelang" not in ast.unparse(node), file


def test_flashqla_variables_are_in_one_place() -> None:
    known = {variable.name for variable in env.VARIABLES}
    for file, source in MODULES.items():
        ours = set(re.findall(r"FLA_FLASH_QLA\w*", source))
        assert ours <= known, file
    assert env.SWITCH in env.VARIABLES and len(known) == len(env.VARIABLES)


def test_flashqla_variables_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {None: (True, False), "0": (False, False), "1": (True, True), "": (True, False)}
    for value, answers in expected.items():
        for variable in env.VARIABLES[:2]:
            if value is None:
                monkeypatch.delenv(variable.name, raising=False)
            else:
                monkeypatch.setenv(variable.name, value)
        assert (env.enabled(), env.strict()) == answers


@pytest.mark.parametrize("file", sorted(MODULES))
def test_flashqla_file_form(file: str) -> None:
    lines = MODULES[file].splitlines()
    assert lines[0] == "# SPDX-License-Identifier: MIT" and len(lines) <= 500
