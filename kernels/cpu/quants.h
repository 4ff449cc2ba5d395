// Rows of activations in 8 bits, in the order in which the products read them.
//
// Quantisation, per row and block of 32 columns: scale = the smallest power of two that keeps the quants
// within 127, quants = x / scale rounded to the nearest (ties to even). A scale that is a power of two
// multiplies another by an addition to its exponent. A block's sums of quants times scale stand by it:
// weights with a minimum or a zero need them. A block that holds a NaN, an infinity or what is near it gets
// a NaN for scale and sums, and with it every product of its row.
//
// Rows stand in chunks of neighbours that are multiplied together. A chunk is a run of blocks of columns,
// and in a block lie 4 columns of each row, 4 more of each, and so on: one pointer leads through all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace quire {

constexpr int kBlock = 32;  // columns per block
constexpr int kQuads = kBlock / 4;
constexpr int kRowChunk = 6;  // 12 sums, 2 weights, an activation and a product: 16 registers

// Rows cut into chunks of kRowChunk at most, whose sizes differ by one at most.
class RowChunks {
 public:
  // Where a row stands: in the chunk of `size` rows from `start` on.
  struct Place {
    int start;
    int size;
    int index;
  };

  void cut(int num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    starts_.assign(1, 0);
    places_.clear();
    for (int chunk = 0; chunk < count(num_rows); ++chunk) {
      starts_.push_back(start(num_rows, chunk + 1));
      for (int i = 0; i < size(chunk); ++i) places_.push_back({start(chunk), size(chunk), i});
    }
  }

  static int count(int num_rows) { return (num_rows + kRowChunk - 1) / kRowChunk; }
  static int start(int num_rows, int chunk) {
    if (num_rows == 0) return 0;
    return static_cast<int>(static_cast<int64_t>(chunk) * num_rows / count(num_rows));
  }

  void reserve(int max_rows) {
    starts_.reserve(count(max_rows) + 1);
    places_.reserve(max_rows);
  }

  int num_rows() const { return num_rows_; }
  int count() const { return static_cast<int>(starts_.size()) - 1; }
  int start(int chunk) const { return starts_[chunk]; }
  int size(int chunk) const { return starts_[chunk + 1] - starts_[chunk]; }
  const Place& place(int row) const { return places_[row]; }

 private:
  int num_rows_ = 0;
  std::vector<int> starts_ = {0};  // of the chunks, and where the last one ends
  std::vector<Place> places_;
};

// Scales of activations. Times a weight's scale, 2^-24 to 2^22 (matrix.h), they stay normal floats.
constexpr float kMinScale = 0x1p-100f, kMaxScale = 0x1p100f;

struct BlockScale {
  float scale;
  float sum;  // scale * (sum of the quants)
  float half_sums[2];  // the same over the first and the last 16 columns
};

// A block of a chunk. As bytes (Quant = int8_t), `quants` is [kQuads][kRows][4]; as words (int16_t) it is
// [kQuads][2][kRows][2], columns 0 and 2 of four and then 1 and 3.
template <class Quant, int kRows>
struct ChunkBlock {
  Quant quants[kBlock * kRows];
  float scales[kRows];
  float sums[kRows];
  float half_sums[2][kRows];
};

inline BlockScale quantise_block(const float* x, int8_t* quants) {
  using namespace simd;
  constexpr int kVectors = kBlock / kLanes;
  // As integers the bits of magnitudes are ordered like the floats, and NaNs stand above infinity.
  Ints bits = reinterpret_cast<Ints>(absolute(load(x)));
  for (int i = 1; i < kVectors; ++i) {
    bits = max(bits, reinterpret_cast<Ints>(absolute(load(x + i * kLanes))));
  }
  const float magnitude = float_of_bits(largest(bits));
  if (!(magnitude <= 127.0f * kMaxScale)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(quants, kBlock, int8_t{0});
    return {nan, nan, {nan, nan}};
  }
  const float scale = std::max(kMinScale, next_power_of_two(magnitude * (1.0f / 127.0f)));
  const Floats inverse = splat(inverse_of_power(scale));
  Ints rounded[kVectors];
  for (int i = 0; i < kVectors; ++i) rounded[i] = round_to_ints(load(x + i * kLanes) * inverse);
  store_bytes(quants, rounded);
  Ints halves[2] = {rounded[0], rounded[kVectors / 2]};
  for (int i = 1; i < kVectors / 2; ++i) {
    halves[0] += rounded[i];
    halves[1] += rounded[kVectors / 2 + i];
  }
  const float first = scale * static_cast<float>(sum(halves[0]));
  const float second = scale * static_cast<float>(sum(halves[1]));
  return {scale, first + second, {first, second}};
}

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
  // Where a block of the chunk of `num_rows` rows from `first_row` on begins.
  const uint8_t* address(int first_row, int num_rows, int block) const {
    return data_.data() + offset(first_row, num_rows, block);
  }

  void put(const RowChunks::Place& place, int block, const int8_t* quants, const BlockScale& scale) {
    uint8_t* target = data_.data() + offset(place.start, place.size, block);
    for (int quad = 0; quad < kQuads; ++quad, quants += 4) {
      put_quad(quants, place, reinterpret_cast<Quant*>(target) + quad * place.size * 4);
    }
    float* scales = reinterpret_cast<float*>(target + place.size * kBlock * sizeof(Quant)) + place.index;
    scales[0] = scale.scale;
    scales[place.size] = scale.sum;
    scales[2 * place.size] = scale.half_sums[0];
    scales[3 * place.size] = scale.half_sums[1];
  }

 private:
  static constexpr size_t kRowBytes = kBlock * sizeof(Quant) + sizeof(BlockScale);

  size_t offset(int first_row, int num_rows, int block) const {
    return (static_cast<size_t>(first_row) * blocks_per_row_ + static_cast<size_t>(num_rows) * block) *
           kRowBytes;
  }

  static void put_quad(const int8_t* quad, const RowChunks::Place& place, int8_t* target) {
    std::memcpy(target + place.index * 4, quad, 4);
  }
  static void put_quad(const int8_t* quad, const RowChunks::Place& place, int16_t* target) {
    const int16_t even[] = {quad[0], quad[2]}, odd[] = {quad[1], quad[3]};
    std::memcpy(target + place.index * 2, even, sizeof even);
    std::memcpy(target + (place.size + place.index) * 2, odd, sizeof odd);
  }

  int blocks_per_row_ = 0;
  Buffer<uint8_t> data_;
};

}  // namespace quire
