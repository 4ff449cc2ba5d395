// The rows that a matrix product reads: float32, and in 8 bits where the weights are quantised too.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "chunks.h"
#include "matrix.h"
#include "quants.h"

namespace quire {

// What the products with some matrices read.
struct Forms {
  bool bytes = false;
  bool words = false;

  bool has_quants() const { return bytes || words; }

  Forms& add(const Matrix& matrix) {
    with_layout(matrix.format, [&](auto layout) {
      (reads_words<decltype(layout)>() ? words : bytes) = true;
    });
    return *this;
  }
};

// Rows of up to `max_columns`, in the forms of the step's phase.
class Activations {
 public:
  Activations() = default;
  Activations(int max_rows, int max_columns, bool with_quants)
      : max_columns_(max_columns),
        with_quants_(with_quants),
        values_(static_cast<size_t>(max_rows) * max_columns) {
    chunks_.reserve(max_rows);
    if (!with_quants) return;
    const int blocks_per_row = (max_columns + kBlock - 1) / kBlock;
    bytes_ = Quants<int8_t>(max_rows, blocks_per_row);
    words_ = Quants<int16_t>(max_rows, blocks_per_row);
  }

  // Before rows are filled: how many there are and what reads them.
  void arrange(int num_rows, const Forms& forms) {
    chunks_.cut(num_rows);
    forms_ = with_quants_ ? forms : Forms{};
  }

  const RowChunks& chunks() const { return chunks_; }
  const Forms& forms() const { return forms_; }
  bool with_quants() const { return with_quants_; }
  int row_size() const { return max_columns_; }
  float* row(int index) { return values_.data() + static_cast<size_t>(index) * max_columns_; }
  const float* row(int index) const { return values_.data() + static_cast<size_t>(index) * max_columns_; }

  template <class Quant>
  const Quants<Quant>& quants() const {
    if constexpr (sizeof(Quant) == 1) {
      return bytes_;
    } else {
      return words_;
    }
  }

  // Quantises 32 columns of a chunk's rows, which stand `stride` apart.
  void put_block(int chunk, int block, const float* x, size_t stride) {
    with_size<kRowChunk>(chunks_.size(chunk), [&](auto size) {
      put_rows<decltype(size)::value, 0>(chunks_.start(chunk), block, x, stride);
    });
  }

  // Quantises the first `num_columns` (a multiple of 32) of a chunk's values, where quants are read.
  void quantise(int chunk, int num_columns) {
    if (!forms_.has_quants()) return;
    const float* x = row(chunks_.start(chunk));
    for (int block = 0; block < num_columns / kBlock; ++block) {
      put_block(chunk, block, x + block * kBlock, max_columns_);
    }
  }

 private:
  // Rows kFirst and on of the kRows of the chunk that begins with row `start`
  template <int kRows, int kFirst>
  void put_rows(int start, int block, const float* x, size_t stride) {
    constexpr int kCount = std::min(kRows - kFirst, 4);
    RowBlocks blocks;
    quantise_rows<kCount>(x + kFirst * stride, stride, blocks);
    if (forms_.bytes) bytes_.chunk<kRows>(start, block)->template put<kFirst, kCount>(blocks);
    if (forms_.words) words_.chunk<kRows>(start, block)->template put<kFirst, kCount>(blocks);
    if constexpr (kFirst + kCount < kRows) put_rows<kRows, kFirst + kCount>(start, block, x, stride);
  }

  int max_columns_ = 0;
  bool with_quants_ = false;
  RowChunks chunks_;
  Forms forms_;
  Buffer<float> values_;
  Quants<int8_t> bytes_;
  Quants<int16_t> words_;
};

}  // namespace quire
