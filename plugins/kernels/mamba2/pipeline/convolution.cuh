// x, B and C of a step come raw: a team of warps brings those of a chunk's window through their convolution, in place,
// and appends the raw rows to the ring of the convolution.
//
// A lane has a few *pairs* of neighbouring channels: a word of each token row, taps in 16 bytes. What it needs beside
// the window comes from memory to registers, and is under way before the window is waited for.
#pragma once
#include "common/mma.cuh"
#include "common/silu.cuh"
#include "mamba2/params_with_conv.h"
#include "mamba2/pipeline/work.cuh"

namespace replay {

static_assert(D_CONV == 4, "the taps of a pair are one vector");
constexpr int CONV_DIM = N_HEADS * HEAD_DIM + 2 * N_GROUPS * D_STATE;
constexpr int CONV_HISTORY = D_CONV - 1;
constexpr int TEAM_LANES = TEAM_WARPS * WARP_SIZE;
static_assert(TEAM_LANES == D_STATE / 2, "each lane of a team has one pair of B and one of C");
// With longer windows registers are too few: pairs are computed one after the other, and what they need is not under
// way while something else is done.
constexpr bool IS_WINDOW_SHORT = WINDOW <= 4;
constexpr int X_PAIRS = (CHUNK_HEADS * HEAD_DIM / 2 + TEAM_LANES - 1) / TEAM_LANES;  // of a lane

// Rows of the convolution's ring that a chunk reads and writes, and where a lane's channels are.
struct ConvTensors {
  const Mamba2WithConvParams& params;
  const Chunk& chunk;
  const unsigned char* slot;
  int window_line;  // of the ring: where the window's first token goes

  __device__ ConvTensors(const Mamba2WithConvParams& params, const Chunk& chunk, const RingRows& ring)
      : params(params), chunk(chunk), window_line(ring.row_of(chunk.lengths.past())) {
    slot = static_cast<const unsigned char*>(params.conv_ring) + 2 * chunk.lengths.slot * params.conv_ring_stride_slot;
  }

  __device__ int x_channel() const { return chunk.first_head * HEAD_DIM; }
  __device__ int B_channel() const { return N_HEADS * HEAD_DIM + chunk.first_head / HEADS_PER_GROUP * D_STATE; }
  __device__ int C_channel() const { return B_channel() + N_GROUPS * D_STATE; }
  __device__ bool has_tokens() const { return chunk.lengths.num_tokens > 0; }
  // A group's rows of B and C are appended with the group's first head alone.
  __device__ bool is_group_start() const { return chunk.first_head % HEADS_PER_GROUP == 0; }
  // Is there a token so long before the window? Positions below 0 are zero.
  __device__ bool has_history(int age) const { return chunk.lengths.past() >= age; }
  __device__ const unsigned char* history(int age) const {
    const int line = window_line - age;
    return row(line < 0 ? line + params.conv_ring_rows : line);
  }
  __device__ unsigned char* window(int token) const {
    const int line = window_line + token;
    return const_cast<unsigned char*>(row(line < params.conv_ring_rows ? line : line - params.conv_ring_rows));
  }
  __device__ const unsigned char* taps(int channel) const {
    return static_cast<const unsigned char*>(params.conv_weight) + channel * (D_CONV * 2);
  }
  __device__ bool has_bias() const { return params.conv_bias != nullptr; }
  __device__ const unsigned char* bias(int channel) const {
    return static_cast<const unsigned char*>(params.conv_bias) + channel * 2;
  }

 private:
  __device__ const unsigned char* row(int line) const { return slot + line * (CONV_DIM * 2); }
};

// PAIRS pairs of a lane: what they need beside the window, and where that stands.
template <int PAIRS>
struct ConvPairs {
  Vector16 taps[PAIRS];  // two words of the first channel, then two of the second
  uint32_t bias[PAIRS];
  uint32_t history[PAIRS][CONV_HISTORY];  // oldest first; zero before position 0

