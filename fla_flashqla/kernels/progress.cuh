// SPDX-License-Identifier: MIT
// Device functions for gradients.py beside reverse.py: how far the recurrences are, and who takes which chunk.
//
// `progress` is int32, zero before the kernels start (progress.py has its size). A chain is a piece (a sequence by its number, or a
// segment by its slot) and a q/k head, with its group of value heads. Per chain, `gdr::size(group)` words:
//
//     0 to 3    record: slot of the first chunk + 1, first token + 1, tokens + 1 (0: not known yet), chunks that were taken
//     4 on      chunks that are complete in memory, a pair of counts for each block: of reverse.py (ds, dv), value head by value head and
//               split by split, then, behind 4 words a value head, of states.py (s, Y)
//
// and behind all of them a bit for each chunk: taken. Those of a chain begin in row (slot of the first chunk) / 32 + piece of words, a
// word for each q/k head, so that chains share no word.
//
// reverse.py completes chunks from the last to the first, states.py from the first to the last: what is ready of a chain is an interval.
// Nobody waits for a chunk in particular: a warp of gradients.py looks at all chains, and takes, of one that has chunks ready, the one
// that was completed last, which is likely to be in L2 still. Setting a bit that was not set is what takes a chunk.
//
// Nobody can wait for good. gradients.py starts when all blocks of reverse.py have started, whose blocks start when all of states.py have
// (or when it is complete), and a block that has started keeps its SM. Neither of the two waits for gradients.py. So each count reaches
// the number of chunks, each chunk becomes ready, and a bit, once set, belongs to a warp that has nothing left to wait for.
//
// Order: TMA has stored, the group is waited for, then a release of the count; a count is seen, then a fence, then one from what threads
// see to what TMA does, then TMA loads. Where states.py is complete before reverse.py starts, reverse.py has waited for it, and its counts
// stand for both.

namespace gdr {
__device__ __forceinline__ int size(int group) { return 4 + 8 * group; }

__device__ __forceinline__ int word(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ int2 pair(const int* p) {
  int2 x;
  asm volatile("ld.relaxed.gpu.global.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
  return x;
}
}  // namespace gdr

// What is made of it is not kept in registers.
__device__ __forceinline__ int gdr_anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where the pair of counts of a block of `kernel` (0 reverse.py, 1 states.py) is
__device__ __forceinline__ int gdr_counts(int piece, int value_head, int value_heads, int group, int kernel, int splits, int split) {
  const int head = value_head / group, chain = piece * (value_heads / group) + head;
  return chain * gdr::size(group) + 4 + 4 * group * kernel + 2 * ((value_head - head * group) * splits + split);
}

// By a warp: the record of a chain. Its words need no order: each of them tells whether it is known.
__device__ __forceinline__ void gdr_announce(int* progress, int piece, int head, int heads, int group, int slot, int first, int tokens) {
  if (threadIdx.x % 32 == 0) {
    int* to = progress + (piece * heads + head) * gdr::size(group);
    const int record[3] = {slot, first, tokens};
#pragma unroll
    for (int i = 0; i < 3; ++i)
      asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to + i), "r"(record[i] + 1) : "memory");
  }
}

// By the warp that stores them: `count` chunks are complete, which leaves PENDING groups of TMA stores. All lanes wait, of which one
// has issued them; their writes, and what the lanes stored themselves, come before the count for whoever reads it and fences.
namespace gdr {
template <int PENDING>
__device__ __forceinline__ void publish(int* to, int count) {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
  __syncwarp();
  if (threadIdx.x % 32 == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(count) : "memory");
}
}  // namespace gdr
__device__ __forceinline__ void gdr_publish(int* to, int count) { gdr::publish<1>(to, count); }
__device__ __forceinline__ void gdr_publish_all(int* to, int count) { gdr::publish<0>(to, count); }

