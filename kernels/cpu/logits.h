// The last product of a step: rows times the output matrix, and the likeliest token of each row while its
// logits are in the cache. Logits that nobody reads are not written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "best.h"
#include "likeliest.h"
#include "matmul.h"
#include "matrix.h"
#include "output_bounds.h"
#include "panel_group.h"
#include "pool.h"

namespace quire {

struct LogitsOut {
  int32_t num_logits;
  float* logits;  // [num_logits][vocab_size], of the first places
  float* best_logits;  // [num_rows]
  int64_t* best_ids;  // [num_rows]
};

class LogitsProduct {
 public:
  explicit LogitsProduct(int num_threads) : found_(num_threads) {}

  // Makes room for a run.
  void reserve(int num_rows, int num_columns) {
    for (Found& found : found_) found.best.reserve(num_rows);
    search_.reserve(num_rows, num_columns / kBlock);
  }

  // `places`: where each row's results go in `out`, in ascending order
  void run(ThreadPool& pool, const Matrix& matrix, const OutputBounds& bounds, const Activations& input,
           const std::vector<int>& places, const LogitsOut& out) {
    const int num_rows = input.chunks().num_rows();
    for (Found& found : found_) {
      found.best.assign(num_rows, Best());
      found.num_full = 0;
    }
    if (bounds.are_measured() && num_rows >= kFewestSearched && places[0] >= out.num_logits && search_.takes_next()) {
      search(pool, matrix, bounds, input);
    } else {
      multiply(pool, matrix, input, places, out);
    }
    for (int row = 0; row < num_rows; ++row) {
      Best best;
      for (const Found& found : found_) best.meet(found.best[row].logit, found.best[row].token_id);
      out.best_logits[places[row]] = best.logit;
      out.best_ids[places[row]] = best.token_id;
    }
  }

 private:
  static constexpr int kFewestSearched = 4;  // rows: fewer wait for the weights, not for products

  struct alignas(64) Found {
    std::vector<Best> best;  // [num_rows]
    int64_t num_full = 0;  // rows of panels that a search multiplied in full
  };

  void search(ThreadPool& pool, const Matrix& matrix, const OutputBounds& bounds, const Activations& input) {
    search_.begin(bounds, input, matrix.num_columns / kBlock);
    for_panel_runs(pool, matrix.num_panels(), input.chunks(),
                   [&](int first, int end, int first_chunk, int end_chunk, int thread) {
                     Found& found = found_[thread];
                     for (int panel = first; panel < end; ++panel) {
                       found.num_full += search_.search(matrix, panel, input, first_chunk, end_chunk, found.best);
                     }
                   });
    int64_t num_full = 0;
    for (const Found& found : found_) num_full += found.num_full;
    search_.end(num_full, int64_t{input.chunks().num_rows()} * matrix.num_panels());
  }

  void multiply(ThreadPool& pool, const Matrix& matrix, const Activations& input, const std::vector<int>& places,
                const LogitsOut& out) {
    const PanelStreams streams(matrix.num_panels(), pool.num_threads(), input.chunks());
    for_panel_runs(pool, streams.length(), input.chunks(),
                   [&](int first, int end, int first_chunk, int end_chunk, int thread) {
                     for (int place = first; place < end; ++place) {
                       PanelGroup group;
                       streams.for_each(place, [&](int panel) { group.add(matrix, panel); });
                       take(matrix, group, input, first_chunk, end_chunk, places, out, found_[thread].best);
                     }
                   });
  }

  // The logits of a group's tokens: the best of each row, and those that are read
  static void take(const Matrix& matrix, const PanelGroup& group, const Activations& input, int first_chunk,
                   int end_chunk, const std::vector<int>& places, const LogitsOut& out, std::vector<Best>& best) {
    alignas(64) float blocks[kRowsPerPass * kPanel];
    group.multiply(input, first_chunk, end_chunk, blocks);
    const int first_row = input.chunks().start(first_chunk), end_row = input.chunks().start(end_chunk);
    const float* logits = blocks;
    for (int i = 0; i < group.size(); ++i) {
      for (int row = first_row; row < end_row; ++row, logits += kPanel) {
        best[row].meet_panel(logits, group.first_row(i), group.width(i));
        const size_t place = places[row];
        if (place < static_cast<size_t>(out.num_logits)) {
          std::copy_n(logits, group.width(i), out.logits + place * matrix.num_rows + group.first_row(i));
        }
      }
    }
  }

  LikeliestSearch search_;
  std::vector<Found> found_;  // of each thread
};

}  // namespace quire
