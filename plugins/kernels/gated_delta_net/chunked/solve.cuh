// A solver warp: from a chunk's k, q and gates, which know nothing of the state, to what the state warps need of them.
//
// With r the scale that brings a key to length 1 and D(j, t) the sum of g over (j, t], the u of a chunk solve
//   (I + A) u = beta (v - exp(sum of g up to t) r_t k_t S),   A_tj = beta_t exp(D(j, t)) r_t r_j (k_t . k_j) for j < t,
// and token t's output sees u_j with the weight exp(D(j, t)) r_j s_t (q_t . k_j), j <= t, s the query's scale. The keys
// stay as they came: their products are then exact in bfloat16, and A is as good as fp32.
//
// T = (I + A)^-1 is tame even where keys are parallel and nothing is forgotten: an entry is what one token's v leaves of
// itself in a later u, at most 1. Its diagonal tiles come from forward substitution in fp32, a column a lane; the tile
// below them is -T_11 A_10 T_00 in all parts of the numbers. One product with T then gives u.
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
#pragma unroll
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
  const int lane = threadIdx.x % WARP_SIZE, g = lane / 4;
  if (g / 2 != lane % 4) return;
  target[g] = g % 2 ? tile[0][1] : tile[0][0];
  target[g + 8] = g % 2 ? tile[1][3] : tile[1][2];
}

// What the scores of a block of eight tokens are scaled with, of a lane's row and of its two columns.
struct BlockScales {
  float row_weight, row_scale;        // of the token's row of A, and of its query
  float to;                           // the decay over the block up to the token
  float2 key_scale, key_scale_after;  // of the columns; and with the decay over the block after them
  float within[2];                    // the decay from each column to the row, where both are of this block

  __device__ BlockScales(const Stage& stage, int block) {
    const int g = threadIdx.x % WARP_SIZE / 4, token = block * 8 + g, source = block * 8 + 2 * (threadIdx.x % 4);
    row_weight = stage.coefficients(ROW_WEIGHT)[token];
    row_scale = stage.coefficients(QUERY_SCALE)[token];
    to = stage.coefficients(BLOCK_TO)[token];
    key_scale = stage.coefficient_pair(KEY_SCALE, source);
    const float2 from = stage.coefficient_pair(BLOCK_FROM, source);
    key_scale_after = {key_scale.x * from.x, key_scale.y * from.y};
    for (int i = 0; i < 2; ++i) within[i] = stage.decays_from(source + i)[g];
  }
};

// Scale the scores of a block of eight tokens t by one of eight tokens j: the weights of the outputs to their place, in two
// parts, so that they err less than the outputs' own rounding; those of the keys become A. Within a block later tokens
// are chosen away, for they may not be finite. `between` is the decay over the blocks between the two.
template <int TOKEN_BLOCK, int SOURCE_BLOCK>
__device__ inline void scale_block(const Stage& stage, const BlockScales& row, const BlockScales& column, float between,
                                   Scores& scores) {
  constexpr int TILE = Stage::tile_index(TOKEN_BLOCK / 2, SOURCE_BLOCK / 2);
  constexpr int ROW_HALF = TOKEN_BLOCK % 2, HALF = SOURCE_BLOCK % 2;
  constexpr bool IS_DIAGONAL = TOKEN_BLOCK == SOURCE_BLOCK;
  const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, q = lane % 4;
  const float decay = IS_DIAGONAL ? 1.0f : row.to * between;
  float weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 by_column = IS_DIAGONAL ? column.key_scale : column.key_scale_after;
    const float scale = (i ? by_column.y : by_column.x) * (IS_DIAGONAL ? row.within[i] : 1.0f);
    float& key = scores.keys[TILE][HALF][2 * ROW_HALF + i];
    key = key * (row.row_weight * decay) * scale;
    weights[i] = scores.queries[TILE][HALF][2 * ROW_HALF + i] * (row.row_scale * decay) * scale;
    if (IS_DIAGONAL && 2 * q + i >= g) key = 0.0f;
    if (IS_DIAGONAL && 2 * q + i > g) weights[i] = 0.0f;
  }
  uint32_t parts[2];
  split_pair(weights[0], weights[1], parts);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    unsigned char* tile = stage.base + Stage::weights_offset(TILE, part);
    reinterpret_cast<uint32_t*>(tile + ROW_HALF * 256 + HALF * 128)[lane] = parts[part];
  }
}

