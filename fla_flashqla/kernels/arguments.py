# SPDX-License-Identifier: MIT
"""Arguments of kernels as FLA shapes them, and what the kernels make of them: views in their host code, which cost a call nothing."""

import tilelang.language as T


def packed(x):
    """`x` `[B, T, ...]` as `[tokens, ...]`."""
    return T.view(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def optional(name: str):
    """A float32 argument of any four sizes, so that another, unread, can stand in for it; see `flat`."""
    return T.Tensor([T.dynamic(f"{name}_{i}") for i in range(4)], "float32")


def flat(x):
    """All elements of `optional`."""
    return T.view(x, (x.shape[0] * x.shape[1] * x.shape[2] * x.shape[3],))
