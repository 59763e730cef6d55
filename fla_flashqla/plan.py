# SPDX-License-Identifier: MIT
"""What answers a call: the one pure function that verifier, launcher and command line share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fla_flashqla.arch import ARCHS
from fla_flashqla.call import Call

HEAD_DIM = 128
CHUNK = 64
MAX_TOKENS = 2**31 - 192  # the kernels count tokens, padded to three chunks, in int32

_MAIN_DTYPES = frozenset({"bfloat16", "float16"})
_SIDE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_FLOAT_DTYPES = frozenset({"float64", *_SIDE_DTYPES})


@dataclass(frozen=True, slots=True)
class Plan:
    """Selects the compiled kernels; lengths, heads, scale and layouts stay runtime values."""

    arch: str
    dtype: str
    g_dtype: str
    beta_dtype: str
    splits: int = 1  # blocks that share the V columns of a value head, sequences being whole
    warps: int = 4  # a block of the preparation
    longest_first: bool = False  # whether sequences start in the order of their lengths
    gradients: bool = False  # whether a backward follows
    segment: int = 0  # tokens of the segments into which the forward cuts sequences; 0: none
    segment_splits: int = 1  # as `splits`, for those
    backward_segment: int = 0  # the same for the backward
    backward_splits: int = 1
    exact: bool = False  # whether segments start from the whole state, whatever has decayed

    @property
    def compiled(self) -> tuple[str, ...]:
        """What is compiled together, in each step: these kernels take all else at run time."""
        return self.arch, self.dtype, self.g_dtype, self.beta_dtype

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that it needs, each of which is compiled when first needed."""
        cut = ("segments",) * bool(self.segment or self.backward_segment)
        cut_backward = ("backward_segments",) * bool(self.backward_segment)
        return "forward", *cut, *cut_backward, *("backward",) * self.gradients

    def without(self, step: str) -> Plan:
        """The plan of calls whose sequences stay whole where "segments" or "backward_segments" would cut them."""
        plan = replace(self, backward_segment=0, backward_splits=1)
        return plan if step == "backward_segments" else replace(plan, segment=0, segment_splits=1)

    def blocks(self, step: str) -> int:
        """Blocks that share the V columns of a value head in a step."""
        if step == "forward" and self.segment:
            return self.segment_splits
        return self.backward_splits if step == "backward" and self.backward_segment else self.splits

    def key(self, step: str) -> tuple[str, ...]:
        """What is compiled together for a step."""
        return step, *self.compiled

    def path(self, step: str) -> str:
        """What reports call the kernels of a step."""
        return f"{step} {self.arch} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Reference:
    """The call is answered by `reference.py`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The call is not ours; one sentence with what is expected and what was got."""

    reason: str


def splits(chains: int, sms: int) -> int:
    """Blocks that share the V columns of a value head, `chains` being sequences times value heads.

    Two halves take longer than a whole on one SM, but a chain step of one half is a third shorter: they pay while
    all of them run at once (benchmarks/results, 2:8 and 16:16 against 8:32 with 8192x4).
    """
    return 2 if 2 * chains <= sms else 1


def warps(group: int) -> int:
    """Warps of a block that prepares the chunks of a q/k head and its `group` value heads.

    Warps of a block share K K^T and take a value head each; alone they take them in turn, but a group of one or two leaves
    none idle and blocks wait for each other less (benchmarks/results, 16:16 to 16:64 with 8192x4).
    """
    return 1 if group <= 2 else 4


def longest_first(varlen: bool, N: int, HV: int, sms: int) -> bool:
    """Whether blocks take sequences in the order of their lengths, which the device finds out: if not all run at once.

    A block looks at all lengths for that, a lane each; with more sequences than lanes the order matters little.
    """
    return varlen and 1 < N <= 32 and sms < N * HV