__device__ inline void scale_scores(const Stage& stage, Scores& scores) {
  const float over_1 = stage.coefficients(DECAYS)[1], over_2 = stage.coefficients(DECAYS)[2];
  const BlockScales blocks[TOKEN_BLOCKS] = {{stage, 0}, {stage, 1}, {stage, 2}, {stage, 3}};
  scale_block<0, 0>(stage, blocks[0], blocks[0], 1.0f, scores);
  scale_block<1, 0>(stage, blocks[1], blocks[0], 1.0f, scores);
  scale_block<1, 1>(stage, blocks[1], blocks[1], 1.0f, scores);
  scale_block<2, 0>(stage, blocks[2], blocks[0], over_1, scores);
  scale_block<2, 1>(stage, blocks[2], blocks[1], 1.0f, scores);
  scale_block<2, 2>(stage, blocks[2], blocks[2], 1.0f, scores);
  scale_block<3, 0>(stage, blocks[3], blocks[0], over_1 * over_2, scores);
  scale_block<3, 1>(stage, blocks[3], blocks[1], over_2, scores);
  scale_block<3, 2>(stage, blocks[3], blocks[2], 1.0f, scores);
  scale_block<3, 3>(stage, blocks[3], blocks[3], 1.0f, scores);
  // No token sees a later block.
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      unsigned char* weights = stage.base + Stage::weights_offset(Stage::tile_index(tile, tile), part);
      reinterpret_cast<uint32_t*>(weights + 128)[threadIdx.x % WARP_SIZE] = 0;
    }
  }
}

// A of a tile on the diagonal, transposed; of its three blocks that have anything.
__device__ inline void store_diagonal_tile(const Stage& stage, int tile, const float (&A)[2][4]) {
  const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int block = 0; block < 3; ++block) {
    const int half = block / 2, row_half = (block + 1) / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) stage.A_column(tile, half * 8 + 2 * q + i)[row_half * 8 + g] = A[half][row_half * 2 + i];
  }
}

// The diagonal tiles of T, half a warp each: a lane's column is x = e - A x, from the first row on. Lanes of a half read
// the same column of A.
__device__ inline void invert_diagonal(const Stage& stage) {
  const int lane = threadIdx.x % WARP_SIZE, column = lane % MMA_TILE, tile = lane / MMA_TILE;
  const float* columns = stage.A_column(tile, 0);
  float x[MMA_TILE];
#pragma unroll
  for (int i = 0; i < MMA_TILE; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int k = 0; k < MMA_TILE - 1; ++k) {
#pragma unroll
    for (int first = (k + 1) / 4 * 4; first < MMA_TILE; first += 4) {
      const float4 a = *reinterpret_cast<const float4*>(columns + k * A_STRIDE + first);
      if (first > k) x[first] = fmaf(-a.x, x[k], x[first]);
      if (first + 1 > k) x[first + 1] = fmaf(-a.y, x[k], x[first + 1]);
      if (first + 2 > k) x[first + 2] = fmaf(-a.z, x[k], x[first + 2]);
      x[first + 3] = fmaf(-a.w, x[k], x[first + 3]);
    }
  }
  __syncwarp();  // everybody has read A where T goes now
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t parts[STATE_PARTS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair[STATE_PARTS];
      split_pair(x[half * 8 + 2 * i], x[half * 8 + 2 * i + 1], pair);
#pragma unroll
      for (int part = 0; part < STATE_PARTS; ++part) parts[part][i] = pair[part];
    }
#pragma unroll
    for (int part = 0; part < STATE_PARTS; ++part) {
      unsigned char* target = stage.base + Stage::inverse_offset(Stage::tile_index(tile, tile), part);
      Vector16* row = reinterpret_cast<Vector16*>(target + half * 256 + column / 8 * 128 + column % 8 * 16);
      *row = {parts[part][0], parts[part][1], parts[part][2], parts[part][3]};
    }
  }
}

