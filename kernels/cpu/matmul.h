// Matrix products of a step: y = x * transpose(weights), over panels and blocks of rows in parallel.
#pragma once

#include <algorithm>

#include "activations.h"
#include "matmul_float.h"
#include "matmul_int8.h"
#include "matrix.h"
#include "pool.h"

namespace quire {

using PanelKernel = void (*)(const Matrix&, int panel, const Activations&, int first_row,
                             int num_rows, float* out);

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

constexpr int kRowBlock = 64;  // rows that share one pass over a panel: their quants stay in L2

// block [num_rows][kPanel] = rows of the input times one panel
inline void multiply_panel(const Matrix& matrix, int panel, const Activations& input, int first_row,
                           int num_rows, float* block) {
  panel_kernel(matrix.format, input.blocks_per_row > 0)(matrix, panel, input, first_row, num_rows,
                                                        block);
}

inline void multiply_block(const Product& product, int panel, const Activations& input, int first_row,
                           int num_rows) {
  alignas(64) float block[kRowBlock * kPanel];
  const Matrix& matrix = *product.matrix;
  multiply_panel(matrix, panel, input, first_row, num_rows, block);
  const int width = std::min(kPanel, matrix.num_rows - panel * kPanel);
  float* output = product.output + first_row * product.stride + panel * kPanel;
  for (int row = 0; row < num_rows; ++row) {
    std::copy_n(block + row * kPanel, width, output + row * product.stride);
  }
}

// Calls body(first unit, end unit, first row, number of rows) over all units (panels, say) and blocks of
// rows, in runs that give each thread several.
template <class Body>
void for_panel_runs(ThreadPool& pool, int num_units, int num_rows, const Body& body) {
  if (num_rows == 0) return;
  const int num_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  const int wanted_runs = std::max(1, pool.num_threads() * 8 / num_blocks);
  const int run = std::max(1, num_units / wanted_runs);
  const int num_runs = (num_units + run - 1) / run;
  pool.run_in_order(num_runs * num_blocks, [&](int item, int) {
    const int first_row = item % num_blocks * kRowBlock;
    const int first_unit = item / num_blocks * run;
    body(first_unit, std::min(num_units, first_unit + run), first_row,
         std::min(kRowBlock, num_rows - first_row));
  });
}

// Multiplies the first `num_rows` rows of `input` by several matrices at once.
template <int kProducts>
void multiply(ThreadPool& pool, const Activations& input, int num_rows,
              const Product (&products)[kProducts]) {
  int num_panels = 0;
  for (const Product& product : products) num_panels += product.matrix->num_panels();
  for_panel_runs(pool, num_panels, num_rows, [&](int first, int end, int first_row, int rows) {
    for (int index = first; index < end; ++index) {
      int panel = index;
      const Product* product = products;
      while (panel >= product->matrix->num_panels()) panel -= product++->matrix->num_panels();
      multiply_block(*product, panel, input, first_row, rows);
    }
  });
}

}  // namespace quire
