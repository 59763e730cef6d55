# SPDX-License-Identifier: MIT
"""Run by test_flashqla_reach.py in a process with one FLA release on its path.

    python reach_driver.py autoload|old_torch|late

`autoload` imports torch and FLA only; `late` imports all of FLA, binds names, and then
`fla_flashqla`; `old_torch` is `autoload` where `torch.compiler.disable` works as in torch 2.8.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import pickle
import signal
import sys
import threading
import types
import warnings
from dataclasses import replace
from unittest.mock import MagicMock

from child_processes import run_checks

warnings.simplefilter("ignore")
ORDER = sys.argv[1]
sys.modules["transformers"] = None  # FLA 0.5.1 and later import all their models where it is there

if ORDER == "late":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402

assert ("fla_flashqla" in sys.modules) == (ORDER != "late")
assert "fla_flashqla.backend" not in sys.modules and "fla" not in sys.modules


def skip_copied_marks(function):
    """How torch 2.8 finds what to disable: `functools.wraps` copies the mark that it follows."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


if ORDER == "old_torch":
    importlib.import_module("torch._dynamo.eval_frame").innermost_fn = skip_copied_marks
_inner = torch.compiler.disable(lambda: False)
# There FLA 0.5.2, which puts its dispatch between two `torch.compiler.disable`, dispatches nothing.
COPIES_ARE_OUTERMOST = torch.compiler.disable(functools.wraps(_inner)(lambda: True))()
assert COPIES_ARE_OUTERMOST or ORDER == "old_torch" or torch.__version__ < "2.9"


class Transformers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for a package that FLA's layers import and that no check calls."""

    class Module(types.ModuleType):
        __path__ = ()

        def __getattr__(self, name):
            if name == "__version__":
                return "5.7.0"
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {}) if name[0].isupper() and not name.isupper() else MagicMock()

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return self.Module(spec.name)

    def exec_module(self, module):
        pass


def import_layers():
    sys.modules.pop("transformers", None)
    sys.meta_path.append(Transformers())
    return importlib.import_module("fla.layers.gated_deltanet")


import fla.ops  # noqa: E402
import fla.ops.gated_delta_rule as package  # noqa: E402
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as bound_early  # noqa: E402

chunk = sys.modules["fla.ops.gated_delta_rule.chunk"]
layers = import_layers()
if ORDER == "late":
    unpatched = inspect.signature(bound_early), bound_early.__doc__
    assert "fla_flashqla" not in sys.modules

import fla_flashqla  # noqa: E402
from fla_flashqla import api, arch, reference  # noqa: E402
from fla_flashqla.plan import Plan, Refusal, plan  # noqa: E402

MARK = "answered by FLA", None
PARAMETERS = [
    p for p in inspect.signature(chunk.chunk_gated_delta_rule).parameters if p != "kwargs"
]
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("fla_flashqla").addHandler(handler)
logging.getLogger("fla_flashqla").propagate = False


def make(T=70, dtype=torch.float32, **more):
    x = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, 1, 16, generator=x).to(dtype) for _ in range(2))
    v = torch.randn(1, T, 2, 16, generator=x).to(dtype)
    g, beta = -torch.rand(1, T, 2, generator=x), torch.rand(1, T, 2, generator=x)
    return {"q": q, "k": k / 4, "v": v, "g": g, "beta": beta, **more}


