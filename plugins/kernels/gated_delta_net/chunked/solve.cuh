// A solver warp: from a chunk's k, q and gates, which know nothing of the state, to what the state warps need of them.
//
// With r the scale that brings a key to length 1 and D(j, t) the sum of g over (j, t], the u of a chunk solve
//   (I + A) u = beta (v - exp(sum of g up to t) r_t k_t S),   A_tj = beta_t exp(D(j, t)) r_t r_j (k_t . k_j) for j < t,
// and token t's output sees u_j with the weight exp(D(j, t)) r_j s_t (q_t . k_j), j <= t, s the query's scale. The keys
// stay as they came: their products are then exact in bfloat16, and A is as good as fp32.
//
// T = (I + A)^-1 is tame even where keys are parallel and nothing is forgotten: an entry is what one token's v leaves of
// itself in a later u, at most 1. It comes from forward substitution in fp32, a column a lane. One product with T then
// gives u.
//
// Loops are rolled up: an SM keeps 32 KiB of instructions at hand, and what the state warps execute takes half of that.
// Where both did not fit, all warps spent more time on fetching instructions than on executing them.
#pragma once
#include "gated_delta_net/chunked/gates.cuh"

namespace replay {

// Products of a chunk's tokens, tiles of 16 tokens t (rows) by 16 tokens j <= t (two blocks of columns).
struct Scores {
  float keys[TILE_PAIRS][2][4];
  float queries[TILE_PAIRS][2][4];
  float query_squares[TOKEN_TILES][2][4];  // q_t . q_j of a tile with itself, for its diagonal
};

// sums += a b^T, b as two blocks of eight rows: words 2 i and 2 i + 1 are operand B of block i.
__device__ inline void multiply_tile(float (&sums)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) ptx::mma_bf16(sums[half], a, b[2 * half], b[2 * half + 1]);
}

__device__ inline void compute_scores(const Stage& stage, Scores& scores) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int rows_first = Stage::piece_offset(lane % 16, lane / 16);
  const int pieces_first = Stage::piece_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll 2
  for (int step = 0; step < KEY_DIM / MMA_TILE; ++step) {
    // Operands A and B hold the same numbers, in registers of another order.
    uint32_t k_left[TOKEN_TILES][4], k_right[TOKEN_TILES][4], q_left[TOKEN_TILES][4], q_right[TOKEN_TILES][4];
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
      const uint32_t left = stage.address + (rows_first ^ (step * 32)) + i * KEY_TILE_BYTES;
      const uint32_t right = stage.address + (pieces_first ^ (step * 32)) + i * KEY_TILE_BYTES;
      ptx::load_matrices(k_left[i], left + StageOffsets::K);
      ptx::load_matrices(k_right[i], right + StageOffsets::K);
      ptx::load_matrices(q_left[i], left + StageOffsets::Q);
      ptx::load_matrices(q_right[i], right + StageOffsets::Q);
    }
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
      multiply_tile(scores.query_squares[i], q_left[i], q_right[i]);
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        multiply_tile(scores.keys[Stage::tile_index(i, j)], k_left[i], k_right[j]);
        multiply_tile(scores.queries[Stage::tile_index(i, j)], q_left[i], k_right[j]);
      }
    }
  }
}

// The diagonal of a tile: a lane has rows g and g + 8, and some have the columns of the same number.
__device__ inline void store_diagonal(const float (&tile)[2][4], float* target) {
  const int lane = fresh_lane(), g = lane / 4;
  if (g / 2 != lane % 4) return;
  target[g] = g % 2 ? tile[0][1] : tile[0][0];
  target[g + 8] = g % 2 ? tile[1][3] : tile[1][2];
}

// Where the scores of a block of eight tokens t by one of eight tokens j stand, of a lane's row and two columns.
struct BlockPlace {
  int tile, token_block, source_block;

  __device__ BlockPlace(int token_block, int source_block)
      : tile(Stage::tile_index(token_block / 2, source_block / 2)),
        token_block(token_block),
        source_block(source_block) {}

  // In A, transposed: the other column is A_STRIDE further on.
  __device__ float* key(const Stage& stage) const {
    const int lane = threadIdx.x % WARP_SIZE;
    return stage.A_column(source_block * 8 + 2 * (lane % 4)) + token_block * 8 + lane / 4;
  }
  // Of the first part of the two columns' weights; the second one is TILE_BYTES further on.
  __device__ uint32_t* weights(const Stage& stage) const {
    const int offset = Stage::weights_offset(tile, 0) + token_block % 2 * 256 + source_block % 2 * 128;
    return reinterpret_cast<uint32_t*>(stage.base + offset) + threadIdx.x % WARP_SIZE;
  }
};

