// The paged KV cache as this decoder lays it out.
//
// A block holds [num_layers, 2, num_kv_heads] runs of block_size * head_dim elements. Within a run, keys
// stand in groups of kLanes positions [block_size / kLanes][head_dim][kLanes], so that the scores of
// kLanes positions need no sums across lanes; values stand [block_size][head_dim].
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace quire {

// bfloat16, rounded to the nearest even
inline void put_element(uint16_t& target, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  target = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline void put_element(float& target, float value) { target = value; }

inline simd::Floats load_elements(const uint16_t* p) { return simd::load_bfloat(p); }
inline simd::Floats load_elements(const float* p) { return simd::load(p); }

template <class Element>  // float, or uint16_t for bfloat16
struct KvCache {
  Element* data;
  int num_layers;
  int num_kv_heads;
  int block_size;
  int head_dim;

  Element* run(int64_t block, int layer, int kind, int kv_head) const {
    const int64_t index = ((block * num_layers + layer) * 2 + kind) * num_kv_heads + kv_head;
    return data + index * block_size * head_dim;
  }

  void write(int64_t slot, int layer, int kv_head, const float* key, const float* value) const {
    const int64_t block = slot / block_size;
    const int offset = static_cast<int>(slot % block_size);
    Element* keys = run(block, layer, 0, kv_head) + offset / simd::kLanes * simd::kLanes * head_dim;
    Element* values = run(block, layer, 1, kv_head) + static_cast<int64_t>(offset) * head_dim;
    for (int d = 0; d < head_dim; ++d) {
      put_element(keys[d * simd::kLanes + offset % simd::kLanes], key[d]);
      put_element(values[d], value[d]);
    }
  }
};

}  // namespace quire