class Recurrence(NamedTuple):
    """Microseconds of a chunk step of a kernel along chains, by how many blocks share a head, and of a chunk and value head by
    memory alone, which is what counts where the GPU is full."""

    whole: float
    halves: float
    memory: float = 0.0

    def us(self, chunks: int, chains: int, sms: int) -> float:
        """Of all chains, `chunks` long each."""
        shares = splits(chains, sms)
        rounds = -(-chains * shares // max(sms, 1))
        step = self.whole if shares == 1 else self.halves
        return max(rounds * (chunks * step + ROUND_US), chunks * chains * self.memory)


class Pass(NamedTuple):
    """What cutting sequences changes in the forward or in the backward."""

    recurrences: tuple[
        Recurrence, ...
    ]  # they need nothing of each other and run side by side where there is room
    maps: tuple[
        tuple[int, float], ...
    ]  # kernels that make maps: blocks a segment, and us of a step


# Microseconds, rounded from benchmarks/results but for those of maps and of whole heads in the backward, which are guesses from
# the forward: of a round of blocks beside its chunks; of a segment in `combine.py`; of its launch and that of a kernel of maps.
ROUND_US = 7.0
COMBINE_STEP_US = 1.0
CUT_US = 35.0
FORWARD = Pass((Recurrence(2.0, 1.26),), ((2, 1.3),))
BACKWARD = Pass(
    (Recurrence(1.3, 0.86, 0.0228), Recurrence(2.0, 1.45, 0.0240)),  # states.py, reverse.py
    ((2, 1.3), (1, 2.0)),  # segments.py, reverse.py
)
WARM_UP = 4  # chunks that make a segment's start where states decay, as a guess
MAX_SEGMENTS = 64  # of a sequence: they are combined one after the other


@lru_cache(maxsize=1024)
def segment(
    tokens: int, N: int, HV: int, sms: int, quarters: int = 4, of: Pass = FORWARD
) -> tuple[int, int]:
    """Tokens of a segment and blocks that share a head of it, or (0, 1) where sequences stay whole.

    Cut is only what is expected to be faster even if nothing decays (`segments.py` runs two chains a segment then), and so that the
    mean of three cases is shortest: that one, a few heads without decay (one round of chains as long as a segment), and all
    decayed. `quarters` is how often a quarter of the mean length fits into the longest sequence, rounded up.
    """
    chunks, chains = -(-tokens // (N * CHUNK)), N * HV

    def chains_us(chunks: int, chains: int) -> float:
        times = [kernel.us(chunks, chains, sms) for kernel in of.recurrences]
        return max(times) if len(times) * chains * splits(chains, sms) <= sms else sum(times)

    def maps_us(chunks: int, pieces: int) -> float:
        return sum(-(-blocks * pieces // max(sms, 1)) * chunks * step for blocks, step in of.maps)

    longest = chunks * quarters // 4
    whole, best, found = chains_us(longest, chains), float("inf"), (0, 1)
    for wanted in range(2, min(MAX_SEGMENTS, chunks // 2, 2 * sms // chains + 1) + 1):
        length = -(-chunks // wanted)
        count = -(-chunks // length)
        pieces = chains * (count - 1)
        fixed = chains_us(length, chains * count) + len(of.maps) * (
            count * COMBINE_STEP_US + CUT_US
        )
        exact = fixed + maps_us(length, pieces)
        some = fixed + maps_us(length, 1)
        decayed = fixed + maps_us(min(length, WARM_UP), pieces)
        # the model is not exact
        if 1.02 * exact < whole and exact + some + decayed < best:
            best = exact + some + decayed
            found = length * CHUNK, splits(chains * count, sms)
    return found


def _quarters(call: Call) -> int:
    """As `segment` takes them; without the lengths two packed sequences count as 3 : 1, the mean of random cuts, and more as alike."""
    if call.longest:
        return min(-(-4 * call.N * call.longest // call.T), 4 * call.N)
    return 6 if call.varlen and call.N == 2 else 4


_plan = lru_cache(maxsize=1024)(Plan)  # SMs x dtypes x lengths of segments x the rest
_REFERENCE = Reference("CPU tensors are answered by the PyTorch reference")


def plan(call: Call) -> Plan | Reference | Refusal:
    """Map the facts of a call to what answers it."""
    reason = call.malformed or _refuse_any(call)
    if reason is None and call.device_type == "cpu":
        reason = _refuse_reference(call)
        return _REFERENCE if reason is None else Refusal(reason)
    if reason is None:
        reason = _refuse_cuda(call)
    if reason is not None:
        return Refusal(reason)
    assert call.sm is not None
    sizes = call.B * call.T, call.N, call.HV, call.sms, _quarters(call)
    cut = segment(*sizes)
    cut_backward = segment(*sizes, BACKWARD) if call.needs_grad else (0, 1)
    return _plan(
        *(ARCHS[call.sm].name, call.q_dtype, call.g_dtype, call.beta_dtype),
        splits(call.N * call.HV, call.sms),
        warps(call.HV // call.H),
        longest_first(call.varlen, call.N, call.HV, call.sms),
        call.needs_grad,
        *cut,
        *cut_backward,
    )


def _refuse_any(call: Call) -> str | None:
    if call.unknown:
        return f"unknown keyword arguments: {', '.join(call.unknown)}"
    if call.cp_context:
        return "cp_context is not supported: context parallelism is FLA's own"
    return None


def _refuse_reference(call: Call) -> str | None:
    for name in ("q", "k", "v", "g", "beta", "state"):
        dtype = getattr(call, f"{name}_dtype")
        if dtype not in _FLOAT_DTYPES and not (name == "state" and dtype is None):
            return f"{name} must be a floating-point tensor, got {dtype}"
    return None


def _refuse_cuda(call: Call) -> str | None:
    # The device comes first: it explains most refusals, and the rest cannot be mended by the user.
    if call.device_type != "cuda":
        return f"the device must be cuda or cpu, got {call.device_type}"
    if call.is_hip:
        return "an NVIDIA GPU is needed, got a HIP build of torch"
    arch = None if call.sm is None else ARCHS.get(call.sm)
    if arch is None or not arch.supported:
        sm = "unknown" if call.sm is None else f"SM{call.sm[0]}{call.sm[1]}"
        return f"the GPU must be SM90, got {sm}: {arch.status if arch else 'not supported'}"
    if call.transformed:
        return "torch.func, forward-mode differentiation and torch.jit.trace are not supported"
    if call.K != HEAD_DIM or call.V != HEAD_DIM:
        return f"K and V must be {HEAD_DIM}, got K={call.K}, V={call.V}"
    if call.q_dtype not in _MAIN_DTYPES:
        return f"q, k and v must be float16 or bfloat16, got {call.q_dtype}"
    if not call.q_dtype == call.k_dtype == call.v_dtype:
        return (
            f"q, k and v must share one dtype, got {call.q_dtype}, {call.k_dtype}, {call.v_dtype}"
        )
    if call.g_dtype not in _SIDE_DTYPES:
        return f"g must be float32, bfloat16 or float16, got {call.g_dtype}"
    if call.beta_dtype not in _SIDE_DTYPES:
        return f"beta must be float32, bfloat16 or float16, got {call.beta_dtype}"
    if call.state_dtype is not None and call.state_dtype not in _SIDE_DTYPES:
        return f"initial_state must be float32, bfloat16 or float16, got {call.state_dtype}"
    if call.N == 0 or call.HV == 0 or call.B * call.T == 0:
        return f"there must be a sequence and a token, got B={call.B}, T={call.T}, N={call.N}"
    if call.B * call.T >= MAX_TOKENS:
        return f"B * T must be below 2**31 - 192, got {call.B * call.T}"
    return None
