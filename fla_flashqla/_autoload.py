# SPDX-License-Identifier: MIT
"""Registers with FLA as soon as FLA's operator has been imported; never raises, imports nothing.

PyTorch calls `autoload` at the end of `import torch` (entry point group `torch.backends`), where an
exception would break the import and where every microsecond is paid by programs without FLA.
"""

from __future__ import annotations

import sys
from typing import Any

# Where all FLA releases define the operator: the first moment that it exists, and the last one
# before FLA's packages copy its name.
TARGET = "fla.ops.gated_delta_rule.chunk"


class _Finder:
    """Lets the other finders find `TARGET` and adds a step behind its execution.

    Stays in `sys.meta_path` (one comparison per import): removing an entry would make a search of
    another thread skip the next finder.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != TARGET:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and not isinstance(finder, _Finder) else None
            if spec is not None:
                try:
                    _register_after(spec.loader)
                except Exception as error:
                    _complain(error)
                return spec
        return None


def _register_after(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        if module.__name__ == TARGET:  # one loader may serve several modules
            register()

    loader.exec_module = exec_module


def register() -> None:
    """Register with the FLA that is imported; log what goes wrong."""
    try:
        from fla_flashqla import backend

        backend.register()
    except Exception as error:
        _complain(error)


def autoload() -> None:
    """Register with FLA now or as soon as its operator has been imported."""
    try:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        module = sys.modules.get(TARGET)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            register()
    except Exception as error:
        _complain(error)


def _complain(error: Exception) -> None:
    import logging

    logging.getLogger("fla_flashqla").warning(
        "not registered with FLA, which works as before: %s: %s", type(error).__name__, error
    )
