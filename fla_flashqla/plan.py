# SPDX-License-Identifier: MIT
"""What answers a call: the one pure function that verifier, launcher and command line share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from fla_flashqla.arch import ARCHS
from fla_flashqla.call import Call

HEAD_DIM = 128
CHUNK = 64
STEPS = ("forward", "segments", "backward_segments", "backward")
MAX_TOKENS = 2**31 - 192  # the kernels count tokens, padded to three chunks, in int32

_MAIN_DTYPES = frozenset({"bfloat16", "float16"})
_SIDE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_FLOAT_DTYPES = frozenset({"float64", *_SIDE_DTYPES})


@dataclass(frozen=True)
class Plan:
    """Selects the compiled kernels; lengths, heads, scale and layouts stay runtime values.

    What is asked for on every call is made once: plans are few, see `plan`.
    """

    arch: str
    dtype: str
    g_dtype: str
    beta_dtype: str
    splits: int = 1  # blocks that share the V columns of a value head, sequences being whole
    warps: int = 4  # a block of the preparation
    longest_first: bool = False  # whether sequences start in the order of their lengths
    gradients: bool = False  # whether a backward follows
    states_whole: bool = (
        False  # whether its `states.py` takes whole heads though there are `splits`
    )
    segment: int = 0  # tokens of the segments into which the forward cuts sequences; 0: none
    segment_splits: int = 1  # as `splits`, for those
    backward_segment: int = 0  # the same for the backward
    backward_splits: int = 1
    exact: bool = False  # whether segments start from the whole state, whatever has decayed

    @cached_property
    def compiled(self) -> tuple[str, ...]:
        """What is compiled together, in each step: these kernels take all else at run time."""
        return self.arch, self.dtype, self.g_dtype, self.beta_dtype

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """The steps that it needs, each of which is compiled when first needed."""
        cut = ("segments",) * bool(self.segment or self.backward_segment)
        cut_backward = ("backward_segments",) * bool(self.backward_segment)
        return "forward", *cut, *cut_backward, *("backward",) * self.gradients

    def without(self, step: str) -> Plan:
        """The plan of calls whose sequences stay whole where "segments" or "backward_segments" would cut them."""
        plan = changed(self, backward_segment=0, backward_splits=1)
        return plan if step == "backward_segments" else changed(plan, segment=0, segment_splits=1)

    def blocks(self, step: str) -> int:
        """Blocks that share the V columns of a value head in a step."""
        if step == "forward" and self.segment:
            return self.segment_splits
        if step in ("states", "backward") and self.backward_segment:
            return self.backward_splits
        return 1 if step == "states" and self.states_whole else self.splits

    @cached_property
    def _variants(self) -> dict[str, tuple[int, ...]]:
        states = {"backward": (self.blocks("states"),)}
        return {step: (*states.get(step, ()), self.blocks(step), self.warps) for step in STEPS}

    def variant(self, step: str) -> tuple[int, ...]:
        """Which kernels of a step it takes, of those that are compiled together."""
        return self._variants[step]

    @cached_property
    def _keys(self) -> dict[str, tuple[str, ...]]:
        return {step: (step, *self.compiled) for step in STEPS}

    def key(self, step: str) -> tuple[str, ...]:
        """What is compiled together for a step."""
        return self._keys[step]

    @cached_property
    def _paths(self) -> dict[str, str]:
        return {step: f"{step} {self.arch} {self.dtype}" for step in STEPS}

    def path(self, step: str) -> str:
        """What reports call the kernels of a step."""
        return self._paths[step]


@lru_cache(maxsize=1024)
def changed(plan: Plan, **fields: Any) -> Plan:
    """The plan with other `fields`: one for all calls, since it keeps what is asked of it."""
    return replace(plan, **fields)


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


def states_whole(chains: int, sms: int) -> bool:
    """Whether `states.py` takes whole heads beside `reverse.py`, which takes halves.

    Halves of both read k, R and the gates twice, for 32 chains more than L2 gives, as we infer: there whole heads in `states.py`, which has
    the shorter step, are faster; for 16 chains halves run side by side as they are (benchmarks/results, 8:32 and 4:16). The bound in
    between is a guess.
    """
    return chains > 24 and 3 * chains <= sms


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


class Lengths(NamedTuple):
    """Sequences as the planner sees them: one of `longest` chunks and N - 1 of `other`."""

    N: int
    longest: int
    other: int

    def chains(self, HV: int, length: int) -> int:
        """Of segments of `length` chunks."""
        return HV * (-(-self.longest // length) + (self.N - 1) * -(-self.other // length))

    def total(self, HV: int) -> int:
        """Chunks of all value heads."""
        return HV * (self.longest + (self.N - 1) * self.other)


class Recurrence(NamedTuple):
    """Microseconds of a chunk step of a kernel along chains, a head or half a head a block, where one block runs and what is added where
    all SMs do; and of a chunk and value head by memory alone, which is what counts where the GPU is full."""

    whole: tuple[float, float]
    halves: tuple[float, float]
    memory: float = 0.0

    def us(self, chunks: int, chains: int, total: int, sms: int) -> float:
        """Of all chains, up to `chunks` long each, `total` chunks in all."""
        shares = splits(chains, sms)
        one, rest = self.whole if shares == 1 else self.halves
        return max(_rounds_us(chunks, chains * shares, sms, one, rest), total * self.memory)


class Maps(NamedTuple):
    """The same of a kernel that makes maps, and how many blocks it runs for a segment."""

    blocks: int
    one: float
    rest: float


class Pass(NamedTuple):
    """What cutting sequences changes in the forward or in the backward."""

    # they need nothing of each other and run side by side where there is room
    recurrences: tuple[Recurrence, ...]
    maps: tuple[Maps, ...]
    cut_us: float  # what launching all of `maps` and `combine.py` takes beside


# Microseconds, fitted to benchmarks/results (`segments_choice.py`); whole heads of the backward are guesses from the forward.
ROUND_US = 7.0  # of a round of blocks, beside its chunks
COMBINE_US = 1.5  # of a segment in `combine.py`
PIECE_US = 0.13  # of writing and reading the map of a segment and value head, all SMs together
FORWARD = Pass((Recurrence((1.64, 0.36), (1.15, 0.2)),), (Maps(2, 1.03, 0.25),), 10.0)
BACKWARD = Pass(
    (
        Recurrence((1.3, 0.2), (0.8, 0.1), 0.0228),  # states.py
        Recurrence((1.8, 0.3), (1.4, 0.1), 0.0240),  # reverse.py
    ),
    (Maps(2, 1.03, 0.25), Maps(1, 1.8, 0.3)),  # segments.py, reverse.py
    20.0,
)
WARM_UP = 5  # chunks that make a segment's start where states decay, as a guess
SLOWER = 1.2  # what cutting may cost, by whole sequences, where nothing decays
MAX_SEGMENTS = 64  # of a sequence: they are combined one after the other
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_SEGMENTS)


def _rounds_us(chunks: int, blocks: int, sms: int, one: float, rest: float) -> float:
    """Of `blocks` blocks, `chunks` steps each, a step being `one` for few of them and `rest` more for many."""
    return -(-blocks // sms) * (chunks * (one + rest * min(1.0, blocks / sms)) + ROUND_US)


def _whole_us(at: Lengths, HV: int, sms: int, of: Pass) -> float:
    return _chains_us(at.longest, at.N * HV, at.total(HV), sms, of)


def _chains_us(chunks: int, chains: int, total: int, sms: int, of: Pass) -> float:
    times = [kernel.us(chunks, chains, total, sms) for kernel in of.recurrences]
    return max(times) if len(times) * chains * splits(chains, sms) <= sms else sum(times)


def _cut_us(at: Lengths, length: int, HV: int, sms: int, of: Pass) -> tuple[float, float]:
    """If nothing decays; and the mean of that, a few heads without decay (as long as the longest), and all decayed."""
    count = -(-at.longest // length)
    chains = at.chains(HV, length)
    length, pieces = min(length, at.longest), chains - at.N * HV
    fixed = _chains_us(length, chains, at.total(HV), sms, of) + of.cut_us + count * COMBINE_US

    def maps_us(chunks: int, pieces: int) -> float:
        return sum(_rounds_us(chunks, m.blocks * pieces, sms, m.one, m.rest) for m in of.maps)

    exact = fixed + maps_us(length, pieces) + pieces * PIECE_US
    some = fixed + maps_us(length, 1) + pieces * PIECE_US / 2
    decayed = fixed + maps_us(min(length, WARM_UP), pieces) + pieces * PIECE_US / 2
    return exact, (exact + some + decayed) / 3


@lru_cache(maxsize=1024)
def segment(lengths: tuple[Lengths, ...], HV: int, sms: int, of: Pass = FORWARD) -> tuple[int, int]:
    """Tokens of a segment and blocks that share a head of it, or (0, 1) where sequences stay whole.

    Cut is what is expected to be faster in the mean of `lengths` and of three kinds of decay (`_cut_us`), and hardly slower where nothing
    decays: `segments.py` runs two chains a segment then.
    """
    first, sms = lengths[0], max(sms, 1)
    whole = sum(_whole_us(at, HV, sms, of) for at in lengths)
    best, found = float("inf"), (0, 1)
    filling = (blocks // (first.N * HV) for blocks in (sms // 2, sms, sms // 2 + first.N * HV))
    for count in sorted({*COUNTS, *filling}):
        if not 1 < count <= min(MAX_SEGMENTS, first.longest // 2):
            continue
        length = -(-first.longest // count)
        chains = first.chains(HV, length)
        if chains > 2 * sms + first.N * HV:
            break
        times = (_cut_us(at, length, HV, sms, of) for at in lengths)
        exact, mean = map(sum, zip(*times, strict=True))
        if exact < SLOWER * whole and 1.03 * mean < whole and mean < best:  # the model is not exact
            best = mean
            found = length * CHUNK, splits(chains, sms)
    return found


def _lengths(call: Call) -> tuple[Lengths, ...]:
    """As `segment` takes them, rounded up to few different ones: each is planned once."""

    def shape(longest: float) -> Lengths:
        other = (call.B * call.T - longest) / (call.N - 1) if call.N > 1 else 0.0
        return Lengths(call.N, _rounded(longest), _rounded(other))

    if call.longest:
        return (shape(call.longest),)
    tokens = call.B * call.T
    if call.varlen and call.N == 2:  # where the cut is, nobody knows
        return tuple(shape(tokens * part) for part in (0.75, 0.5, 0.875))
    return (shape(tokens / call.N),)


def _rounded(tokens: float) -> int:
    """Chunks, to five binary digits."""
    chunks = -(-int(tokens) // CHUNK)
    unit = 1 << max(chunks.bit_length() - 5, 0)
    return -(-chunks // unit) * unit


_plan = lru_cache(maxsize=1024)(Plan)  # SMs x dtypes x lengths of segments x the rest
_REFERENCE = Reference("CPU tensors are answered by the PyTorch reference")


@lru_cache(maxsize=1024)
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
    sizes = _lengths(call), call.HV, call.sms
    cut = segment(*sizes)
    cut_backward = segment(*sizes, BACKWARD) if call.needs_grad else (0, 1)
    return _plan(
        *(ARCHS[call.sm].in_form(call.form).name, call.q_dtype, call.g_dtype, call.beta_dtype),
        splits(call.N * call.HV, call.sms),
        warps(call.HV // call.H),
        longest_first(call.varlen, call.N, call.HV, call.sms),
        call.needs_grad,
        call.needs_grad and states_whole(call.N * call.HV, call.sms),
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
        ours = " or ".join(row.name.upper() for row in ARCHS.values() if row.supported)
        return f"the GPU must be {ours}, got {sm}: {arch.status if arch else 'not supported'}"
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
