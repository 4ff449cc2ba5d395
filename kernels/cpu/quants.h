// Rows of activations in 8 bits, in the order in which the products read them.
//
// Rows stand in chunks of neighbours that are multiplied together. A chunk is a run of blocks of columns,
// and in a block lie 4 columns of each row, 4 more of each, and so on: one pointer leads through all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "quantise.h"

namespace quire {

constexpr int kQuads = kBlock / 4;
constexpr int kRowChunk = 6;  // 12 sums, 2 weights, an activation and a product: 16 registers

// Rows cut into chunks of kRowChunk at most, whose sizes differ by one at most.
class RowChunks {
 public:
  void cut(int num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    starts_.assign(1, 0);
    for (int chunk = 0; chunk < count(num_rows); ++chunk) starts_.push_back(start(num_rows, chunk + 1));
  }

  static int count(int num_rows) { return (num_rows + kRowChunk - 1) / kRowChunk; }
  static int start(int num_rows, int chunk) {
    if (num_rows == 0) return 0;
    return static_cast<int>(static_cast<int64_t>(chunk) * num_rows / count(num_rows));
  }

  void reserve(int max_rows) { starts_.reserve(count(max_rows) + 1); }

  int num_rows() const { return num_rows_; }
  int count() const { return static_cast<int>(starts_.size()) - 1; }
  int start(int chunk) const { return starts_[chunk]; }
  int size(int chunk) const { return starts_[chunk + 1] - starts_[chunk]; }

 private:
  int num_rows_ = 0;
  std::vector<int> starts_ = {0};  // of the chunks, and where the last one ends
};

// A block of a chunk. As bytes (Quant = int8_t), `quants` is [kQuads][kRows][4]; as words (int16_t) it is
// [kQuads][2][kRows][2], columns 0 and 2 of four and then 1 and 3.
template <class Quant, int kRows>
struct ChunkBlock {
  Quant quants[kBlock * kRows];
  float scales[kRows];
  float sums[kRows];
  float half_sums[2][kRows];

  // Rows [kFirst, kFirst + kCount)
  template <int kFirst, int kCount>
  void put(const RowBlocks& blocks) {
    if constexpr (sizeof(Quant) == 1) {
      put_quads<kCount>(blocks.quants, quants + kFirst * 4, kRows * 4);
    } else {
      simd::Eight even[4], odd[4];
      for (int i = 0; i < 4; ++i) {
        even[i] = simd::even_words(blocks.quants[i]);
        odd[i] = simd::odd_words(blocks.quants[i]);
      }
      put_quads<kCount>(even, quants + kFirst * 2, kRows * 4);
      put_quads<kCount>(odd, quants + (kRows + kFirst) * 2, kRows * 4);
    }
    const simd::Eight halves = reinterpret_cast<simd::Eight>(blocks.half_sums);
    simd::store_low<kCount>(scales + kFirst, reinterpret_cast<simd::Eight>(blocks.scales));
    simd::store_low<kCount>(sums + kFirst, reinterpret_cast<simd::Eight>(blocks.sums));
    simd::store_low<kCount>(half_sums[0] + kFirst, halves);
    simd::store_low<kCount>(half_sums[1] + kFirst, simd::swap_halves(halves));
  }

  // Row `row` as a chunk of its own
  void copy_row(int row, ChunkBlock<Quant, 1>& target) const {
    constexpr int kPiece = sizeof(Quant) == 1 ? 4 : 2, kPieces = kBlock / kPiece;
    for (int i = 0; i < kPieces; ++i) {
      std::copy_n(quants + (i * kRows + row) * kPiece, kPiece, target.quants + i * kPiece);
    }
    target.scales[0] = scales[row];
    target.sums[0] = sums[row];
    for (int half = 0; half < 2; ++half) target.half_sums[half][0] = half_sums[half][row];
  }

  // Of a chunk of one row: the square of the values' norm
  double square() const {
    static_assert(kRows == 1);
    int32_t sum = 0;
    for (const Quant quant : quants) sum += static_cast<int32_t>(quant) * quant;
    return static_cast<double>(scales[0]) * scales[0] * sum;
  }

 private:
  // Four bytes or two words of each row, `stride` elements from those of the next four columns. Few rows go
  // one by one: pieces of 8 and 12 bytes that cross lines of the cache which another core has read are slow.
  template <int kCount>
  static void put_quads(const simd::Eight (&rows)[4], Quant* target, int stride) {
    if constexpr (kCount == 4) {
      simd::Eight turned[4];
      simd::turn(rows, turned);
      for (int i = 0; i < 4; ++i) simd::store_low<4>(target + i * stride, turned[i]);
      for (int i = 0; i < 4; ++i) simd::store_low<4>(target + (i + 4) * stride, simd::swap_halves(turned[i]));
    } else {
      for (int row = 0; row < kCount; ++row, target += 4 / sizeof(Quant)) {
        for (int i = 0; i < 8; ++i) {
          const int32_t quad = rows[row][i];
          std::memcpy(target + i * stride, &quad, sizeof quad);
        }
      }
    }
  }
};

// Blocks of rows, in chunks.
template <class Quant>
class Quants {
 public:
  Quants() = default;
  Quants(int max_rows, int blocks_per_row)
      : blocks_per_row_(blocks_per_row), data_(static_cast<size_t>(max_rows) * blocks_per_row * kRowBytes) {}

  template <int kRows>
  const ChunkBlock<Quant, kRows>* chunk(int first_row, int block) const {
    static_assert(sizeof(ChunkBlock<Quant, kRows>) == kRows * kRowBytes);
    return reinterpret_cast<const ChunkBlock<Quant, kRows>*>(address(first_row, kRows, block));
  }
  template <int kRows>
  ChunkBlock<Quant, kRows>* chunk(int first_row, int block) {
    return reinterpret_cast<ChunkBlock<Quant, kRows>*>(data_.data() + offset(first_row, kRows, block));
  }
  // Where a block of the chunk of `num_rows` rows from `first_row` on begins.
  const uint8_t* address(int first_row, int num_rows, int block) const {
    return data_.data() + offset(first_row, num_rows, block);
  }

 private:
  static constexpr size_t kRowBytes = sizeof(ChunkBlock<Quant, 1>);

  size_t offset(int first_row, int num_rows, int block) const {
    return (static_cast<size_t>(first_row) * blocks_per_row_ + static_cast<size_t>(num_rows) * block) *
           kRowBytes;
  }

  int blocks_per_row_ = 0;
  Buffer<uint8_t> data_;
};

}  // namespace quire