// A tile as it leaves a product, in parts: operand A of another one. Transposed it is operand B, in another order.
struct TileParts {
  uint32_t words[STATE_PARTS][4];

  __device__ explicit TileParts(const float (&tile)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair[STATE_PARTS];
      split_pair(tile[i / 2][i % 2 * 2], tile[i / 2][i % 2 * 2 + 1], pair);
#pragma unroll
      for (int part = 0; part < STATE_PARTS; ++part) words[part][i] = pair[part];
    }
  }
};

// A tile's sums by parts of one factor, so that products of one sum are apart and overlap.
struct PartSums {
  float tiles[STATE_PARTS][2][4];

  // To the sums of the greatest part.
  __device__ void add_up() {
#pragma unroll
    for (int part = STATE_PARTS - 1; part > 0; --part) {
#pragma unroll
      for (int i = 0; i < 8; ++i) tiles[part - 1][i / 4][i % 4] += tiles[part][i / 4][i % 4];
    }
  }
};

// The tile of T below the diagonal, by its transpose -(T_00^T A_10^T) T_11^T: so each product is an operand of the next.
// Products of two small parts are left out, small ones come first.
__device__ inline void invert_below_diagonal(const Stage& stage, const float (&A)[2][4]) {
  const int lane = threadIdx.x % WARP_SIZE;
  const uint32_t first = stage.address + lane * 16;
  const TileParts A_parts(A);
  PartSums sums = {};
#pragma unroll
  for (int which = STATE_PARTS - 1; which >= 0; --which) {
    uint32_t T[4];
    ptx::load_matrices(T, first + Stage::inverse_offset(Stage::tile_index(0, 0), which));
#pragma unroll
    for (int other = STATE_PARTS - 1 - which; other >= 0; --other) {
      const uint32_t(&right)[4] = A_parts.words[other];
#pragma unroll
      for (int half = 0; half < 2; ++half) ptx::mma_bf16(sums.tiles[which][half], T, right[half], right[2 + half]);
    }
  }
  sums.add_up();
  const TileParts X(sums.tiles[0]);
  sums = {};
#pragma unroll
  for (int which = STATE_PARTS - 1; which >= 0; --which) {
    uint32_t T[4];
    ptx::load_transposed(T, first + Stage::inverse_offset(Stage::tile_index(1, 1), which));
#pragma unroll
    for (int other = STATE_PARTS - 1 - which; other >= 0; --other) {
      multiply_tile(sums.tiles[which], X.words[other], T);
    }
  }
  sums.add_up();
  const float(&negative)[2][4] = sums.tiles[0];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t parts[STATE_PARTS];
    split_pair(-negative[i / 2][i % 2 * 2], -negative[i / 2][i % 2 * 2 + 1], parts);
#pragma unroll
    for (int part = 0; part < STATE_PARTS; ++part) {
      unsigned char* tile = stage.base + Stage::inverse_offset(Stage::tile_index(1, 0), part);
      reinterpret_cast<uint32_t*>(tile + i / 2 * 256 + i % 2 * 128)[lane] = parts[part];
    }
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
  scale_scores(stage, scores);
  store_diagonal_tile(stage, 0, scores.keys[0]);
  store_diagonal_tile(stage, 1, scores.keys[2]);
  __syncwarp();  // A is there
  invert_diagonal(stage);
  __syncwarp();  // T is there, on the diagonal
  invert_below_diagonal(stage, scores.keys[1]);
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
    warp_arrive(shared.is_solved(place.stage()));
    loader.prefetch(next);
    chunk = next;
  }
}

}  // namespace replay
