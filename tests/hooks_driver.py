# SPDX-License-Identifier: MIT
"""Run by test_flashqla_import.py: hooks on made-up FLA packages, which need neither Triton nor a GPU.

python hooks_driver.py FOLDER
"""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
import types
from pathlib import Path

from child_processes import run_checks

import fla_flashqla
from fla_flashqla import _autoload

assert "torch" not in sys.modules and "logging" in sys.modules
ROOT = Path(sys.argv[1])
sys.path.insert(0, str(ROOT))
MODULE = "fla.ops.gated_delta_rule.chunk"
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("fla_flashqla").addHandler(handler)
logging.getLogger("fla_flashqla").propagate = False

ARGUMENTS = (
    "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs"
)
DISPATCH = """
import functools
class BaseBackend: pass
class BackendRegistry:
    _registries = {}
def dispatch(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
"""


def make_fla(arguments=ARGUMENTS, before="", name="chunk_gated_delta_rule", after="", **files):
    """Write an FLA whose operator has these arguments and that is not imported yet."""
    for module in [n for n in sys.modules if n.split(".")[0] == "fla"]:
        del sys.modules[module]
    records.clear()
    folder = ROOT / "fla" / "ops" / "gated_delta_rule"
    folder.mkdir(parents=True, exist_ok=True)
    source = f"{before}\ndef {name}({arguments}):\n    return 'FLA', None\n{after}\n"
    files = {"chunk": source, "__init__": f"from .chunk import {name}\n", **files}
    for file, text in files.items():
        (folder / f"{file}.py").write_text(text)
    (ROOT / "fla" / "backends.py").write_text(DISPATCH)
    for package in (ROOT / "fla", ROOT / "fla" / "ops"):
        (package / "__init__.py").touch()
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True  # a rewritten file may have the time stamp of the old one


def warnings_said():
    return [r.getMessage() for r in records if r.levelno >= logging.WARNING]


def assert_stood_down(*words):
    chunk = sys.modules[MODULE]
    operator = chunk.chunk_gated_delta_rule
    assert not hasattr(operator, "__wrapped__") and operator(1) == ("FLA", None)
    assert len(warnings_said()) == 1, warnings_said()
    reach = fla_flashqla.dispatch_report()["reach"]
    for word in ("not reached", *words):
        assert word in reach and (word in warnings_said()[0] or word == "not reached"), reach


def check_fitting_fla_gets_a_dispatch_point():
    make_fla()
    package = importlib.import_module("fla.ops.gated_delta_rule")
    chunk = sys.modules[MODULE]
    assert chunk.__spec__.loader.get_source(MODULE) == (Path(chunk.__file__)).read_text()
    assert package.chunk_gated_delta_rule is chunk.chunk_gated_delta_rule
    assert pickle.loads(pickle.dumps(chunk.chunk_gated_delta_rule)) is chunk.chunk_gated_delta_rule
    assert "dispatch point" in fla_flashqla.dispatch_report()["reach"] and not records
    import torch

    x = torch.zeros(1, 4, 1, 16)
    assert package.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 0])[0].shape == x.shape
    assert fla_flashqla.dispatch_report()["reference"] == 1


def check_reload_installs_again():
    chunk = importlib.reload(sys.modules[MODULE])
    assert chunk.chunk_gated_delta_rule.dispatches_to
    chunk.chunk_gated_delta_rule = lambda *args: None
    assert "replaced later" in fla_flashqla.dispatch_report()["reach"]


def check_an_argument_that_became_optional():
    make_fla(ARGUMENTS.replace("g, beta", "g=None, beta=None"))
    operator = importlib.import_module(MODULE).chunk_gated_delta_rule
    assert operator.dispatches_to and not records
    for _ in range(3):
        assert operator(1, 2, 3) == ("FLA", None)
    assert len(warnings_said()) == 1 and "'g'" in warnings_said()[0]


def check_interfaces_that_do_not_fit():
    for arguments, word in (
        ("q, *rest", "unnamed"),
        ("q, k=0, v=0, /, g=0, beta=0", "unnamed"),
        ("q, k=None, v=None, beta=None, **kwargs", "'g'"),
        ("q, k=0, v=0, g=0, beta=0, scale=1.0, **kwargs", "'scale'"),
    ):
        make_fla(arguments)
        importlib.import_module("fla.ops.gated_delta_rule")
        assert_stood_down(word)


