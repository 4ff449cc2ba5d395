// The first half of the feed-forward part: SiLU(x * gate) * (x * up), in one pass.
//
// Both products of a block of 32 columns stay in the L1 cache until they are mixed and, if the next matrix
// takes 8 bits, quantised: one byte per element goes to memory in place of three floats.
#pragma once

#include <algorithm>

#include "activations.h"
#include "buffer.h"
#include "matmul.h"
#include "pool.h"
#include "rows.h"

namespace quire {

struct GatedProduct {
  const Matrix* gate;
  const Matrix* up;
  const Buffer<float>* gate_bias;  // empty: none; else padded to whole panels
  const Buffer<float>* up_bias;
  bool to_quants;  // the output is read in 8 bits
};

namespace gated {

// Mixes one panel of both products into floats [num_rows], `stride` apart.
inline void mix_panel(const GatedProduct& product, int panel, const Activations& input, int first_row,
                      int num_rows, float* out, int stride) {
  alignas(64) float gate[kRowBlock * kPanel];
  alignas(64) float up[kRowBlock * kPanel];
  multiply_panel(*product.gate, panel, input, first_row, num_rows, gate);
  multiply_panel(*product.up, panel, input, first_row, num_rows, up);
  for (int row = 0; row < num_rows; ++row) {
    float *gate_row = gate + row * kPanel, *up_row = up + row * kPanel;
    if (!product.gate_bias->empty()) {
      add_row(product.gate_bias->data() + panel * kPanel, kPanel, gate_row);
    }
    if (!product.up_bias->empty()) add_row(product.up_bias->data() + panel * kPanel, kPanel, up_row);
    silu_multiply(gate_row, up_row, kPanel, out + row * stride);
  }
}

}  // namespace gated

// The first `num_rows` rows of `output`: quants, or values if they are not read in 8 bits.
inline void multiply_gated(ThreadPool& pool, const Activations& input, int num_rows,
                           const GatedProduct& product, Activations& output) {
  constexpr int kPanelsPerBlock = kBlock / kPanel;
  const int num_panels = product.gate->num_panels();
  const int num_blocks = (num_panels + kPanelsPerBlock - 1) / kPanelsPerBlock;
  for_panel_runs(pool, num_blocks, num_rows, [&](int first, int end, int first_row, int rows) {
    alignas(64) float mixed[kRowBlock * kBlock];
    for (int block = first; block < end; ++block) {
      const int first_panel = block * kPanelsPerBlock;
      for (int panel = first_panel; panel < std::min(num_panels, first_panel + kPanelsPerBlock);
           ++panel) {
        float* out = mixed + (panel - first_panel) * kPanel;
        int stride = kBlock;
        if (!product.to_quants) {
          out = output.row(first_row) + panel * kPanel;
          stride = output.row_size;
        }
        gated::mix_panel(product, panel, input, first_row, rows, out, stride);
      }
      for (int row = 0; product.to_quants && row < rows; ++row) {
        quantise_block(mixed + row * kBlock, output.block_quants(first_row + row, block),
                       output.block_scale(first_row + row, block));
      }
    }
  });
}

}  // namespace quire
