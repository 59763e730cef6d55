# SPDX-License-Identifier: MIT
"""The child of a self-check whose kernels are models, one of them broken as the first argument says; test_flashqla_selfcheck.py starts it."""

from __future__ import annotations

import os
import sys
from typing import Any

import kernel_models
import torch

from fla_flashqla import arch, chunk, selfcheck


def broken(kind: str) -> Any:
    def launch(*args: Any) -> None:
        kernel_models.forward(*args)
        if kind == "wrong":
            o = args[7].view(-1)
            o[-1] += o.abs().max() / 8  # one element of all
        elif kind == "crashing":
            os.abort()
        elif kind == "failing":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    return launch


def main(kind: str, *args: str) -> None:
    kernels = kernel_models.FORWARD._replace(forward_halves=broken(kind))
    chunk.build = lambda plan: kernels
    arch.device_facts = lambda device: arch.DeviceFacts("cuda", -1, (9, 9), False, 132)
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    selfcheck._device = lambda gpu: torch.device("cpu")
    print("what a library prints")
    selfcheck.main(*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
