// The producer, one thread: brings state tiles to shared memory, as far ahead as there is room.
//
// Tiles go by bulk copies, which need no registers and no thread that waits for them.
#pragma once
#include "gated_delta_net/pipeline/work.cuh"

namespace replay {

// Bring a chunk's token rows to the cache.
__device__ inline void prefetch_rows(const ChunkTensors& tensors) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const int lane = threadIdx.x % WARP_SIZE, num_values = tensors.chunk.num_heads * VALUE_DIM;
  if (lane < lengths.pending) {
    const int line = tensors.pending_line(lane);
    ptx::prefetch_line(tensors.g_ring(line, 0));
    ptx::prefetch_bulk(tensors.k_ring(line), KEY_DIM * 2);
    ptx::prefetch_bulk(tensors.u_ring(line), num_values * 4);
  }
  // By other lanes than most pending rows.
  const int token = WARP_SIZE - 1 - lane;
  if (token >= lengths.num_tokens) return;
  ptx::prefetch_line(tensors.raw_gate(GATE_A, token, 0));
  ptx::prefetch_line(tensors.raw_gate(GATE_B, token, 0));
  ptx::prefetch_bulk(tensors.k(token), KEY_DIM * 2);
  ptx::prefetch_bulk(tensors.q(token), KEY_DIM * 2);
  ptx::prefetch_bulk(tensors.v(token), num_values * 2);
}

// The producer's warp, while the kernel before this one may still run: bring the block's first chunk to the cache, by a
// guess of the lengths; token rows first, behind the tiles they would come late.
__device__ inline void prefetch_first_chunk(const GatedDeltaNetParams& params, const HeadPlan& plan) {
  const RawLengths guess = RawLengths::read<Reading::GUESS>(params, plan.row_of(blockIdx.x));
  const Chunk chunk = plan.at(blockIdx.x, guess.clamped(params, plan.ring));
  if (!chunk.lengths.is_active()) return;
  const ChunkTensors tensors{params, chunk};
  prefetch_rows(tensors);
  __syncwarp();
  if (threadIdx.x % WARP_SIZE == 0 && chunk.lengths.has_state()) {
    ptx::prefetch_bulk(tensors.state(), chunk.num_heads * KEY_DIM * STATE_ROW_BYTES);
  }
}

// The stages of each group in turn, a head at a time. All groups are at the same place of their stages, but for those
// that have had their head of a round already.
struct HeadTurn {
  int group = 0;
  Turn<GROUP_STAGES> first;  // stage of this head's first tile

  __device__ void next() {
    if (++group < NUM_GROUPS) return;
    group = 0;
    first.advance(TILES_PER_HEAD);
  }
};

// One tile; one that is not needed passes through its stage empty.
__device__ inline void bring_tile(const PipelineShared& shared, const unsigned char* rows, bool is_read, int stage,
                                  uint32_t parity_before, uint64_t policy) {
  const uint32_t is_full = shared.is_stage_full(stage);
  ptx::barrier_wait(shared.is_stage_free(stage), parity_before);
  ptx::barrier_expect(is_full, is_read ? PARTS * PART_BYTES : 0);
  if (!is_read) return;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    ptx::copy_bulk(shared.address + stage * STAGE_BYTES + part * PART_STRIDE, rows + part * PART_ROWS * STATE_ROW_BYTES,
                   PART_BYTES, is_full, policy);
  }
}

__device__ inline void produce(const GatedDeltaNetParams& params, const PipelineShared& shared) {
  const uint64_t policy = ptx::reading_policy();
  HeadTurn head;
#pragma unroll 1
  for (Turn<CHUNK_BUFFERS> turn;; turn.advance(1)) {
    ptx::barrier_wait(shared.is_chunk_known(turn.index()), turn.parity());
    const Chunk chunk = shared.buffer(turn.index()).chunk();
    if (chunk.num_heads == 0) return;
    const unsigned char* state = reinterpret_cast<const unsigned char*>(ChunkTensors{params, chunk}.state());
    const bool is_read = chunk.lengths.is_state_read();
#pragma unroll 1
    for (int i = 0; i < chunk.num_heads; ++i, head.next()) {
      Turn<GROUP_STAGES> stage = head.first;
#pragma unroll 1
      for (int tile = 0; tile < TILES_PER_HEAD; ++tile, stage.advance(1)) {
        bring_tile(shared, state + tile * PART_BYTES, is_read, head.group * GROUP_STAGES + stage.index(),
                   stage.parity_before(), policy);
      }
      state += KEY_DIM * STATE_ROW_BYTES;
    }
  }
}

}  // namespace replay
