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
};

namespace gated {

// Mixes one panel of both products into floats [rows of the chunks], `stride` apart.
inline void mix_panel(const GatedProduct& product, int panel, const Activations& input, int first_chunk,
                      int end_chunk, float* out, int stride) {
  alignas(64) float both[2 * kRowsPerPass * kPanel];
  PanelGroup group;
  group.add(*product.gate, panel);
  group.add(*product.up, panel);
  group.multiply(input, first_chunk, end_chunk, both);
  const int num_rows = input.chunks().start(end_chunk) - input.chunks().start(first_chunk);
  for (int row = 0; row < num_rows; ++row) {
    float *gate_row = both + row * kPanel, *up_row = gate_row + num_rows * kPanel;
    if (!product.gate_bias->empty()) {
      add_row(product.gate_bias->data() + panel * kPanel, kPanel, gate_row);
    }
    if (!product.up_bias->empty()) add_row(product.up_bias->data() + panel * kPanel, kPanel, up_row);
    silu_multiply(gate_row, up_row, kPanel, out + row * stride);
  }
}

}  // namespace gated

// The rows of `output`, which is arranged for as many: quants where they are read, else values.
inline void multiply_gated(ThreadPool& pool, const Activations& input, const GatedProduct& product,
                           Activations& output) {
  constexpr int kPanelsPerBlock = kBlock / kPanel;
  const int num_panels = product.gate->num_panels();
  const int num_blocks = (num_panels + kPanelsPerBlock - 1) / kPanelsPerBlock;
  const bool to_quants = output.forms().has_quants();
  for_panel_runs(pool, num_blocks, input.chunks(), [&](int first, int end, int first_chunk, int end_chunk, int) {
    alignas(64) float mixed[kRowsPerPass * kBlock];
    const int first_row = input.chunks().start(first_chunk);
    for (int block = first; block < end; ++block) {
      const int first_panel = block * kPanelsPerBlock;
      for (int panel = first_panel; panel < std::min(num_panels, first_panel + kPanelsPerBlock);
           ++panel) {
        float* out = mixed + (panel - first_panel) * kPanel;
        int stride = kBlock;
        if (!to_quants) {
          out = output.row(first_row) + panel * kPanel;
          stride = output.row_size();
        }
        gated::mix_panel(product, panel, input, first_chunk, end_chunk, out, stride);
      }
      for (int chunk = first_chunk; to_quants && chunk < end_chunk; ++chunk) {
        const int row = output.chunks().start(chunk) - first_row;
        output.put_block(chunk, block, mixed + row * kBlock, kBlock);
      }
    }
  });
}

}  // namespace quire