  // From the channels on that `channel_of` gives of each pair. Waits for nothing.
  template <typename ChannelOf>
  __device__ void load(const ConvTensors& tensors, ChannelOf channel_of) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      taps[i] = ptx::load(reinterpret_cast<const Vector16*>(tensors.taps(channel_of(i))));
      bias[i] = tensors.has_bias() ? ptx::load(reinterpret_cast<const uint32_t*>(tensors.bias(channel_of(i)))) : 0;
    }
#pragma unroll
    for (int k = 0; k < CONV_HISTORY; ++k) {
      const int age = CONV_HISTORY - k;
      const unsigned char* row = tensors.history(age);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        history[i][k] = 0;
        if (tensors.has_history(age)) {
          history[i][k] = ptx::load(reinterpret_cast<const uint32_t*>(row + channel_of(i) * 2));
        }
      }
    }
  }

  // The convolution of a pair, at all tokens of a window, of which `rows` are the raw ones. The sums are those of
  // causal_conv1d.
  __device__ void convolve(int i, const uint32_t (&rows)[WINDOW], uint32_t (&y)[WINDOW]) const {
#pragma unroll
    for (int token = 0; token < WINDOW; ++token) {
      float low = low_bf16(bias[i]), high = high_bf16(bias[i]);
#pragma unroll
      for (int k = 0; k < D_CONV; ++k) {
        const uint32_t first = taps[i].words[k / 2], second = taps[i].words[2 + k / 2];
        const int row = token + k - CONV_HISTORY;
        const uint32_t input = row < 0 ? history[i][token + k] : rows[row];
        low += (k % 2 == 0 ? low_bf16(first) : high_bf16(first)) * low_bf16(input);
        high += (k % 2 == 0 ? low_bf16(second) : high_bf16(second)) * high_bf16(input);
      }
      y[token] = pack_bf16(silu(low), silu(high));
    }
  }

  // Convolve in place and append. Of each pair `window_of` gives its first word in the buffer, whose rows are STRIDE
  // bytes apart, and `is_own` says whether it is one. Some pairs are computed side by side, and then stored.
  template <int STRIDE, typename WindowOf, typename ChannelOf, typename IsOwn>
  __device__ void run(const ConvTensors& tensors, bool is_appended, WindowOf window_of, ChannelOf channel_of,
                      IsOwn is_own) const {
    constexpr int AT_ONCE = IS_WINDOW_SHORT ? PAIRS : 1;
#pragma unroll
    for (int first = 0; first < PAIRS; first += AT_ONCE) {
      uint32_t rows[AT_ONCE][WINDOW], y[AT_ONCE][WINDOW];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const bool is_read = is_own(first + i);  // what is another lane's may be written at this moment
        const unsigned char* window = window_of(first + i);
#pragma unroll
        for (int token = 0; token < WINDOW; ++token) {
          rows[i][token] = is_read ? *reinterpret_cast<const uint32_t*>(window + token * STRIDE) : 0;
        }
        convolve(first + i, rows[i], y[i]);
      }
#pragma unroll
      for (int token = 0; token < WINDOW; ++token) {
        if (token >= tensors.chunk.lengths.num_tokens) break;
        unsigned char* row = tensors.window(token);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          if (!is_own(first + i)) continue;
          *reinterpret_cast<uint32_t*>(window_of(first + i) + token * STRIDE) = y[i][token];
          if (is_appended) ptx::store(reinterpret_cast<uint32_t*>(row + channel_of(first + i) * 2), rows[i][token]);
        }
      }
    }
  }
};

// A lane's part of a chunk. `lane` counts in the team.
struct ConvLane {
  ConvPairs<2> BC;
  ConvPairs<X_PAIRS> x;

  // Whether there are window tokens is asked by the caller.
  __device__ void load_B_and_C(const ConvTensors& tensors, int lane) {
    BC.load(tensors, [&](int i) { return BC_channel(tensors, i, lane); });
  }
  __device__ void load_x(const ConvTensors& tensors, int lane) {
    x.load(tensors, [&](int i) { return tensors.x_channel() + x_place(tensors, i, lane); });
  }
  __device__ void convolve_B_and_C(const ConvTensors& tensors, ChunkBuffer buffer, int lane) const {
    BC.run<BC_ROW_BYTES>(
        tensors, tensors.is_group_start(),
        [&](int i) { return (i == 0 ? buffer.B(tensors.chunk.lengths.pending) : buffer.C(0)) + lane * 4; },
        [&](int i) { return BC_channel(tensors, i, lane); }, [](int) { return true; });
  }
  __device__ void convolve_x(const ConvTensors& tensors, ChunkBuffer buffer, int lane) const {
    x.run<X_ROW_BYTES>(
        tensors, true,
        [&](int i) { return buffer.x(tensors.chunk.lengths.pending) + x_place(tensors, i, lane) * 2; },
        [&](int i) { return tensors.x_channel() + x_place(tensors, i, lane); },
        [&](int i) { return 2 * (i * TEAM_LANES + lane) < tensors.chunk.num_heads * HEAD_DIM; });
  }

