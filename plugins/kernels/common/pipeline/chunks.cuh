// Which heads a thread block works on, in which chunks.
//
// A *chunk* is up to CHUNK_HEADS neighbouring heads of one row of the step that share what comes once for all heads of
// a group. Chunks are taken by thread blocks as they come to them. Equal shares would end far apart: a flush writes what
// others only read, a row without a checkpoint reads none, and multiprocessors do not all get the same part of the
// bandwidth.
#pragma once
#include "common/dependent_launch.cuh"
#include "common/lanes.cuh"
#include "common/pipeline/row_lengths.cuh"

namespace replay {

static_assert(CHUNK_HEADS % TAIL_PARTS == 0, "the last chunks are equal parts of whole ones");

// Written to its buffer by the loader warp that took it, read by everybody else.
struct Chunk {
  RowLengths lengths;
  int row;  // of the step
  int first_head;
  int num_heads;  // 0: the thread block has no more chunks
};

// How the heads of all rows are cut into chunks, by their number: whole chunks first, then, for thread blocks to end at
// about the same time, some of a TAIL_PARTS-th. Where whole ones are fewer than the blocks all are as small as it takes
// to give each block one. The first gridDim.x chunks are the blocks' own; the others are taken as blocks come to them.
template <int NUM_HEADS>
struct ChunkPlan {
  int num_whole, small_heads, num_chunks;
  RingRows ring;

  template <typename Params>
  __device__ explicit ChunkPlan(const Params& params) : ring(params.ring_rows) {
    const int num_heads = params.num_rows * NUM_HEADS, num_blocks = gridDim.x;
    const int most_whole = num_heads / CHUNK_HEADS;
    if (most_whole >= num_blocks) {
      num_whole = max(num_blocks, most_whole - TAIL_CHUNKS * num_blocks);
      small_heads = CHUNK_HEADS / TAIL_PARTS;
      num_chunks = num_whole + (num_heads - num_whole * CHUNK_HEADS) / (CHUNK_HEADS / TAIL_PARTS);
    } else {
      num_whole = small_heads = 0;
      // Unrolled, so that each division is by a constant.
#pragma unroll
      for (int heads = CHUNK_HEADS; heads > 0; heads /= 2) {
        if (small_heads > 0 || heads * num_blocks > num_heads) continue;
        small_heads = heads;
        num_chunks = num_heads / heads;
      }
    }
  }

  __device__ int row_of(int index) const { return first_head_of(index) / NUM_HEADS; }

  __device__ Chunk at(int index, const RowLengths& lengths) const {
    Chunk chunk;
    chunk.lengths = lengths;
    chunk.row = row_of(index);
    chunk.first_head = first_head_of(index) % NUM_HEADS;
    chunk.num_heads = index < num_whole ? CHUNK_HEADS : small_heads;
    return chunk;
  }

 private:
  // In the line of all rows' heads.
  __device__ int first_head_of(int index) const {
    const int whole = min(index, num_whole);
    return whole * CHUNK_HEADS + (index - whole) * small_heads;
  }
};

// The chunks of a thread block, for the one warp that takes them. They are drawn two ahead, and lengths are read one
// ahead: both take long behind the tiles that are on their way. Blocks draw until they draw a chunk that is not there,
// num_chunks draws in all, which take params.num_taken round to 0 again. When there is nothing left to draw the next
// kernel may start: it prepares itself while this one finishes.
template <int NUM_HEADS, typename Params>
class ChunkTaker {
 public:
  __device__ ChunkTaker(const Params& params, const ChunkPlan<NUM_HEADS>& plan)
      : params(params), plan(plan), index(blockIdx.x), is_drawing(plan.num_chunks > static_cast<int>(gridDim.x)) {
    raw = RawLengths::read<Reading::FINAL>(params, plan.row_of(index));
    draw_or_end();
  }

  // Its num_heads is 0 after the last one.
  __device__ Chunk chunk() const {
    if (index >= plan.num_chunks) return {{}, 0, 0, 0};
    return plan.at(index, raw.clamped(params, plan.ring));
  }

  __device__ void advance() {
    if (!is_drawing) {
      index = plan.num_chunks;
      return;
    }
    index = static_cast<int>(gridDim.x) + __shfl_sync(FULL_WARP, drawn, 0);
    is_drawing = index < plan.num_chunks;
    if (is_drawing) raw = RawLengths::read<Reading::FINAL>(params, plan.row_of(index));
    draw_or_end();
  }

 private:
  const Params& params;
  const ChunkPlan<NUM_HEADS>& plan;
  int index, drawn = 0;
  bool is_drawing;
  RawLengths raw;

  __device__ void draw_or_end() {
    if (!is_drawing) {
      let_next_start();
    } else if (threadIdx.x % WARP_SIZE == 0) {
      drawn = static_cast<int>(ptx::increment_to(params.num_taken, plan.num_chunks - 1));
    }
  }
};

}  // namespace replay
