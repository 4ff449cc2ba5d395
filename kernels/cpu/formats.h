// The blocks of GGUF files, decoded to integers, scales and minima.
//
// weight = scale * (quant - zero) + minimum, in float32, in this order: the same operations, hence the
// same bits, as the decoders of the gguf package. Source of the layouts: ggml-common.h and gguf/quants.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace quire {

// The numbers are the library's interface: kernels/cpu/library.py lists the names in this order.
enum class Format : int32_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
};

inline bool is_dense(Format format) { return format <= Format::kBF16; }

struct BlockShape {
  int num_weights;  // per block
  int num_bytes;
};

inline BlockShape block_shape(Format format) {
  switch (format) {
    case Format::kF32: return {1, 4};
    case Format::kF16: return {1, 2};
    case Format::kBF16: return {1, 2};
    case Format::kQ4_0: return {32, 18};
    case Format::kQ4_1: return {32, 20};
    case Format::kQ5_0: return {32, 22};
    case Format::kQ5_1: return {32, 24};
    case Format::kQ8_0: return {32, 34};
    case Format::kQ2_K: return {256, 84};
    case Format::kQ3_K: return {256, 110};
    case Format::kQ4_K: return {256, 144};
    case Format::kQ5_K: return {256, 176};
    case Format::kQ6_K: return {256, 210};
  }
  return {0, 0};
}

// One block. Scales and minima stand per group of 16 or 32 weights; where the file has them as halves,
// their bits are kept in `scale_half` and `minimum_half` too.
struct DecodedBlock {
  int8_t quants[256];
  float scales[16];
  float minima[16];
  uint16_t scale_half;
  uint16_t minimum_half;
};

inline uint16_t read_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

inline float half_at(const uint8_t* p) { return simd::half_to_float(read_u16(p)); }

inline float bfloat_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

namespace formats {

inline void read_scale(const uint8_t* p, DecodedBlock& out) {
  out.scale_half = read_u16(p);
  out.scales[0] = half_at(p);
  out.minima[0] = 0.0f;
}

inline void read_minimum(const uint8_t* p, DecodedBlock& out) {
  out.minimum_half = read_u16(p);
  out.minima[0] = half_at(p);
}

// 32 nibbles: weight i is the low half of byte i, weight 16 + i its high half.
inline void read_nibbles(const uint8_t* p, int8_t* quants) {
  for (int i = 0; i < 16; ++i) {
    quants[i] = static_cast<int8_t>(p[i] & 15);
    quants[16 + i] = static_cast<int8_t>(p[i] >> 4);
  }
}

inline void add_fifth_bits(const uint8_t* p, int8_t* quants) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  for (int i = 0; i < 32; ++i) quants[i] = static_cast<int8_t>(quants[i] | ((bits >> i) & 1) << 4);
}

inline void decode_q4_0(const uint8_t* p, DecodedBlock& out) {
  read_scale(p, out);
  read_nibbles(p + 2, out.quants);
}

inline void decode_q4_1(const uint8_t* p, DecodedBlock& out) {
  read_scale(p, out);
  read_minimum(p + 2, out);
  read_nibbles(p + 4, out.quants);
}

inline void decode_q5_0(const uint8_t* p, DecodedBlock& out) {
  read_scale(p, out);
  read_nibbles(p + 6, out.quants);
  add_fifth_bits(p + 2, out.quants);
  for (int i = 0; i < 32; ++i) out.quants[i] = static_cast<int8_t>(out.quants[i] - 16);
}

inline void decode_q5_1(const uint8_t* p, DecodedBlock& out) {
  read_scale(p, out);
  read_minimum(p + 2, out);
  read_nibbles(p + 8, out.quants);
  add_fifth_bits(p + 4, out.quants);
}

inline void decode_q8_0(const uint8_t* p, DecodedBlock& out) {
  read_scale(p, out);
  std::memcpy(out.quants, p + 2, 32);
}

inline void decode_q2_k(const uint8_t* p, DecodedBlock& out) {
  const uint8_t* quants = p + 16;
  const float scale = half_at(p + 80), minimum = half_at(p + 82);
  for (int group = 0; group < 16; ++group) {
    out.scales[group] = scale * static_cast<float>(p[group] & 15);
    out.minima[group] = -(minimum * static_cast<float>(p[group] >> 4));
  }
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, shift = i % 128 / 32 * 2;
    out.quants[i] = static_cast<int8_t>((quants[32 * half + i % 32] >> shift) & 3);
  }
}

inline void decode_q3_k(const uint8_t* p, DecodedBlock& out) {
  const uint8_t *high_bits = p, *quants = p + 32, *scales = p + 96;
  const float scale = half_at(p + 108);
  for (int group = 0; group < 16; ++group) {
    const int low = (scales[group % 8] >> (group / 8 * 4)) & 15;
    const int high = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
    out.scales[group] = scale * static_cast<float>((low | high << 4) - 32);
    out.minima[group] = 0.0f;
  }
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, shift = i % 128 / 32 * 2;
    const int low = (quants[32 * half + i % 32] >> shift) & 3;
    const int is_whole = (high_bits[i % 32] >> (i / 32)) & 1;  // a clear bit takes 4 away
    out.quants[i] = static_cast<int8_t>(low - (is_whole ? 0 : 4));
  }
}

