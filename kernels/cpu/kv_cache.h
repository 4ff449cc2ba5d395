// The paged KV cache as this decoder lays it out.
//
// A block holds [num_layers, 2, num_kv_heads] runs, and a run groups of kLanes positions. In a group,
// vectors stand in pairs. Keys: [head_dim / 2], a pair being two dimensions of kLanes positions, so that
// their scores need no sums across lanes. Values: [kLanes / 2][head_dim / kLanes], a pair being kLanes
// dimensions of two positions. A pair of bfloat16 is taken apart in two instructions: one vector stands in
// the lower halves of its 32-bit words, the other in the upper halves. Those of float32 stand one after
// the other.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace quire {

// Vector `kSecond` (0 or 1) of the pair at p
template <int kSecond>
inline simd::Floats load_of_pair(const float* p) {
  return simd::load(p + kSecond * simd::kLanes);
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
// bfloat16, rounded to the nearest even
inline void put_in_pair(uint16_t* p, int second, int lane, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  p[2 * lane + second] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

template <class Element>  // float, or uint16_t for bfloat16
struct KvCache {
  Element* data;
  int num_layers;
  int num_kv_heads;
  int block_size;
  int head_dim;

  int run_size() const { return block_size * head_dim; }  // elements

  Element* run(int64_t block, int layer, int kind, int kv_head) const {
    const int64_t index = ((block * num_layers + layer) * 2 + kind) * num_kv_heads + kv_head;
    return data + index * run_size();
  }

  void write(int64_t slot, int layer, int kv_head, const float* key, const float* value) const {
    const int64_t block = slot / block_size;
    const int offset = static_cast<int>(slot % block_size);
    const int place = offset % simd::kLanes, group = (offset - place) * head_dim;
    Element* keys = run(block, layer, 0, kv_head) + group;
    Element* values = run(block, layer, 1, kv_head) + group + place / 2 * 2 * head_dim;
    for (int d = 0; d < head_dim; d += 2) {
      put_in_pair(keys + d * simd::kLanes, 0, place, key[d]);
      put_in_pair(keys + d * simd::kLanes, 1, place, key[d + 1]);
    }
    for (int d = 0; d < head_dim; d += simd::kLanes) {
      QUIRE_UNROLL for (int i = 0; i < simd::kLanes; ++i) {
        put_in_pair(values + 2 * d, place % 2, i, value[d + i]);
      }
    }
  }
};

}  // namespace quire