namespace gdr {
// How many chunks of a chain reverse.py has completed (from the last on), states.py (from the first), and the record. Returns -1 if all
// were taken, 1 if of those that are ready one was not, else 0. Loads take long: those of a step do not wait for each other.
struct Chain {
  int slot, first, tokens, done, made;
};
__device__ __forceinline__ int ready(const int* at, int group, int of_reverse, int of_states, Chain& chain) {
  int taken, chunks, state = 0;
  asm volatile("ld.relaxed.gpu.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chain.slot), "=r"(chain.first), "=r"(chain.tokens), "=r"(taken)
               : "l"(at)
               : "memory");
  chain.done = chain.made = 1 << 30;
#pragma unroll 1
  for (int i = 0; i < group * max(of_reverse, of_states); i += 2) {
#pragma unroll
    for (int j = i; j < i + 2; ++j) {
      int2 back = {1 << 30, 1 << 30}, forth = back;
      if (j < group * of_reverse) back = pair(at + 4 + 2 * j);
      if (j < group * of_states) forth = pair(at + 4 + 4 * group + 2 * j);
      chain.done = min(chain.done, min(back.x, back.y));
      chain.made = min(chain.made, min(forth.x, forth.y));
    }
    if (min(min(chain.slot, chain.first), chain.tokens) == 0) return 0;
    chunks = (chain.tokens + 62) / 64;  // of tokens - 1
    chain.done = min(chain.done, chunks);
    chain.made = min(chain.made, chunks);
    state = taken == chunks ? -1 : chain.done + chain.made > chunks + taken;
    if (state <= 0) break;
  }
  return state;
}

// By a warp: takes one of the chunks [low, high): the first that is free, or the last. Their bits begin at `bits`, in words that lie
// `stride` apart. Returns the chunk, or -1.
__device__ __forceinline__ int take(int* bits, int stride, int low, int high, bool up) {
  const int end = (high - 1) / 32;
#pragma unroll 1
  for (int passed = low / 32; passed <= end; passed += 32) {
    const int at = up ? passed + lane() : end + low / 32 - passed - lane();
    unsigned free = 0;
    if (low / 32 <= at && at <= end) {
      free = ~word(bits + at * stride);
      if (at == low / 32) free &= ~0u << low % 32;
      if (at == end) free &= ~0u >> (31 - (high - 1) % 32);
    }
    const unsigned any = __ballot_sync(~0u, free != 0);
    if (any == 0) continue;
    int chunk = -1;
    if (lane() == __ffs(any) - 1) {
      while (free != 0 && chunk < 0) {  // others may be as quick
        const int bit = up ? __ffs(free) - 1 : 31 - __clz(free);
        const unsigned before = atomicOr(reinterpret_cast<unsigned*>(bits + at * stride), 1u << bit);
        if ((before >> bit & 1) == 0) chunk = 32 * at + bit;
        free &= ~before;
      }
    }
    return __shfl_sync(~0u, chunk, __ffs(any) - 1);
  }
  return -1;
}
}  // namespace gdr

// By a warp: takes a chunk that is ready, waiting for one if need be. To `item`, first token, tokens (0: all chunks are taken), q/k
// head, slot. `of_reverse` and `of_states` blocks share a value head; with `of_states` 0 states.py is complete. `turn` makes
// warps begin with different chains.
__device__ __forceinline__ void gdr_take(int* progress, int pieces, int heads, int group, int of_reverse, int of_states,
                                         int turn, int* item) {
  asm volatile("" : "+r"(pieces), "+r"(heads), "+r"(group));  // nothing that is made of them is kept in registers
  const int chains = pieces * heads;
  int round = turn * 32 % ((chains + 31) / 32 * 32), ended = 0;  // the first of 32 chains, and chains without an end so far
#pragma unroll 1
  while (ended < chains) {
    int state = -1;
    gdr::Chain own = {0, 0, 0, 0, 0};
    if (round + gdr::lane() < chains)
      state = gdr::ready(progress + (round + gdr::lane()) * gdr::size(group), group, of_reverse, of_states, own);
    const unsigned all = __ballot_sync(~0u, state > 0);
    ended = __all_sync(~0u, state < 0) ? ended + 32 : 0;
    if (all != 0) {
      __syncwarp();  // of what one lane has seen all see
      const unsigned later = all & ~0u << turn % 32 * min(chains, 32) / 32;
      const int from = __ffs(later != 0 ? later : all) - 1, piece = (round + from) / heads;
      const int slot = __shfl_sync(~0u, own.slot, from) - 1, tokens = __shfl_sync(~0u, own.tokens, from) - 1;
      const int low = (tokens + 63) / 64 - __shfl_sync(~0u, own.done, from);
      int* const bits = progress + chains * gdr::size(group) +
                        (slot / 32 + piece) * heads + round + from - piece * heads;
      // up, from what reverse.py has just completed, or down, from what states.py has
      const int chunk = gdr::take(bits, heads, low, __shfl_sync(~0u, own.made, from), of_states == 0 || turn % 2 == 0);
      if (chunk >= 0) {
        if (gdr::lane() == 0) atomicAdd(progress + (round + from) * gdr::size(group) + 3, 1);
        item[0] = __shfl_sync(~0u, own.first, from) - 1 + 64 * chunk;
        item[1] = min(64, tokens - 64 * chunk);
        item[2] = round + from - piece * heads;
        item[3] = slot + chunk;
        // what was stored before the counts, by whomever, comes before what TMA loads from here on
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        __syncwarp();
        asm volatile("fence.proxy.async;" ::: "memory");
        return;
      }
    } else if (ended == 0) {
      __nanosleep(250);
    }
    round = round + 32 < chains ? round + 32 : 0;
  }
  item[0] = item[1] = item[2] = item[3] = 0;
}