def same(result, inputs):
    expected = reference.chunk_gated_delta_rule(**inputs)
    for a, b in zip(result, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def report():
    return fla_flashqla.dispatch_report()


@contextlib.contextmanager
def replaced(owner, **values):
    old = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def variable(name, value):
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def fla_answers():
    """FLA's own path, which needs a GPU, leaves a mark instead."""
    return replaced(chunk, ChunkGatedDeltaRuleFunction=MagicMock(apply=lambda *a: MARK))


def raises(error, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except error as caught:
        return str(caught)
    raise AssertionError(f"{error.__name__} was not raised")


def dispatched():
    """Whether FLA's own dispatch stands before the operator."""
    return "fla.backends" in sys.modules or (hasattr(chunk, "dispatch") and COPIES_ARE_OUTERMOST)


def check_reach():
    how = report()["reach"]
    assert ("registry" in how) == dispatched() and ("dispatch point" in how) != dispatched(), how


def check_every_name():
    inputs = make()
    for owner in (chunk, package, fla.ops, layers):
        for name in ("chunk_gated_delta_rule", "chunk_gdn"):
            if name in vars(owner) or name == "chunk_gated_delta_rule":
                before = report()["reference"]
                same(getattr(owner, name)(**inputs), inputs)
                assert report()["reference"] == before + 1, (owner, name)
    before = report()["reference"]
    bound_early(**inputs)  # this module's own copy of the name
    assert report()["reference"] == before + 1


def check_still_the_function_it_was():
    operator = package.chunk_gated_delta_rule
    assert pickle.loads(pickle.dumps(operator)) is operator
    assert operator.__name__ == "chunk_gated_delta_rule" and operator.__module__ == chunk.__name__
    assert len(operator.__doc__) > 500
    if ORDER == "late":
        assert (inspect.signature(operator), operator.__doc__) == unpatched


def check_positional_and_keyword():
    inputs = make(64, output_final_state=True, scale=0.3)
    inputs["initial_state"] = torch.ones(2, 2, 16, 16)
    inputs["cu_seqlens"] = torch.tensor([0, 30, 64])
    inputs["cu_seqlens_cpu"] = inputs["cu_seqlens"]
    inputs = {name: value for name, value in inputs.items() if name in PARAMETERS}
    defaults = {p: chunk_default(p) for p in PARAMETERS}
    everything = {**defaults, **inputs}
    ours = {n: value for n, value in everything.items() if n != "transpose_state_layout"}
    before = report()["reference"]
    same(package.chunk_gated_delta_rule(*everything.values()), ours)
    same(package.chunk_gated_delta_rule(**everything), ours)
    same(
        package.chunk_gated_delta_rule(*list(everything.values())[:7], **inputs_after(inputs, 7)),
        ours,
    )
    assert report()["reference"] == before + 3


def chunk_default(name):
    default = inspect.signature(chunk.chunk_gated_delta_rule).parameters[name].default
    return None if default is inspect.Parameter.empty else default


def inputs_after(inputs, count):
    return {name: value for name, value in inputs.items() if name not in PARAMETERS[:count]}


def check_unknown_arguments_are_refused():
    fla_flashqla.reset_report()
    with fla_answers():
        assert package.chunk_gated_delta_rule(**make(), brand_new=1) == MARK
        assert report()["refused"] == {"unknown keyword arguments: brand_new": 1}
        if "state_v_first" not in PARAMETERS:
            assert package.chunk_gated_delta_rule(**make(), state_v_first=True) == MARK
            assert "this FLA's operator has no argument state_v_first" in report()["refused"]
    assert report()["reference"] == 0


def check_malformed_calls_are_flas():
    inputs = make()
    raises(TypeError, package.chunk_gated_delta_rule, inputs["q"])
    raises(TypeError, package.chunk_gated_delta_rule, *inputs.values(), q=inputs["q"])
    raises(TypeError, package.chunk_gated_delta_rule, *range(len(PARAMETERS) + 1))
    inputs["cu_seqlens"] = torch.tensor([0, 70])
    for name in "qkv":
        inputs[name] = inputs[name].expand(2, -1, -1, -1)
    for name in ("g", "beta"):
        inputs[name] = inputs[name].expand(2, -1, -1)
    assert "batch size" in raises(ValueError, package.chunk_gated_delta_rule, **inputs)


def check_switch_is_read_on_each_call():
    fla_flashqla.reset_report()
    with fla_answers():
        package.chunk_gated_delta_rule(**make())
        with variable("FLA_FLASH_QLA", "0"):
            assert package.chunk_gated_delta_rule(**make()) == MARK
        package.chunk_gated_delta_rule(**make())
    assert report()["reference"] == 2 and report()["refused"] == {}


def check_strict():
    with variable("FLA_FLASH_QLA_STRICT", "1"):
        package.chunk_gated_delta_rule(**make())
        text = raises(
            fla_flashqla.Unsupported, package.chunk_gated_delta_rule, **make(), brand_new=1
        )
        assert "brand_new" in text
        with variable("FLA_FLASH_QLA", "0"), fla_answers():
            assert package.chunk_gated_delta_rule(**make(), brand_new=1) == MARK


def check_gradients():
    inputs = make()
    inputs["q"].requires_grad_()
    package.chunk_gated_delta_rule(**inputs)[0].sum().backward()
    assert inputs["q"].grad.abs().sum() > 0


def check_torch_compile():
    fla_flashqla.reset_report()
    inputs = make()
    names = list(inputs)

    @torch.compile(backend="eager")
    def layer(*tensors):
        named = {name: x * 1 for name, x in zip(names, tensors)}  # noqa: B905
        return package.chunk_gated_delta_rule(**named)[0] + bound_early(**named)[0]

    for _ in range(2):
        result = layer(*inputs.values())
    assert torch.equal(result, 2 * reference.chunk_gated_delta_rule(**inputs)[0])
    assert report()["reference"] == 4


def planned(name):
    """CPU calls get a plan, whose kernels are what the check says."""
    return replaced(
        api, plan=lambda call: plan_or(call, Plan(name, "float32", "float32", "float32"))
    )


def plan_or(call, chosen):
    decision = plan(call)
    return decision if isinstance(decision, Refusal) else chosen


def warnings_of(function):
    start = len(records)
    result = function()
    return result, [r.getMessage() for r in records[start:] if r.levelno >= logging.WARNING]


def check_no_tilelang():
    """The real `chunk.build`, with a TileLang that cannot be imported."""
    blocked = {n: None for n in sys.modules if n.split(".")[0] == "tilelang"} | {"tilelang": None}
    for name in [n for n in sys.modules if n.startswith("fla_flashqla.kernels.")]:
        del sys.modules[name]
    old = {n: sys.modules.get(n) for n in blocked}
    sys.modules.update(blocked)
    try:
        with planned("no_tilelang"), fla_answers():
            result, said = warnings_of(lambda: package.chunk_gated_delta_rule(**make()))
    finally:
        for name, module in old.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    assert result == MARK and len(said) == 1 and "tilelang" in said[0], said


def check_build_failure_warns_once():
    fla_flashqla.reset_report()
    build = MagicMock(side_effect=RuntimeError("nvcc: not found\nlong output"))
    with fla_answers(), replaced(api.chunk, build=build):
        with planned("broken"):
            for calls in range(3):
                result, said = warnings_of(lambda: package.chunk_gated_delta_rule(**make()))
                assert result == MARK and len(said) == (calls == 0)
                assert not said or "nvcc: not found" in said[0] and "long output" not in said[0]
            with variable("FLA_FLASH_QLA_STRICT", "1"):
                text = raises(fla_flashqla.Unsupported, package.chunk_gated_delta_rule, **make())
                assert "nvcc: not found" in text
        with planned("also_broken"):
            assert len(warnings_of(lambda: package.chunk_gated_delta_rule(**make()))[1]) == 1
    assert build.call_count == 2
    assert sum(report()["refused"].values()) == 5 and report()["ran"] == {}


def check_first_launch_failure_falls_back_and_a_later_one_surfaces():
    fla_flashqla.reset_report()
    forward = MagicMock(side_effect=RuntimeError("bad launch"))
    with fla_answers(), replaced(api.chunk, build=lambda plan: None, forward=forward):
        with planned("unlucky"):
            result, said = warnings_of(lambda: package.chunk_gated_delta_rule(**make()))
            assert result == MARK and len(said) == 1 and "bad launch" in said[0]
            assert warnings_of(lambda: package.chunk_gated_delta_rule(**make())) == (MARK, [])
            assert forward.call_count == 1
        with planned("strictly_unlucky"), variable("FLA_FLASH_QLA_STRICT", "1"):
            assert raises(RuntimeError, package.chunk_gated_delta_rule, **make()) == "bad launch"
        with planned("lucky"):
            forward.side_effect = torch.OutOfMemoryError("full")
            raises(torch.OutOfMemoryError, package.chunk_gated_delta_rule, **make())
            forward.side_effect = [("ours", None), RuntimeError("later"), ("ours", None)]
            assert package.chunk_gated_delta_rule(**make()) == ("ours", None)
            assert raises(RuntimeError, package.chunk_gated_delta_rule, **make()) == "later"
            assert package.chunk_gated_delta_rule(**make()) == ("ours", None)
    assert report()["ran"] == {"forward lucky float32": 2}


def check_kept_backend():
    """FLA's own backend for the flash_qla package has the calls that ours refuses."""
    if not dispatched():
        return
    theirs = importlib.import_module("fla.ops.gated_delta_rule.backends.flash_qla")
    package_ = importlib.import_module("flash_qla")
    big = make(dtype=torch.bfloat16)
    for x in ("q", "k", "v"):
        big[x] = torch.zeros(*big[x].shape[:3], 128, dtype=torch.bfloat16)
    refuse = replaced(api, plan=lambda call: Refusal("for a test"))
    with fla_answers(), replaced(theirs, IS_NVIDIA_HOPPER=True):
        calls = len(package_.calls)
        assert package.chunk_gated_delta_rule(**big)[0].shape == big["v"].shape  # ours comes first
        assert len(package_.calls) == calls
        with refuse:
            assert package.chunk_gated_delta_rule(**big) == package_.ANSWER
            assert package.chunk_gated_delta_rule(**make()) == MARK  # which theirs refuses too
            with variable("FLA_FLASH_QLA", "0"):
                assert package.chunk_gated_delta_rule(**big) == MARK
        assert len(package_.calls) == calls + 1 and report()["refused"]["for a test"] == 2
        # where ours was not measured, theirs comes first
        new = replace(arch.ARCHS[9, 0], name="new", measured=False)
        with replaced(arch, row=lambda device: new):
            assert package.chunk_gated_delta_rule(**big) == package_.ANSWER
            assert sum("preferred on NEW" in reason for reason in report()["refused"]) == 1
            assert package.chunk_gated_delta_rule(**make())[0].shape == make()["v"].shape
            with variable("FLA_FLASH_QLA_PREFER", "ours"):
                assert package.chunk_gated_delta_rule(**big)[0].shape == big["v"].shape
    assert len(package_.calls) == calls + 2


def check_fork():
    if not hasattr(os, "fork"):
        return
    package.chunk_gated_delta_rule(**make())
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(30)
        try:
            package.chunk_gated_delta_rule(**make(T=3))
            code = 0 if report()["reference"] == 1 and "not reached" not in report()["reach"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def check_threads_build_once():
    fla_flashqla.reset_report()
    build, start = MagicMock(), threading.Barrier(4)

    def call():
        start.wait()
        for _ in range(50):
            package.chunk_gated_delta_rule(**make(T=3))

    with planned("threads"), replaced(api.chunk, build=build, forward=lambda *a: ("ours", None)):
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert build.call_count == 1 and report()["ran"] == {"forward threads float32": 200}


def check_registering_again_changes_nothing():
    operator, how = chunk.chunk_gated_delta_rule, report()["reach"]
    assert fla_flashqla.register() == how and chunk.chunk_gated_delta_rule is operator
    before = report()["reference"]
    package.chunk_gated_delta_rule(**make())
    assert report()["reference"] == before + 1


run_checks(globals())