// The raw scores, to where they are scaled: those of keys to A, those of queries to the place of their weights.
__device__ inline void store_scores(const Stage& stage, const Scores& scores) {
#pragma unroll
  for (int token_block = 0; token_block < TOKEN_BLOCKS; ++token_block) {
#pragma unroll
    for (int source_block = 0; source_block < TOKEN_BLOCKS; ++source_block) {
      if (source_block / 2 > token_block / 2) continue;
      const BlockPlace place(token_block, source_block);
      // No token sees a later block.
      const bool is_seen = source_block <= token_block;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float query = scores.queries[place.tile][source_block % 2][token_block % 2 * 2 + i];
        const float key = scores.keys[place.tile][source_block % 2][token_block % 2 * 2 + i];
        place.weights(stage)[i * (TILE_BYTES / 4)] = is_seen ? float_to_bits(query) : 0;
        if (is_seen) place.key(stage)[i * A_STRIDE] = key;
      }
    }
  }
}

// A block's scores on their way from raw to scaled, two numbers of a lane.
struct BlockScores {
  float* key;
  uint32_t* words;
  float keys[2], weights[2];

  // Of eight tokens t by eight tokens j. Within a block later tokens are chosen away, for they may not be finite.
  __device__ BlockScores(const Stage& stage, int token_block, int source_block) {
    const BlockPlace place(token_block, source_block);
    key = place.key(stage);
    words = place.weights(stage);
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, q = lane % 4;
    const int token = token_block * 8 + g, source = source_block * 8 + 2 * q;
    const bool is_diagonal = token_block == source_block;
    // Between blocks: over j's block after j, over the whole ones between them, over t's block up to t.
    float decay = stage.coefficients(BLOCK_TO)[token];
#pragma unroll
    for (int i = 1; i < TOKEN_BLOCKS - 1; ++i) {
      const float whole = stage.coefficients(DECAYS)[i];
      decay *= source_block < i && i < token_block ? whole : 1.0f;
    }
    const float row_weight = stage.coefficients(ROW_WEIGHT)[token], row_scale = stage.coefficients(QUERY_SCALE)[token];
    const float2 key_scale = stage.coefficient_pair(KEY_SCALE, source);
    const float2 from = stage.coefficient_pair(BLOCK_FROM, source);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float within = stage.decays_from(source + i)[g];
      const float scale = (i ? key_scale.y : key_scale.x) * (is_diagonal ? within : decay * (i ? from.y : from.x));
      keys[i] = key[i * A_STRIDE] * row_weight * scale;
      weights[i] = bits_to_float(words[i * (TILE_BYTES / 4)]) * row_scale * scale;
      if (is_diagonal && 2 * q + i >= g) keys[i] = 0.0f;
      if (is_diagonal && 2 * q + i > g) weights[i] = 0.0f;
    }
  }

  // To where the raw ones stood: of keys A; of queries the weights of outputs, in two parts, so that they err less than
  // the outputs' own rounding.
  __device__ void store() const {
    uint32_t parts[2];
    split_pair(weights[0], weights[1], parts);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      key[i * A_STRIDE] = keys[i];
      words[i * (TILE_BYTES / 4)] = parts[i];
    }
  }
};

// Two blocks at a time, so that one fills the time in which the other waits.
__device__ inline void scale_scores(const Stage& stage) {
  // The numbers of the blocks j <= t, two bits each.
  constexpr uint32_t TOKEN_BLOCK = 0b11'11'11'11'10'10'10'01'01'00u, SOURCE_BLOCK = 0b11'10'01'00'10'01'00'01'00'00u;
#pragma unroll 1
  for (int i = 0; i < TOKEN_BLOCKS * (TOKEN_BLOCKS + 1); i += 4) {
    const uint32_t token_blocks = TOKEN_BLOCK >> i, source_blocks = SOURCE_BLOCK >> i;
    const BlockScores first(stage, token_blocks & 3, source_blocks & 3);
    const BlockScores second(stage, token_blocks >> 2 & 3, source_blocks >> 2 & 3);
    first.store();
    second.store();
  }
}

// T by forward substitution in fp32: a lane's column is x = e - A x, from the first row on, ROWS at a time. Lanes read the
// same columns of A; when all have read those of eight rows, the parts of T take the place of columns before.
__device__ inline void invert(const Stage& stage) {
  constexpr int ROWS = 4, HALF = CHUNK_SIZE / 2;
  const int column = fresh_lane();
  float x[CHUNK_SIZE] = {};  // from the first of these rows on; those behind the chunk's last row come to nothing
  uint32_t parts[STATE_PARTS][4];
#pragma unroll 1
  for (int first = 0; first < CHUNK_SIZE; first += ROWS) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) x[i] += first + i == column ? 1.0f : 0.0f;
    const float* columns = stage.A_column(first) + first;
    const auto subtract = [&](int k, int i) {
      const float4 a = *reinterpret_cast<const float4*>(columns + k * A_STRIDE + i);
      if (i > k) x[i] = fmaf(-a.x, x[k], x[i]);
      if (i + 1 > k) x[i + 1] = fmaf(-a.y, x[k], x[i + 1]);
      if (i + 2 > k) x[i + 2] = fmaf(-a.z, x[k], x[i + 2]);
      x[i + 3] = fmaf(-a.w, x[k], x[i + 3]);
    };
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
#pragma unroll
      for (int i = k + 1 < ROWS ? 0 : ROWS; i < HALF; i += 4) subtract(k, i);
    }
    if (first < HALF) {
#pragma unroll
      for (int k = 0; k < ROWS; ++k) {
#pragma unroll
        for (int i = HALF; i < CHUNK_SIZE; i += 4) subtract(k, i);
      }
    }
    uint32_t low[STATE_PARTS], high[STATE_PARTS];
    split_pair(x[0], x[1], low);
    split_pair(x[2], x[3], high);
