// What steps read and do not change: a model's sizes and its weights.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "activations.h"
#include "arena.h"
#include "buffer.h"
#include "formats.h"
#include "matrix.h"
#include "output_bounds.h"
#include "step.h"

namespace quire {

enum class MatrixName : int32_t { kQuery, kKey, kValue, kAttentionOutput, kGate, kUp, kDown, kOutput };
constexpr int kMatricesPerLayer = 7;

enum class VectorName : int32_t { kAttentionNorm, kMlpNorm, kFinalNorm, kInverseFrequencies };

// Floats from one row to the next: an odd number of cache lines, so that a column of rows falls into all
// sets of the caches and not into a few. Whole panels too.
inline int padded(int size) {
  constexpr int kLine = 16;
  static_assert(kLine % kPanel == 0 || kPanel % kLine == 0);
  constexpr int kUnit = kPanel > kLine ? kPanel : kLine;
  return ((size + kUnit - 1) / kUnit | 1) * kUnit;
}

struct Layer {
  Matrix matrices[kMatricesPerLayer];
  Buffer<float> biases[kMatricesPerLayer];  // empty: none; padded
  Buffer<float> attention_norm;
  Buffer<float> mlp_norm;

  const Matrix& matrix(MatrixName name) const { return matrices[static_cast<int>(name)]; }
  const Buffer<float>& bias(MatrixName name) const { return biases[static_cast<int>(name)]; }
  Forms forms(std::initializer_list<MatrixName> readers) const {
    Forms forms;
    for (const MatrixName name : readers) forms.add(matrix(name));
    return forms;
  }
};

struct Model {
  explicit Model(const Config& sizes)
      : config(sizes),
        hidden_width(padded(sizes.hidden_size)),
        query_width(padded(sizes.num_heads * sizes.head_dim)),
        kv_width(padded(sizes.num_kv_heads * sizes.head_dim)),
        mlp_width(padded(sizes.intermediate_size)),
        layers(sizes.num_layers) {}

  Forms output_forms() const {
    Forms forms = Forms().add(output);
    forms.bytes |= output_bounds.are_measured();
    return forms;
  }

  Config config;
  int hidden_width, query_width, kv_width, mlp_width;  // padded rows
  Arena arena;  // of the matrices
  std::vector<Layer> layers;
  Matrix output;
  OutputBounds output_bounds;
  Buffer<float> final_norm;
  Buffer<float> inverse_frequencies;
  Format embedding_format = Format::kF32;
  const uint8_t* embedding = nullptr;
  size_t embedding_row_bytes = 0;
};

}  // namespace quire
