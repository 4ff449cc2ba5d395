// What a step does to single rows. Rows are padded with zeros to whole vectors.
#pragma once

#include <cmath>

#include "simd.h"

namespace quire {

// out = x / sqrt(mean(x^2) + epsilon) * weight; the mean is over `size`, `padded` a multiple of kLanes
inline void rms_norm(const float* x, const float* weight, int size, int padded, float epsilon,
                     float* out) {
  using namespace simd;
  Floats squares = {};
  for (int i = 0; i < padded; i += kLanes) {
    const Floats v = load(x + i);
    squares = fused_multiply_add(v, v, squares);
  }
  const float mean = sum(squares) / static_cast<float>(size);
  const Floats factor = splat(1.0f / std::sqrt(mean + epsilon));
  for (int i = 0; i < padded; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
}

// x += y
inline void add_row(const float* y, int padded, float* x) {
  using namespace simd;
  for (int i = 0; i < padded; i += kLanes) store(x + i, load(x + i) + load(y + i));
}

// out = silu(gate) * up
inline void silu_multiply(const float* gate, const float* up, int padded, float* out) {
  using namespace simd;
  for (int i = 0; i < padded; i += kLanes) store(out + i, silu(load(gate + i)) * load(up + i));
}

// Turns dimension d with d + head_dim / 2 by the angle of its pair, then scales; in place.
inline void rotate_head(const float* cosines, const float* sines, int head_dim, float scale, float* x) {
  const int half = head_dim / 2;
  for (int d = 0; d < half; ++d) {
    const float a = x[d], b = x[d + half];
    x[d] = (a * cosines[d] - b * sines[d]) * scale;
    x[d + half] = (b * cosines[d] + a * sines[d]) * scale;
  }
}

}  // namespace quire
