// The paged KV cache as this decoder lays it out.
//
// It is [num_slabs, num_layers, num_kv_heads, blocks_per_slab, 2] runs, so that blocks that are neighbours in
// a slab are read as one stream, and a run groups of kLanes positions. A group of int8 begins with its
// positions' scales in float32: a number is a quant times its position's scale. Then vectors stand in
// pairs. Keys: [head_dim / 2], a pair being two dimensions of kLanes positions, so that their scores need
// no sums across lanes. Values: [kLanes / 2][head_dim / kLanes], a pair being kLanes dimensions of two
// positions. A pair of bfloat16 is taken apart in two instructions: one vector stands in the lower halves
// of its 32-bit words, the other in the upper halves. Those of other types stand one after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace quire {

// Elements that hold a position's scale, of a head's keys or values
template <class Element>
constexpr int kScaleSize = 0;
template <>
inline constexpr int kScaleSize<int8_t> = sizeof(float);

// Elements of a group before its first pair
template <class Element>
constexpr int kGroupHead = kScaleSize<Element> * simd::kLanes;

// The scales of the group at p
inline simd::Floats load_scales(const int8_t* p) {
  simd::Floats scales;
  std::memcpy(&scales, p, sizeof scales);
  return scales;
}

// Vector `kSecond` (0 or 1) of the pair at p
template <int kSecond>
inline simd::Floats load_of_pair(const float* p) {
  return simd::load(p + kSecond * simd::kLanes);
}
template <int kSecond>
inline simd::Floats load_of_pair(const int8_t* p) {
  return simd::load_signed_bytes(p + kSecond * simd::kLanes);
}
template <int kSecond>
inline simd::Floats load_of_pair(const uint16_t* p) {
  simd::Ints words;
  std::memcpy(&words, p, sizeof words);
  words = kSecond != 0 ? words & static_cast<int32_t>(0xffff0000) : words << 16;
  return reinterpret_cast<simd::Floats>(words);
}

// Puts a number into lane `lane` of vector `second` of the pair at p.
inline void put_in_pair(float* p, int second, int lane, float value) {
  p[second * simd::kLanes + lane] = value;
}
// An integer, rounded to the nearest even; it fits
inline void put_in_pair(int8_t* p, int second, int lane, float value) {
  p[second * simd::kLanes + lane] = static_cast<int8_t>(std::nearbyintf(value));
}
// bfloat16, rounded to the nearest even; rounded, some NaNs would be zeros
inline void put_in_pair(uint16_t* p, int second, int lane, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  p[2 * lane + second] = static_cast<uint16_t>(std::isnan(value) ? 0x7fc0u : rounded);
}

// A vector's scale, largest magnitude / 127, to `scale`; returns what its numbers are multiplied by. A
// vector with a NaN or an infinity gets a NaN for scale, which every score or sum of it then is.
inline float put_scale(const float* vector, int size, int8_t* scale) {
  float magnitude = 0.0f;
  bool is_finite = true;
  for (int d = 0; d < size; ++d) {
    magnitude = std::max(magnitude, std::fabs(vector[d]));
    is_finite &= std::fabs(vector[d]) <= std::numeric_limits<float>::max();
  }
  const float step = is_finite ? magnitude / 127.0f : std::numeric_limits<float>::quiet_NaN();
  std::memcpy(scale, &step, sizeof step);
  return step > 1e-37f ? 1.0f / step : 0.0f;
}

template <class Element>  // float, uint16_t for bfloat16, or int8_t
struct KvCache {
  KvCache(Element* data, int blocks_per_slab, int num_layers, int num_kv_heads, int block_size, int head_dim)
      : data(data),
        blocks_per_slab(static_cast<uint32_t>(blocks_per_slab)),
        num_kv_heads(num_kv_heads),
        block_size(block_size),
        head_dim(head_dim),
        head_size(int64_t{2} * blocks_per_slab * run_size()),
        slab_size(head_size * num_layers * num_kv_heads) {}

  Element* data;
  uint32_t blocks_per_slab;  // unsigned divisions take fewer instructions
  int num_kv_heads;
  int block_size;
  int head_dim;
  int64_t head_size;  // elements of a layer and head in a slab
  int64_t slab_size;

  int group_size() const { return simd::kLanes * (head_dim + kScaleSize<Element>); }  // elements
  int run_size() const { return block_size / simd::kLanes * group_size(); }

  // The keys of a block; its values are the next run.
  Element* keys(int32_t block, int layer, int kv_head) const {
    const uint32_t slab = static_cast<uint32_t>(block) / blocks_per_slab;
    const uint32_t place = static_cast<uint32_t>(block) % blocks_per_slab;
    const int64_t head = static_cast<int64_t>(layer) * num_kv_heads + kv_head;
    return data + slab * slab_size + head * head_size + place * int64_t{2} * run_size();
  }

  void write(int64_t slot, int layer, int kv_head, const float* key, const float* value) const {
    const int32_t block = static_cast<int32_t>(slot / block_size);
    const int offset = static_cast<int>(slot % block_size);
    const int place = offset % simd::kLanes, group = offset / simd::kLanes * group_size();
    Element* run = keys(block, layer, kv_head) + group;
    write_vector(run, place, key, [&](Element* pairs, const auto& number) {
      for (int d = 0; d < head_dim; d += 2) {
        put_in_pair(pairs + d * simd::kLanes, 0, place, number(d));
        put_in_pair(pairs + d * simd::kLanes, 1, place, number(d + 1));
      }
    });
    write_vector(run + run_size(), place, value, [&](Element* pairs, const auto& number) {
      pairs += place / 2 * 2 * head_dim;
      for (int d = 0; d < head_dim; d += simd::kLanes) {
        QUIRE_UNROLL for (int i = 0; i < simd::kLanes; ++i) {
          put_in_pair(pairs + 2 * d, place % 2, i, number(d + i));
        }
      }
    });
  }

 private:
  // Calls put(the pairs of the group at p, the vector's numbers by dimension), its scale taken out.
  template <class Put>
  void write_vector(Element* p, int place, const float* vector, const Put& put) const {
    if constexpr (kScaleSize<Element> != 0) {
      const float factor = put_scale(vector, head_dim, p + place * kScaleSize<Element>);
      put(p + kGroupHead<Element>, [=](int d) { return factor == 0.0f ? 0.0f : vector[d] * factor; });
    } else {
      put(p, [=](int d) { return vector[d]; });
    }
  }
};

}  // namespace quire
