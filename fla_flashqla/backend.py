# SPDX-License-Identifier: MIT
"""The backend that FLA dispatches to, and its registration."""

from __future__ import annotations

import sys
import threading
from operator import is_
from typing import Any

import torch

from fla_flashqla import _autoload, api, arch, compat, env, report
from fla_flashqla.call import Unsupported, describe
from fla_flashqla.plan import Refusal
from fla_flashqla.report import logger

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class FlashQLABackend:
    """Answers `chunk_gated_delta_rule`; made a subclass of FLA's `BaseBackend` on registration.

    A refused call runs on FLA's own path. Under `FLA_FLASH_QLA_STRICT=1` it raises `Unsupported`:
    FLA takes whatever a verifier raises for a refusal, so the verifier accepts and the call raises.
    """

    backend_type = "flash_qla"  # the slot of FLA's own backend for the flash_qla package
    package_name = None
    env_var = env.SWITCH.name
    default_enable = True
    priority = 3

    def __init__(self, binding: compat.Binding) -> None:
        super().__init__()
        self._bind = binding
        self.kept: Any = None  # FLA's own backend for the flash_qla package, whose place we took
        self._accepted = threading.local()

    # Static, because FLA calls them on the class or on the instance; never cached.
    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_enabled() -> bool:
        return env.enabled()

    @staticmethod
    def can_use() -> bool:
        return env.enabled()

    def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Whether we answer this call, or the reason why not; builds kernels on first use."""
        self._accepted.call = None
        bound: _Arguments = (), {}
        failure = None
        try:
            bound = self._bind(args, kwargs)
            preferred = None if self.kept is None else self._preferred(bound, args, kwargs)
            decision = Refusal(preferred) if preferred else api.decide(*bound)
        except Unsupported as error:
            decision = Refusal(str(error))
        except Exception as error:  # a malformed call, which FLA reports itself, or our mistake
            decision = Refusal(f"the call cannot be examined: {type(error).__name__}: {error}")
            failure = error
        if isinstance(decision, Refusal) and not env.strict():
            if report.refused(decision.reason) and failure is not None:
                logger.warning("%s", decision.reason, exc_info=failure)
            return False, decision.reason
        self._accepted.call = (args, kwargs), bound, decision
        return True, None

    def _preferred(
        self, bound: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Why flash_qla, which takes this call too, shall answer it."""
        prefer = env.prefer()
        q = bound[0][0] if bound[0] else bound[1].get("q")
        if prefer == "ours" or env.strict() or not isinstance(q, torch.Tensor):
            return None
        row = arch.row(q.device)
        if row is None or (row.measured and prefer == "auto"):
            return None
        kept, name = self.kept, compat.OPERATOR
        usable = kept.is_available() and kept.is_enabled()
        if not (usable and kept.verify(name, *args, **kwargs)[0]):
            return None
        why = f" on {row.name.upper()}, where ours was not measured" if prefer == "auto" else ""
        return f"flash_qla is preferred{why} ({env.PREFER.name}={prefer})"

    def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call that the verifier accepted."""
        # FLA calls this right behind the verifier with the same objects, which `_accepted` keeps
        # alive meanwhile; one use only, so that a later change of theirs cannot be missed.
        accepted, self._accepted.call = getattr(self._accepted, "call", None), None
        if accepted is not None and _same(accepted[0], (args, kwargs)):
            _, bound, decision = accepted
        else:
            bound = self._bind(args, kwargs)
            decision = api.decide(*bound)
        try:
            return api.run(decision, *bound)
        except api.FirstLaunchError as error:
            if env.strict() and error.__cause__ is not None:
                raise error.__cause__ from None
        return compat.operator()(*args, **kwargs)  # which refuses this plan now


def _same(a: _Arguments, b: _Arguments) -> bool:
    """Whether two calls have the same objects, keywords in the same order."""
    return (
        len(a[0]) == len(b[0])
        and [*a[1]] == [*b[1]]
        and all(map(is_, a[0], b[0]))
        and all(map(is_, a[1].values(), b[1].values()))
    )


_registry: Any = None
_installed = False
_misfit = ""


def register() -> str:
    """Register with the FLA that is imported, or with the one that will be.

    Idempotent, and never raises: where FLA's interface does not fit, one warning says so.

    Returns:
        How FLA reaches us, as in `dispatch_report()["reach"]`.
    """
    global _misfit
    if _autoload.TARGET not in sys.modules:
        _autoload.autoload()
    elif not compat.dispatch_disabled():
        try:
            _attach()
            _misfit = ""
        except Exception as error:
            _misfit = f"FLA's interface does not fit: {type(error).__name__}: {error}"
            logger.warning("FLA works as if fla_flashqla were not there: %s", _misfit)
    return reach()


def _attach() -> None:
    global _registry, _installed
    function = compat.operator()
    if hasattr(function, "dispatches_to"):
        return
    binding = compat.Binding.between(function, describe)
    _registry = compat.registry_of(function)
    if _registry is None:
        compat.install_dispatch_point(FlashQLABackend(binding))
        _installed = True
    elif not compat.holds(_registry, FlashQLABackend):
        bases = (FlashQLABackend, compat.base_of(_registry))
        namespace = {"__module__": __name__, "__doc__": FlashQLABackend.__doc__}
        ours = type(FlashQLABackend.__name__, bases, namespace)(binding)
        ours.kept = compat.seat(_registry, ours)


def reach() -> str:
    """How FLA's operator reaches us, or why it does not."""
    if _autoload.TARGET not in sys.modules:
        return "not reached: FLA's operator is not imported"
    if compat.dispatch_disabled():
        return "not reached: FLA_DISABLE_BACKEND_DISPATCH=1 bypasses all backends"
    if _misfit:
        return f"not reached: {_misfit}"
    if _registry is not None:
        home = type(_registry).__module__
        if compat.holds(_registry, FlashQLABackend):
            return f"FLA's own registry of {compat.OPERATION} backends ({home})"
        return f"not reached: another backend of type {FlashQLABackend.backend_type} came later"
    operator = getattr(sys.modules[_autoload.TARGET], compat.OPERATOR, None)
    if hasattr(operator, "dispatches_to"):
        return f"a dispatch point installed in {_autoload.TARGET}"
    if _installed:
        return "not reached: FLA's operator was replaced later"
    return "not reached: FLA was imported past our hook; fla_flashqla.register() makes up for it"


report.reached_by(reach)