#pragma unroll
    for (int part = 0; part < STATE_PARTS; ++part) {
      // Four rows before and these.
      parts[part][0] = parts[part][2];
      parts[part][1] = parts[part][3];
      parts[part][2] = low[part];
      parts[part][3] = high[part];
    }
    __syncwarp();  // everybody has read A where T goes now
    const int block = first / 8;
    if (first % 8 != 0 && column / MMA_TILE <= block / 2) {  // no u rests on later tiles
#pragma unroll
      for (int part = 0; part < STATE_PARTS; ++part) {
        unsigned char* row = stage.base + Stage::inverse_offset(block, column / 8, part) + column % 8 * 16;
        *reinterpret_cast<Vector16*>(row) = {parts[part][0], parts[part][1], parts[part][2], parts[part][3]};
      }
    }
#pragma unroll
    for (int i = 0; i < CHUNK_SIZE; ++i) x[i] = i + ROWS < CHUNK_SIZE ? x[i + ROWS] : 0.0f;
  }
}

// Scores, and with the squares among them the coefficients. A key whose square is not finite is taken out of the chunk, so
// that all that is made of keys stays finite; if it is not finite itself its token is marked, by a beta that is not.
__device__ inline void weigh_chunk(const Stage& stage, LaneGates& gates, Scores& scores) {
  const int lane = threadIdx.x % WARP_SIZE;
  float* k_squares = stage.coefficients(KEY_SCALE);
  float* q_squares = stage.coefficients(QUERY_SCALE);
#pragma unroll 1
  for (bool is_spoilt = true; is_spoilt;) {
    scores = {};
    compute_scores(stage, scores);
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
      store_diagonal(scores.keys[Stage::tile_index(i, i)], k_squares + i * MMA_TILE);
      store_diagonal(scores.query_squares[i], q_squares + i * MMA_TILE);
    }
    __syncwarp();
    const bool is_key_spoilt = !is_finite(k_squares[lane]);
    is_spoilt = __any_sync(FULL_WARP, is_key_spoilt);
    if (is_key_spoilt) {
      Vector16* key = reinterpret_cast<Vector16*>(stage.base + StageOffsets::K + lane * KEY_ROW_BYTES);
#pragma unroll 1
      for (int i = 0; i < KEY_ROW_BYTES / 16; ++i) {
        if (has_non_finite(key[i].words)) gates.spoil();
        key[i] = {};
      }
    }
    __syncwarp();
  }
  store_coefficients(stage, gates, k_squares[lane], q_squares[lane]);
  __syncwarp();
}

// From the chunk's rows in its stage. Pending rows pass through the same arithmetic; what has no meaning for them, all
// but coefficients, is not used.
__device__ inline void solve_chunk(const Stage& stage, LaneGates& gates) {
  Scores scores;
  weigh_chunk(stage, gates, scores);
  store_scores(stage, scores);
  scale_scores(stage);  // by each lane those that it has stored
  __syncwarp();  // A is there
  invert(stage);
}

// Every NUM_SOLVERS-th chunk, each as soon as its stage is free.
__device__ inline void solve(const Tensors& tensors, const ChunkShared& shared, int solver) {
  const Row& row = tensors.row;
  const int num_chunks = Chunk::num_chunks(row), num_ring_chunks = Chunk::num_ring_chunks(row);
  int first_of_window = solver;
  while (first_of_window < num_ring_chunks) first_of_window += NUM_SOLVERS;
  ChunkLoader loader(tensors, Chunk(row, first_of_window).first);
  const GateWeights weights(tensors);
  Chunk chunk(row, solver);
  RawGates raw = loader.load_gates(chunk);
#pragma unroll 1
  for (int index = solver; index < num_chunks; index += NUM_SOLVERS) {
    const Chunk next(row, index + NUM_SOLVERS);
    const Place place(index);
    const Stage stage = shared.stage(place.stage());
    // In the first round a stage is free, as after a phase before.
    ptx::barrier_wait(shared.is_free(place.stage()), place.parity() ^ 1);
    loader.load(stage, chunk);
    LaneGates gates(weights, chunk, raw);
    store_decays(stage, gates);
    raw = loader.load_gates(next);
    ptx::wait_for_copies();
    __syncwarp();  // the chunk's rows and decays are there
    solve_chunk(stage, gates);
    arrive_as_warp(shared.is_solved(place.stage()));
    loader.prefetch(next);
    chunk = next;
  }
}

}  // namespace replay