// The 6-bit scales and minima of Q4_K and Q5_K, 8 each in 12 bytes.
inline void read_k_scales(const uint8_t* p, DecodedBlock& out) {
  const float scale = half_at(p), minimum = half_at(p + 2);
  const uint8_t* packed = p + 4;
  for (int group = 0; group < 8; ++group) {
    int s, m;
    if (group < 4) {
      s = packed[group] & 63;
      m = packed[4 + group] & 63;
    } else {
      s = (packed[4 + group] & 15) | (packed[group - 4] >> 6) << 4;
      m = (packed[4 + group] >> 4) | (packed[group] >> 6) << 4;
    }
    out.scales[group] = scale * static_cast<float>(s);
    out.minima[group] = -(minimum * static_cast<float>(m));
  }
}

inline void decode_q4_k(const uint8_t* p, DecodedBlock& out) {
  read_k_scales(p, out);
  const uint8_t* quants = p + 16;
  for (int i = 0; i < 256; ++i) {
    const int shift = i / 32 % 2 * 4;
    out.quants[i] = static_cast<int8_t>((quants[i / 64 * 32 + i % 32] >> shift) & 15);
  }
}

inline void decode_q5_k(const uint8_t* p, DecodedBlock& out) {
  read_k_scales(p, out);
  const uint8_t *high_bits = p + 16, *quants = p + 48;
  for (int i = 0; i < 256; ++i) {
    const int shift = i / 32 % 2 * 4;
    const int low = (quants[i / 64 * 32 + i % 32] >> shift) & 15;
    out.quants[i] = static_cast<int8_t>(low | ((high_bits[i % 32] >> (i / 32)) & 1) << 4);
  }
}

inline void decode_q6_k(const uint8_t* p, DecodedBlock& out) {
  const uint8_t *low_bits = p, *high_bits = p + 128;
  const int8_t* scales = reinterpret_cast<const int8_t*>(p + 192);
  const float scale = half_at(p + 208);
  for (int group = 0; group < 16; ++group) {
    out.scales[group] = scale * static_cast<float>(scales[group]);
    out.minima[group] = 0.0f;
  }
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, within = i % 128;
    const int low = (low_bits[64 * half + within % 64] >> (within / 64 * 4)) & 15;
    const int high = (high_bits[32 * half + within % 32] >> (within / 32 * 2)) & 3;
    out.quants[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

}  // namespace formats

// Decodes one block of a quantised format.
inline void decode_block(Format format, const uint8_t* p, DecodedBlock& out) {
  switch (format) {
    case Format::kQ4_0: return formats::decode_q4_0(p, out);
    case Format::kQ4_1: return formats::decode_q4_1(p, out);
    case Format::kQ5_0: return formats::decode_q5_0(p, out);
    case Format::kQ5_1: return formats::decode_q5_1(p, out);
    case Format::kQ8_0: return formats::decode_q8_0(p, out);
    case Format::kQ2_K: return formats::decode_q2_k(p, out);
    case Format::kQ3_K: return formats::decode_q3_k(p, out);
    case Format::kQ4_K: return formats::decode_q4_k(p, out);
    case Format::kQ5_K: return formats::decode_q5_k(p, out);
    case Format::kQ6_K: return formats::decode_q6_k(p, out);
    case Format::kF32:
    case Format::kF16:
    case Format::kBF16: break;
  }
}

// What stands for zero among the quants.
inline int zero_quant(Format format) { return format == Format::kQ4_0 ? 8 : 0; }

// Weights that share a scale.
inline int group_size(Format format) {
  return format == Format::kQ2_K || format == Format::kQ3_K || format == Format::kQ6_K ? 16 : 32;
}

// The float32 values of a stored row.
inline void dequantise_row(Format format, const uint8_t* row, int num_columns, float* out) {
  if (format == Format::kF32) {
    std::memcpy(out, row, static_cast<size_t>(num_columns) * 4);
    return;
  }
  if (is_dense(format)) {
    for (int i = 0; i < num_columns; ++i) {
      out[i] = format == Format::kF16 ? half_at(row + 2 * i) : bfloat_to_float(read_u16(row + 2 * i));
    }
    return;
  }
  const BlockShape shape = block_shape(format);
  const int zero = zero_quant(format), group = group_size(format);
  DecodedBlock block;
  for (int start = 0; start < num_columns; start += shape.num_weights, row += shape.num_bytes) {
    decode_block(format, row, block);
    for (int i = 0; i < shape.num_weights; ++i) {
      const float scaled = block.scales[i / group] * static_cast<float>(block.quants[i] - zero);
      out[start + i] = scaled + block.minima[i / group];
    }
  }
}

}  // namespace quire
