// Matrix products of a step: y = x * transpose(weights), over panels and blocks of rows in parallel.
#pragma once

#include <algorithm>

#include "activations.h"
#include "matrix.h"
#include "panel_group.h"
#include "pool.h"

namespace quire {

struct Product {
  const Matrix* matrix;
  float* output;  // [num_rows][stride]; columns beyond the matrix's rows are left alone
  size_t stride;
};

constexpr int kChunksPerPass = 24;  // chunks that share one pass over a panel: their quants stay in L2
constexpr int kRowsPerPass = kChunksPerPass * kRowChunk;

// Calls body(first unit, end unit, first chunk, end chunk, thread) over all units (panels, say) and passes
// of chunks, in runs that give each thread several.
template <class Body>
void for_panel_runs(ThreadPool& pool, int num_units, const RowChunks& chunks, const Body& body) {
  if (chunks.num_rows() == 0) return;
  const int num_chunks = chunks.count();
  const int num_passes = (num_chunks + kChunksPerPass - 1) / kChunksPerPass;
  const int wanted_runs = std::max(1, pool.num_threads() * 8 / num_passes);
  const int run = std::max(1, num_units / wanted_runs);
  const int num_runs = (num_units + run - 1) / run;
  pool.run(num_runs * num_passes, [&](int item, int thread) {
    const int pass = item % num_passes;
    const int first_unit = item / num_passes * run;
    body(first_unit, std::min(num_units, first_unit + run), pass * num_chunks / num_passes,
         (pass + 1) * num_chunks / num_passes, thread);
  });
}

// Panels in a row, cut into streams that are walked at the same time: at each place stands a panel of each.
class PanelStreams {
 public:
  PanelStreams(int num_panels, int num_threads, const RowChunks& chunks) : num_panels_(num_panels) {
    const int most = chunks.count() == 1 ? PanelGroup::kMost : 1;
    const int count = std::clamp(num_panels / (kFewestPlaces * num_threads), 1, most);
    length_ = (num_panels + count - 1) / count;
  }

  int length() const { return length_; }

  template <class Body>
  void for_each(int place, const Body& body) const {
    for (int panel = place; panel < num_panels_; panel += length_) body(panel);
  }

 private:
  static constexpr int kFewestPlaces = 4;  // of a thread, so that all end at about the same time

  int num_panels_, length_;
};

// Multiplies the rows of `input` by several matrices at once.
template <int kProducts>
void multiply(ThreadPool& pool, const Activations& input, const Product (&products)[kProducts]) {
  int num_panels = 0;
  for (const Product& product : products) num_panels += product.matrix->num_panels();
  const PanelStreams streams(num_panels, pool.num_threads(), input.chunks());
  for_panel_runs(pool, streams.length(), input.chunks(), [&](int start, int end, int first_chunk, int end_chunk, int) {
    alignas(64) float blocks[kRowsPerPass * kPanel];
    const int first_row = input.chunks().start(first_chunk), end_row = input.chunks().start(end_chunk);
    for (int place = start; place < end; ++place) {
      PanelGroup group;
      const Product* of_panels[PanelGroup::kMost];
      streams.for_each(place, [&](int panel) {
        const Product* product = products;
        while (panel >= product->matrix->num_panels()) panel -= product++->matrix->num_panels();
        of_panels[group.size()] = product;
        group.add(*product->matrix, panel);
      });
      group.multiply(input, first_chunk, end_chunk, blocks);
      const float* block = blocks;
      for (int i = 0; i < group.size(); ++i) {
        const Product& product = *of_panels[i];
        for (int row = first_row; row < end_row; ++row, block += kPanel) {
          std::copy_n(block, group.width(i), product.output + row * product.stride + group.first_row(i));
        }
      }
    }
  });
}

}  // namespace quire
