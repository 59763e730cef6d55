# SPDX-License-Identifier: MIT
"""Which chunks gradients.py takes beside the recurrences: kernels/progress.cuh, step by step, every access of memory a step of its own; and where they do so."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from test_flashqla_plan import BASE

from fla_flashqla.call import Call
from fla_flashqla.layout import Layout
from fla_flashqla.plan import Beside, plan

C, LANES, WORD = 64, 32, (1 << 32) - 1
Steps = Iterator[None]


class Piece(NamedTuple):
    """What reverse.py announces."""

    slot: int
    first: int
    tokens: int

    @property
    def chunks(self) -> int:
        return -(-self.tokens // C)


class Work(NamedTuple):
    """A call, and what has become of it."""

    pieces: list[Piece]
    heads: int
    group: int
    of_reverse: int
    of_states: int
    memory: list[int]
    taken: list[tuple[int, int, int, int]]  # first token, tokens, head, slot

    @property
    def size(self) -> int:
        return 4 + 8 * self.group

    def counts(self, piece: int, head: int, kernel: int, block: int) -> int:
        """As gdr_counts."""
        return (piece * self.heads + head) * self.size + 4 + 4 * self.group * kernel + 2 * block


def announce(work: Work) -> Steps:
    for number, piece in enumerate(work.pieces):
        for head in range(work.heads):
            for i, x in enumerate(piece):
                work.memory[(number * work.heads + head) * work.size + i] = x + 1
                yield


def produce(work: Work, piece: int, head: int, kernel: int, block: int) -> Steps:
    at = work.counts(piece, head, kernel, block)
    for count in range(work.pieces[piece].chunks + 1):
        for kind in random.sample((0, 1), 2):
            work.memory[at + kind] = count
            yield


def ready(work: Work, chain: int) -> Generator[None, None, tuple[int, int, int]]:
    """As gdr::ready."""
    m, at = work.memory, chain * work.size
    slot, first, tokens, taken = m[at : at + 4]
    yield
    if min(slot, first, tokens) == 0:
        return 0, 0, 0
    chunks = done = made = (tokens + 62) // C
    if taken == chunks:
        return -1, 0, 0
    for i in range(work.group * max(work.of_reverse, work.of_states)):
        if i < work.group * work.of_reverse:
            done = min(done, *m[at + 4 + 2 * i : at + 6 + 2 * i])
        if i < work.group * work.of_states:
            other = at + 4 + 4 * work.group + 2 * i
            made = min(made, *m[other : other + 2])
        yield
        if done + made <= chunks + taken:
            return 0, 0, 0
    return 1, done, made


def bits(work: Work, piece: int, head: int, at: int) -> int:
    """The word of 32 chunks of a chain."""
    behind = len(work.pieces) * work.heads * work.size
    return behind + (work.pieces[piece].slot // 32 + piece + at) * work.heads + head


def take(work: Work, turn: int) -> Steps:
    """A block: gdr_take until it says that all is taken."""
    m, chains = work.memory, len(work.pieces) * work.heads
    item = 0
    while True:
        start = (turn + item) * LANES % (-(-chains // LANES) * LANES)
        ended, found = 0, False
        while ended < chains and not found:
            states = []
            for chain in range(start, min(start + LANES, chains)):
                states.append((yield from ready(work, chain)))
            free = [i for i, (state, *_) in enumerate(states) if state > 0]
            ended = ended + LANES if all(state < 0 for state, *_ in states) else 0
            if free:
                first = (turn + item) % LANES * min(chains, LANES) // LANES
                picked = next((i for i in free if i >= first), free[0])
                number, head = divmod(start + picked, work.heads)
                piece = work.pieces[number]
                low, high = piece.chunks - states[picked][1], states[picked][2]
                up = work.of_states == 0 or (turn + item) % 2 == 0
                words = range(low // 32, (high - 1) // 32 + 1)
                for at in words if up else reversed(words):
                    to = bits(work, number, head, at)
                    mask = ~m[to] & WORD
                    yield
                    if at == low // 32:
                        mask &= WORD << low % 32
                    if at == (high - 1) // 32:
                        mask &= WORD >> (31 - (high - 1) % 32)
                    if mask == 0:
                        continue
                    while mask and not found:
                        bit = (mask & -mask if up else 1 << mask.bit_length() - 1).bit_length() - 1
                        before, m[to] = m[to], m[to] | 1 << bit
                        found = not before >> bit & 1
                        yield
                        mask &= ~before
                    if found:
                        chunk = 32 * at + bit
                        check(work, number, head, chunk)
                        m[(start + picked) * work.size + 3] += 1
                        t0, rows = piece.first + C * chunk, min(C, piece.tokens - C * chunk)
                        work.taken.append((t0, rows, head, piece.slot + chunk))
                    break
            yield
            start = start + LANES if start + LANES < chains else 0
        if not found:
            return
        item += 1


def check(work: Work, piece: int, head: int, chunk: int) -> None:
    """That what is taken is complete."""
    chunks = work.pieces[piece].chunks
    for kernel, blocks in enumerate((work.of_reverse, work.of_states)):
        for block in range(work.group * blocks):
            at = work.counts(piece, head, kernel, block)
            assert min(work.memory[at : at + 2]) > (chunk if kernel else chunks - 1 - chunk)


def cut(lengths: tuple[int, ...], segment: int) -> list[Piece]:
    """Where pieces lie, as gdr_segment says; a slot of nobody is empty."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    if segment == 0:
        return [
            Piece(bos // C + n, bos, x)
            for n, (bos, x) in enumerate(zip(starts, lengths, strict=True))
        ]
    found = [Piece(0, 0, 0)] * (sum(lengths) // segment + len(lengths))
    for n, (bos, x) in enumerate(zip(starts, lengths, strict=True)):
        for j in range(max(1, -(-x // segment))):
            skipped = j * segment
            slot = bos // C + n + skipped // C
            found[bos // segment + n + j] = Piece(slot, bos + skipped, min(segment, x - skipped))
    return found


def run(lengths: tuple[int, ...], segment: int, heads: int, group: int, of_reverse: int, of_states: int, blocks: int, seed: int) -> list[tuple[int, int, int, int]]:  # fmt: skip
    random.seed(seed)
    pieces = cut(lengths, segment)
    tokens, N = sum(lengths), len(lengths)
    at = Layout(N, 0, None, 1, tokens // C + N + 1)
    memory = [0] * at.progress_words(len(pieces), heads, heads * group)
    work = Work(pieces, heads, group, of_reverse, of_states, memory, [])
    threads = [announce(work), *(take(work, i) for i in range(blocks))]
    for kernel, count in enumerate((of_reverse, of_states)):
        threads += [
            produce(work, piece, head, kernel, block)
            for piece in range(len(pieces))
            for head in range(heads)
            for block in range(group * count)
        ]
    while threads:
        thread = random.choice(threads)
        for _ in range(random.choice((1, 1, 10, 100))):
            if next(thread, thread) is thread:
                threads.remove(thread)
                break
    return work.taken


@pytest.mark.parametrize(("of_reverse", "of_states"), [(1, 0), (2, 0), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("lengths", "segment"),
    [
        ((64 * 70 + 3,), 0),
        ((64 * 40,), 64 * 9),
        ((0, 1, 0, 64, 65, 2100, 129, 0), 0),
        ((0, 1, 0, 64, 65, 2100, 129, 0), 128),
        ((200,) * 23, 0),
    ],
)
def test_flashqla_progress_every_chunk_once(
    lengths: tuple[int, ...], segment: int, of_reverse: int, of_states: int
) -> None:
    """Whoever is quick: no chunk before it is complete, each exactly once, and everybody comes to an end."""
    want = {
        (bos + i, min(C, x - i), head, bos // C + n + i // C)
        for n, x in enumerate(lengths)
        for bos in (sum(lengths[:n]),)
        for i in range(0, x, C)
        for head in range(2)
    }
    for seed in range(3):
        got = run(lengths, segment, 2, 1 + seed % 2, of_reverse, of_states, 3 + seed, seed)
        assert len(got) == len(want) and set(got) == want


def test_flashqla_progress_newest_first() -> None:
    """What was completed last is taken first, from the end of whichever recurrence is under way."""
    piece = Piece(0, 0, 64 * 100)
    for of_states, turn, made, want in (
        (0, 0, 0, [60, 61, 62]),
        (1, 0, 70, [60]),
        (1, 1, 70, [69]),
        (1, 1, 60, []),
    ):
        at = Layout(1, 0, None, 1, 102)
        work = Work([piece], 1, 1, 1, of_states, [0] * at.progress_words(1, 1, 1), [])
        [*announce(work)]
        for kernel, count in ((0, 40), (1, made)):
            begin = work.counts(0, 0, kernel, 0)
            work.memory[begin : begin + 2] = [count] * 2
        block = take(work, turn)
        for _ in range(200):
            next(block)
            if want and len(work.taken) == len(want):
                break
        assert [slot for *_, slot in work.taken] == want


def test_flashqla_progress_chains_share_no_word() -> None:
    random.seed(0)
    for _ in range(200):
        lengths = tuple(random.choice((0, 1, 64, 2048, 2049, 5000)) for _ in range(random.randint(1, 9)))  # fmt: skip
        segment = random.choice((0, 64, 128, 2048))
        pieces = cut(lengths, segment)
        slots = sum(lengths) // C + len(lengths) + 1
        words = Layout(len(lengths), 0, None, 1, slots).progress_words(len(pieces), 3, 6)
        work = Work(pieces, 3, 2, 1, 0, [], [])
        used = [
            bits(work, i, head, at)
            for i, p in enumerate(pieces)
            for head in range(3)
            for at in range(-(-p.chunks // 32))
        ]
        assert len(used) == len(set(used)) and max(used, default=0) < words
        assert min(used, default=len(pieces) * 3 * work.size) >= len(pieces) * 3 * work.size


def test_flashqla_progress_where() -> None:
    """Gradients run beside the recurrences where those leave SMs, but not for short chains, nor a forward alone."""
    trained = Call(**{**BASE, "T": 8192, "H": 4, "HV": 16, "needs_grad": True})
    assert plan(trained).beside == Beside(2, 2, False)  # 64 blocks
    assert plan(trained._replace(needs_grad=False)).beside is None
    assert plan(trained._replace(T=15 * 64)).beside is None
    assert plan(trained._replace(HV=32)).beside == Beside(1, 2, False)  # 96 blocks
    assert plan(trained._replace(HV=40)).beside is None  # 120, which run beside each other
    many = plan(trained._replace(HV=64))
    assert many.beside == Beside(2, 1, True) and many.splits == 2
    assert (many.blocks("states"), many.blocks("backward"), many.blocks("forward")) == (2, 1, 2)
    assert plan(trained._replace(HV=128)).beside is None  # no SM is left
    cut = plan(trained._replace(HV=8, T=32768))
    assert cut.backward_segment and cut.without("backward_segments").beside is None
    assert many.variant("backward") != replace(many, beside=None).variant("backward")
    assert many.variant("forward") == replace(many, beside=None).variant("forward")
