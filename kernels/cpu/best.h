// The likeliest token of a row, found panel by panel.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "matrix.h"
#include "simd.h"

namespace quire {

// The largest logit and its token: of equal ones the lowest token, and a NaN above all.
struct Best {
  float logit = -std::numeric_limits<float>::infinity();
  int64_t token_id = std::numeric_limits<int64_t>::max();

  bool loses_to(float other, int64_t other_id) const {
    if (std::isnan(logit) || std::isnan(other)) {
      return std::isnan(other) && (!std::isnan(logit) || other_id < token_id);
    }
    return other > logit || (other == logit && other_id < token_id);
  }
  void meet(float other, int64_t other_id) {
    if (loses_to(other, other_id)) *this = {other, other_id};
  }
  // logits [kPanel] of tokens first_id...; the first `count` are the matrix's
  void meet_panel(const float* logits, int64_t first_id, int count) {
    using namespace simd;
    const Floats top = splat(logit);
    const Ints are_less = (load(logits) < top) & (load(logits + kLanes) < top);
    if (largest(are_less) != 0) return;  // true is -1: all lanes are less
    for (int i = 0; i < count; ++i) meet(logits[i], first_id + i);
  }
};

}  // namespace quire