def check_another_default_or_need():
    for arguments, word in (
        (ARGUMENTS.replace("scale=None", "scale=1.0"), "'scale'"),
        (ARGUMENTS.replace("beta,", "beta, length,"), "'length'"),
    ):
        make_fla(arguments)
        chunk = importlib.import_module(MODULE)
        assert not hasattr(chunk.chunk_gated_delta_rule, "dispatches_to")
        assert len(warnings_said()) == 1 and word in warnings_said()[0]
        assert word in fla_flashqla.dispatch_report()["reach"]


def check_no_operator():
    make_fla(name="another_operator")
    package = importlib.import_module("fla.ops.gated_delta_rule")
    assert package.another_operator and len(warnings_said()) == 1
    assert "has no chunk_gated_delta_rule" in fla_flashqla.dispatch_report()["reach"]


def check_registry_of_another_form():
    """Dispatched, but by a registry that we do not know: our dispatch point goes in front."""
    make_fla(before="from fla.backends import dispatch\n@dispatch")
    chunk = importlib.import_module(MODULE)
    assert chunk.chunk_gated_delta_rule.dispatches_to and not warnings_said()
    make_fla(
        before="from fla import backends\n@backends.dispatch",
        after="backends.BackendRegistry._registries['gated_delta_rule'] = object()",
    )
    chunk = importlib.import_module(MODULE)
    assert not hasattr(chunk.chunk_gated_delta_rule, "dispatches_to")
    assert len(warnings_said()) == 1 and "register" in warnings_said()[0]
    assert chunk.chunk_gated_delta_rule(*range(5)) == ("FLA", None)


def check_a_hook_that_fails():
    from fla_flashqla import backend

    make_fla()
    working, backend.register = backend.register, lambda: 1 / 0
    try:
        chunk = importlib.import_module(MODULE)
    finally:
        backend.register = working
    assert chunk.chunk_gated_delta_rule(*range(5)) == ("FLA", None)
    assert len(warnings_said()) == 1 and "ZeroDivisionError" in warnings_said()[0]


def check_a_package_that_cannot_be_imported():
    make_fla()
    working = sys.modules["fla_flashqla.backend"]
    broken = types.ModuleType("fla_flashqla.backend")
    sys.modules["fla_flashqla.backend"] = broken  # has no register
    kept, fla_flashqla.backend = fla_flashqla.backend, broken
    try:
        chunk = importlib.import_module(MODULE)
    finally:
        sys.modules["fla_flashqla.backend"], fla_flashqla.backend = working, kept
    assert chunk.chunk_gated_delta_rule(*range(5)) == ("FLA", None)
    assert len(warnings_said()) == 1


def check_flas_own_error_is_its_own():
    make_fla(before="raise RuntimeError('by FLA')")
    try:
        importlib.import_module(MODULE)
    except RuntimeError as error:
        assert str(error) == "by FLA"
    else:
        raise AssertionError
    assert not records and MODULE not in sys.modules


def check_a_loader_that_cannot_be_hooked():
    class Loader:
        __slots__ = ()

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            module.chunk_gated_delta_rule = lambda *args: ("FLA", None)

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == MODULE:
                return importlib.machinery.ModuleSpec(name, Loader())

    make_fla()
    sys.meta_path.insert(0, Finder())
    sys.meta_path.insert(0, sys.meta_path.pop(1))  # ours first
    try:
        chunk = importlib.import_module(MODULE)
    finally:
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, Finder)]
    assert chunk.chunk_gated_delta_rule(1) == ("FLA", None) and len(warnings_said()) == 1


def check_autoload_is_idempotent_and_silent():
    finders = list(sys.meta_path)
    for _ in range(3):
        _autoload.autoload()
    assert sys.meta_path == finders
    path, sys.meta_path = sys.meta_path, ()
    try:
        _autoload.autoload()
    finally:
        sys.meta_path = path
    assert "not registered" in warnings_said()[-1]


run_checks(globals())
