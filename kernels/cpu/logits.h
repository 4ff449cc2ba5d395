// The last product of a step: rows times the output matrix, and the likeliest token of each row while its
// logits are in the cache. Logits that nobody reads are not written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "activations.h"
#include "matmul.h"
#include "matrix.h"
#include "pool.h"
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

struct LogitsOut {
  int32_t num_logits;
  float* logits;  // [num_logits][vocab_size], of the first places
  float* best_logits;  // [num_rows]
  int64_t* best_ids;  // [num_rows]
};

class LogitsProduct {
 public:
  explicit LogitsProduct(int num_threads) : best_(num_threads) {}

  // Makes room for a run.
  void reserve(int num_rows) {
    for (std::vector<Best>& of_thread : best_) of_thread.reserve(num_rows);
  }

  // `places`: where each row's results go in `out`
  void run(ThreadPool& pool, const Matrix& matrix, const Activations& input, const std::vector<int>& places,
           const LogitsOut& out) {
    const int num_rows = input.chunks().num_rows();
    for (std::vector<Best>& of_thread : best_) of_thread.assign(num_rows, Best());
    for_panel_runs(pool, matrix.num_panels(), input.chunks(),
                   [&](int first, int end, int first_chunk, int end_chunk, int thread) {
                     for (int panel = first; panel < end; ++panel) {
                       multiply(matrix, panel, input, first_chunk, end_chunk, places, out, best_[thread]);
                     }
                   });
    for (int row = 0; row < num_rows; ++row) {
      Best best;
      for (const std::vector<Best>& of_thread : best_) {
        best.meet(of_thread[row].logit, of_thread[row].token_id);
      }
      out.best_logits[places[row]] = best.logit;
      out.best_ids[places[row]] = best.token_id;
    }
  }

 private:
  static void multiply(const Matrix& matrix, int panel, const Activations& input, int first_chunk,
                       int end_chunk, const std::vector<int>& places, const LogitsOut& out,
                       std::vector<Best>& best) {
    alignas(64) float block[kRowsPerPass * kPanel];
    multiply_panel(matrix, panel, input, first_chunk, end_chunk, block);
    const int first_row = input.chunks().start(first_chunk), end_row = input.chunks().start(end_chunk);
    const int first_id = panel * kPanel, count = std::min(kPanel, matrix.num_rows - first_id);
    for (int row = first_row; row < end_row; ++row) {
      const float* logits = block + (row - first_row) * kPanel;
      best[row].meet_panel(logits, first_id, count);
      const size_t place = places[row];
      if (place < static_cast<size_t>(out.num_logits)) {
        std::copy_n(logits, count, out.logits + place * matrix.num_rows + first_id);
      }
    }
  }

  std::vector<std::vector<Best>> best_;  // [num_threads][num_rows]
};

}  // namespace quire
