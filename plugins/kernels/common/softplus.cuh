// softplus with the guard that keeps exp() from overflowing.
#pragma once

namespace replay {

// log(1 + exp(x)); above 20 it equals x in fp32.
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

}  // namespace replay
