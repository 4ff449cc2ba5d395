// Panels that rows are multiplied by at once.
//
// Few rows wait for weights, and the hardware asks for the next lines of each run of addresses that it sees, not
// for as many as memory gives. So rows of a single chunk pass over several panels together, block by block, that
// lie far from each other: each is a run of its own.
#pragma once

#include <algorithm>

#include "activations.h"
#include "matmul_float.h"
#include "matmul_int8.h"
#include "matrix.h"

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

using GroupKernel = void (*)(const uint8_t* const* panels, int count, int num_columns, const Activations&,
                             int chunk, float* out);

// Of a quantised format, by 8-bit activations
inline GroupKernel group_kernel(Format format) {
  GroupKernel kernel = nullptr;
  with_layout(format, [&](auto layout) { kernel = int8::multiply_group<decltype(layout)>; });
  return kernel;
}

class PanelGroup {
 public:
  static constexpr int kMost = 3;

  // Matrices of a group have the same number of columns.
  void add(const Matrix& matrix, int panel) { members_[size_++] = {&matrix, panel}; }

  int size() const { return size_; }
  // The first of a panel's rows in its matrix, and how many of them are the matrix's
  int first_row(int index) const { return members_[index].panel * kPanel; }
  int width(int index) const { return std::min(kPanel, members_[index].matrix->num_rows - first_row(index)); }

  // out [size()][rows of the chunks][kPanel] = chunks [first, end) of the input times each panel
  void multiply(const Activations& input, int first, int end, float* out) const {
    const Matrix& matrix = *members_[0].matrix;
    if (end - first == 1 && are_of_one_kind(input)) {
      const uint8_t* panels[kMost];
      for (int i = 0; i < size_; ++i) panels[i] = members_[i].matrix->panel(members_[i].panel);
      return group_kernel(matrix.format)(panels, size_, matrix.num_columns, input, first, out);
    }
    const int num_rows = input.chunks().start(end) - input.chunks().start(first);
    for (int i = 0; i < size_; ++i, out += num_rows * kPanel) {
      const auto& [of_matrix, panel] = members_[i];
      panel_kernel(of_matrix->format, input.with_quants())(*of_matrix, panel, input, first, end, out);
    }
  }

 private:
  struct Member {
    const Matrix* matrix;
    int panel;
  };

  bool are_of_one_kind(const Activations& input) const {
    const Format format = members_[0].matrix->format;
    return input.with_quants() && !is_dense(format) && std::all_of(members_, members_ + size_, [&](const Member& m) {
             return m.matrix->format == format;
           });
  }

  int size_ = 0;
  Member members_[kMost];
};

}  // namespace quire
