// Matrix products of a step: y = x * transpose(weights), over panels and blocks of rows in parallel.
#pragma once

#include <algorithm>

#include "activations.h"
#include "matmul_float.h"
#include "matmul_int8.h"
#include "matrix.h"
#include "pool.h"

namespace quire {

using PanelKernel = void (*)(const Matrix&, int panel, const Activations&, int first_chunk,
                             int end_chunk, float* out);

inline PanelKernel panel_kernel(Format format, bool with_quants) {
  PanelKernel kernel = nullptr;
  switch (format) {
    case Format::kF32: return float32::multiply_dense_panel<Float>;
    case Format::kF16: return float32::multiply_dense_panel<Half>;
    case Format::kBF16: return float32::multiply_dense_panel<Bfloat>;
    default: break;
  }
  with_layout(format, [&](auto layout) {
    using L = decltype(layout);
    kernel = with_quants ? int8::multiply_panel<L> : float32::multiply_panel<L>;
  });
  return kernel;
}

struct Product {
  const Matrix* matrix;
  float* output;  // [num_rows][stride]; columns beyond the matrix's rows are left alone
  size_t stride;
};

constexpr int kChunksPerPass = 24;  // chunks that share one pass over a panel: their quants stay in L2
constexpr int kRowsPerPass = kChunksPerPass * kRowChunk;

// block [rows of the chunks][kPanel] = chunks [first, end) of the input times one panel
inline void multiply_panel(const Matrix& matrix, int panel, const Activations& input, int first, int end,
                           float* block) {
  panel_kernel(matrix.format, input.with_quants())(matrix, panel, input, first, end, block);
}

inline void multiply_block(const Product& product, int panel, const Activations& input, int first,
                           int end) {
  alignas(64) float block[kRowsPerPass * kPanel];
  const Matrix& matrix = *product.matrix;
  multiply_panel(matrix, panel, input, first, end, block);
  const int first_row = input.chunks().start(first), end_row = input.chunks().start(end);
  const int width = std::min(kPanel, matrix.num_rows - panel * kPanel);
  float* output = product.output + panel * kPanel;
  for (int row = first_row; row < end_row; ++row) {
    std::copy_n(block + (row - first_row) * kPanel, width, output + row * product.stride);
  }
}

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

// Multiplies the rows of `input` by several matrices at once.
template <int kProducts>
void multiply(ThreadPool& pool, const Activations& input, const Product (&products)[kProducts]) {
  int num_panels = 0;
  for (const Product& product : products) num_panels += product.matrix->num_panels();
  for_panel_runs(pool, num_panels, input.chunks(), [&](int first, int end, int first_chunk, int end_chunk, int) {
    for (int index = first; index < end; ++index) {
      int panel = index;
      const Product* product = products;
      while (panel >= product->matrix->num_panels()) panel -= product++->matrix->num_panels();
      multiply_block(*product, panel, input, first_chunk, end_chunk);
    }
  });
}

}  // namespace quire