 private:
  __device__ static int BC_channel(const ConvTensors& tensors, int i, int lane) {
    return (i == 0 ? tensors.B_channel() : tensors.C_channel()) + lane * 2;
  }
  // Beyond the last pair it is the last one, of which taps and history are loaded for nothing.
  __device__ static int x_place(const ConvTensors& tensors, int i, int lane) {
    return min(2 * (i * TEAM_LANES + lane), tensors.chunk.num_heads * HEAD_DIM - 2);
  }
};

// The convolution of a step, and a lane's part of it in one chunk.
class Convolution {
 public:
  __device__ explicit Convolution(const Mamba2WithConvParams& params) : params(params), ring(params.conv_ring_rows) {}

  // By lanes that have the fewest token rows to prefetch.
  __device__ void prefetch(const Chunk& chunk) const {
    if (chunk.lengths.num_tokens == 0) return;
    const ConvTensors tensors(params, chunk, ring);
    const int k = static_cast<int>(WARP_SIZE - 1 - WINDOW - threadIdx.x % WARP_SIZE), age = k / 3;
    if (k < 0 || age > CONV_HISTORY) return;
    const int channel = k % 3 == 0 ? tensors.C_channel() : k % 3 == 1 ? tensors.B_channel() : tensors.x_channel();
    const int channels = k % 3 == 2 ? chunk.num_heads * HEAD_DIM : D_STATE;
    if (age == 0) {
      ptx::prefetch_bulk(tensors.taps(channel), channels * (D_CONV * 2));
      if (tensors.has_bias()) ptx::prefetch_bulk(tensors.bias(channel), channels * 2);
    } else if (tensors.has_history(age)) {
      ptx::prefetch_bulk(tensors.history(age) + channel * 2, channels * 2);
    }
  }

  // A loader warp: bring the rows before a chunk's window to L2, of the channels that it loads itself. The team comes to
  // the chunk later, and would wait for memory.
  __device__ void prefetch_history(const Chunk& chunk, Loader loader) const {
    constexpr int LINE_BYTES = 128, BC_LINES = D_STATE * 2 / LINE_BYTES + 1;  // they may begin anywhere in one
    const ConvTensors tensors(params, chunk, ring);
    const int lane = threadIdx.x % WARP_SIZE, age = 1 + lane % CONV_HISTORY, place = lane / CONV_HISTORY;
    const bool is_x = loader == X_LOADER, is_B = place < BC_LINES;
    const int channel = is_x ? tensors.x_channel() : is_B ? tensors.B_channel() : tensors.C_channel();
    const int bytes = is_x ? chunk.num_heads * HEAD_DIM * 2 : D_STATE * 2, line = is_x || is_B ? place : place - BC_LINES;
    if (!tensors.has_tokens() || !tensors.has_history(age) || line * LINE_BYTES >= bytes + LINE_BYTES) return;
    ptx::prefetch_line(tensors.history(age) + channel * 2 + min(line * LINE_BYTES, bytes - 1));
  }

  // What a warp of a team does for one chunk. B and C first: the weights are made of them.
  class Part {
   public:
    __device__ Part(const Convolution& convolution, const Chunk& chunk, int warp)
        : tensors(convolution.params, chunk, convolution.ring), lane(warp * WARP_SIZE + threadIdx.x % WARP_SIZE) {
      if (!IS_WINDOW_SHORT || !tensors.has_tokens()) return;
      pairs.load_B_and_C(tensors, lane);
      pairs.load_x(tensors, lane);
    }
    __device__ void make_B_and_C(const PipelineShared& shared, const Turn<CHUNK_BUFFERS>& turn) {
      if (!IS_WINDOW_SHORT && tensors.has_tokens()) pairs.load_B_and_C(tensors, lane);
      ptx::barrier_wait(shared.is_loaded(BC_LOADER, turn.index()), turn.parity());
      if (tensors.has_tokens()) pairs.convolve_B_and_C(tensors, shared.buffer(turn.index()), lane);
      arrive_as_warp(shared.is_ready(BC_LOADER, turn.index()));
    }
    __device__ void make_x(const PipelineShared& shared, const Turn<CHUNK_BUFFERS>& turn) {
      if (!IS_WINDOW_SHORT && tensors.has_tokens()) pairs.load_x(tensors, lane);
      ptx::barrier_wait(shared.is_loaded(X_LOADER, turn.index()), turn.parity());
      if (tensors.has_tokens()) pairs.convolve_x(tensors, shared.buffer(turn.index()), lane);
      arrive_as_warp(shared.is_ready(X_LOADER, turn.index()));
    }

   private:
    ConvTensors tensors;
    ConvLane pairs;
    int lane;
  };

 private:
  const Mamba2WithConvParams& params;
  const RingRows ring;
};

}  // namespace replay
