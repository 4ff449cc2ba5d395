// Where a step is cut into parts of the same work.
#pragma once

#include <algorithm>
#include <vector>

#include "matrix.h"
#include "model.h"
#include "simd.h"
#include "step.h"

namespace quire {

class StepCut {
 public:
  // [num_parts + 1] row numbers from 0 to num_tokens; part i has the rows from cut i to the next.
  std::vector<int> rows(const Model& model, const Step& step, int num_parts) {
    const double total = weigh_rows(model, step);
    std::vector<int> cuts = {0};
    double sum = 0.0;
    for (int row = 0; row < step.num_tokens; ++row) {
      const double middle = sum + costs_[row] / 2;
      while (middle > total * static_cast<double>(cuts.size()) / num_parts) {
        cuts.push_back(std::max(cuts.back(), between_groups(step, row)));
      }
      sum += costs_[row];
    }
    cuts.resize(num_parts, step.num_tokens);
    cuts.push_back(step.num_tokens);
    return cuts;
  }

 private:
  // The row next to `row` before which its sequence may be cut. Positions of one group of the KV cache are
  // written and read together.
  static int between_groups(const Step& step, int row) {
    const int seq = step.sequence(row), start = step.query_start[seq], end = step.query_start[seq + 1];
    const int over = (step.context(seq, row) - 1) % simd::kLanes;  // of its position
    if (row == start || over == 0) return row;
    return over <= simd::kLanes / 2 ? std::max(start, row - over) : std::min(end, row + simd::kLanes - over);
  }

  // In multiplications with a 4-bit weight, as measured with AVX2
  static constexpr double kOctetCost = 1.3, kWordCost = 2, kFloatCost = 3;

  static double cost(const Model& model, const Matrix& matrix) {
    double cost = kFloatCost;
    if (model.config.with_quants) {
      with_layout(matrix.format, [&](auto layout) {
        using L = decltype(layout);
        cost = L::kBits == 4 ? 1 : reads_words<L>() ? kWordCost : kOctetCost;
      });
    }
    return cost * matrix.num_rows * matrix.num_columns;
  }

  // Puts each row's cost into costs_; returns the sum.
  double weigh_rows(const Model& model, const Step& step) {
    const Config& config = model.config;
    double row_cost = 0.0;
    for (const Matrix& matrix : model.layers[0].matrices) row_cost += cost(model, matrix);
    row_cost *= config.num_layers;
    const double position_cost = 2 * kFloatCost * config.num_layers * config.num_heads * config.head_dim;
    const double logit_cost = cost(model, model.output);
    costs_.assign(step.num_tokens, row_cost);
    for (int i = 0; i < step.num_logit_rows; ++i) costs_[step.logit_rows[i]] += logit_cost;
    double total = 0.0;
    for (int seq = 0; seq < step.num_seqs; ++seq) {
      for (int row = step.query_start[seq]; row < step.query_start[seq + 1]; ++row) {
        costs_[row] += position_cost * step.context(seq, row);
        total += costs_[row];
      }
    }
    return total;
  }

  std::vector<double> costs_;  // of the step's rows
};

}  // namespace quire
