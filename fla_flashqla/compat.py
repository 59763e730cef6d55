# SPDX-License-Identifier: MIT
"""Every difference between FLA releases. Signatures and features decide, never version numbers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from fla_flashqla._autoload import TARGET
from fla_flashqla.call import Unsupported

OPERATOR = "chunk_gated_delta_rule"
OPERATION = "gated_delta_rule"
# Homes of FLA's dispatch, from 0.6.0 on and before; none in 0.4.1.
DISPATCH_MODULES = ("fla.backends", "fla.ops.backends")

# What an FLA that has only the old name calls it.
RENAMED = {"transpose_state_layout": "state_v_first"}
# What newer releases look for among the keywords that they do not name, and older ones pass over without a word.
UNNAMED = ("use_gate_in_kernel", "transpose_state_layout")

Operator = Callable[..., Any]


class Misfit(Exception):
    """FLA's interface is not one that we can serve; the text says why."""


class Binding(NamedTuple):
    """How a call of FLA's operator becomes one of ours, `names` being FLA's positional order."""

    names: tuple[str, ...]
    prefix: int  # so many leading arguments are the same in both orders
    theirs: tuple[tuple[str, Any], ...]  # arguments that only FLA names, with their defaults
    ours: tuple[tuple[str, Any], ...]  # arguments that only we name: this FLA would ignore them
    unread: tuple[str, ...]  # likewise of those that FLA takes without naming them

    @classmethod
    def between(cls, theirs: Operator, ours: Operator) -> Binding:
        """Compare two signatures; raise `Misfit` where a call could change its meaning."""
        given, own = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
        kinds = inspect.Parameter
        names = tuple(n for n, p in given.items() if p.kind is kinds.POSITIONAL_OR_KEYWORD)
        plain = {n: p for n, p in given.items() if p.kind is not kinds.VAR_KEYWORD}
        if any(p.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL) for p in plain.values()):
            raise Misfit(f"it takes unnamed arguments: {tuple(given)}")
        for name, parameter in own.items():
            needed = parameter.default is kinds.empty and parameter.kind is not kinds.VAR_KEYWORD
            if needed and name not in plain:
                raise Misfit(f"it has no argument {name!r}: {tuple(given)}")
        for name, parameter in plain.items():
            default = own[name].default if name in own else kinds.empty
            if default is not kinds.empty and parameter.default is not default:
                raise Misfit(f"{name!r} defaults to {parameter.default!r}, expected {default!r}")
            if name not in own and parameter.default is kinds.empty:
                raise Misfit(f"it needs an argument that is unknown here: {name!r}")
        code = getattr(inspect.unwrap(theirs), "__code__", None)
        read = {*given, *(code.co_consts if code else ())}  # a keyword is looked up by its name
        agree = [a == b for a, b in zip(names, own, strict=False)]
        return cls(
            names,
            [*agree, False].index(False),
            tuple((n, p.default) for n, p in plain.items() if n not in own),
            tuple(
                (n, p.default)
                for n, p in own.items()
                if n not in plain and p.kind is not kinds.VAR_KEYWORD
            ),
            tuple(name for name in UNNAMED if name not in read),
        )

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn FLA's arguments into ours."""
        if len(args) > self.prefix:
            late = self.names[self.prefix : len(args)]
            if len(args) > len(self.names) or not kwargs.keys().isdisjoint(late):
                raise TypeError("there are more values than arguments")
            kwargs = {**kwargs, **dict(zip(late, args[self.prefix :], strict=True))}
            args = args[: self.prefix]
        for name, default in self.ours:
            if kwargs.get(name, default) is not default:
                raise Unsupported(f"this FLA's operator has no argument {name}")
        for name in self.unread:
            if kwargs.get(name):
                raise Unsupported(f"this FLA's operator has no argument {name}")
        for name, default in self.theirs:
            if name in kwargs and kwargs[name] is default:
                kwargs = {n: value for n, value in kwargs.items() if n != name}
            elif name in kwargs and name in RENAMED:
                kwargs = {RENAMED.get(n, n): value for n, value in kwargs.items()}
        return args, kwargs


def operator() -> Operator:
    """FLA's operator as it is now, dispatched or not."""
    function: Operator | None = getattr(sys.modules[TARGET], OPERATOR, None)
    if not callable(function):
        raise Misfit(f"{TARGET} has no {OPERATOR}")
    return function


def dispatch_disabled() -> bool:
    """Whether FLA was told to bypass all dispatch, which it reads when it is imported."""
    for name in DISPATCH_MODULES:
        flag = getattr(sys.modules.get(name), "_DISPATCH_DISABLED", None)
        if flag is not None:
            return bool(flag)
    return os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1"


def registry_of(function: Operator) -> Any:
    """The registry that FLA's `dispatch` asks when `function` is called, None if there is none.

    A decorator that is there need not be called: some releases of torch skip all between two
    `torch.compiler.disable`, and `__wrapped__` shows what is left.
    """
    layer: Any = function
    while layer is not None:
        home = getattr(layer, "__globals__", {}).get("__name__")
        if home in DISPATCH_MODULES:
            break
        layer = getattr(layer, "__wrapped__", None)
    else:
        return None
    # FLA fills its registry, and up to 0.5.2 replaces any earlier one, when this is imported.
    with contextlib.suppress(ImportError):
        importlib.import_module(f"fla.ops.{OPERATION}.backends")
    module = sys.modules[home]
    for owner in (module, getattr(module, "BackendRegistry", None)):
        for attribute in ("_operation_registries", "_registries"):
            registry = getattr(owner, attribute, {}).get(OPERATION)
            if registry is not None:
                return registry
    return None


def base_of(registry: Any) -> type:
    """FLA's base class of backends, beside the registry's."""
    base = getattr(sys.modules[type(registry).__module__], "BaseBackend", object)
    return base if isinstance(base, type) else object


def seat(registry: Any, ours: Any) -> Any:
    """Register `ours`; who had its type, and is returned, gets the calls that it refuses, under a type of its own."""
    kept = getattr(registry, "_backends", {}).get(ours.backend_type)
    if kept is not None:
        kept.backend_type = f"{ours.backend_type}_package"
    registry.register(ours)
    if kept is not None:
        registry.register(kept)
    return kept


def holds(registry: Any, backend_class: type) -> bool:
    return any(isinstance(b, backend_class) for b in getattr(registry, "_backends", {}).values())


def install_dispatch_point(backend: Any) -> None:
    """Put a dispatch point into an FLA that has none for this operator, wherever it is known."""
    import torch

    outside_graphs: Any = torch.compiler.disable
    original = operator()

    # Without `updated`, torch would find the marks of its own wrapper here and skip this function.
    @functools.wraps(original, updated=())
    def dispatch_point(*args: Any, **kwargs: Any) -> Any:
        if backend.is_enabled() and backend.chunk_gated_delta_rule_verifier(*args, **kwargs)[0]:
            return backend.chunk_gated_delta_rule(*args, **kwargs)
        return original(*args, **kwargs)

    installed = outside_graphs(dispatch_point)
    installed.dispatches_to = backend
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            namespace = vars(module)
            for name in [n for n, value in list(namespace.items()) if value is original]:
                namespace[name] = installed
