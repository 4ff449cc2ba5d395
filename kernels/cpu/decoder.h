// A decoder-only model of the Llama family, and one step of it.
//
// A step is a chain of phases, each shared out over the threads:
//
//   embed | per layer: norm, query/key/value, rotary and KV write, attention, output projection,
//                      norm, gate/up and SiLU, down | norm of the sampled rows, logits
//
// In the last layer the rows without logits end with their keys and values. Every row is computed in one fixed
// order, whatever the batch, the chunking and the threads.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "arena.h"
#include "attention_plan.h"
#include "buffer.h"
#include "formats.h"
#include "gated.h"
#include "kv_cache.h"
#include "logits.h"
#include "matmul.h"
#include "matrix.h"
#include "pool.h"
#include "rows.h"
#include "step.h"

namespace quire {

enum class MatrixName : int32_t { kQuery, kKey, kValue, kAttentionOutput, kGate, kUp, kDown, kOutput };
constexpr int kMatricesPerLayer = 7;

enum class VectorName : int32_t { kAttentionNorm, kMlpNorm, kFinalNorm, kInverseFrequencies };

enum class Phase : int32_t {
  kEmbed,
  kNorm,
  kQueryKeyValue,
  kRotary,
  kAttention,
  kAttentionOutput,
  kGateUp,
  kDown,
  kLogits,
};
constexpr int kNumPhases = 9;

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

class Decoder {
 public:
  explicit Decoder(const Config& config);

  // Repacks a stored matrix; `data` may go afterwards. kWeights if it holds scales that are not finite.
  Error set_matrix(int layer, MatrixName name, Format format, const uint8_t* data, int num_rows,
                   int num_columns);
  void set_vector(int layer, VectorName name, const float* data, int size);
  void set_bias(int layer, MatrixName name, const float* data, int size);
  // Rows of the embedding are read where they stand: `data` must stay.
  void set_embedding(Format format, const uint8_t* data);

  // Checks every index of the step, then computes it.
  Error forward(const Step& step);

  int num_threads() const { return pool_.num_threads(); }
  const double* phase_seconds() const { return phase_seconds_; }

 private:
  void plan(const Step& step);
  void embed(const Step& step);
  template <class Element>
  void run_layers(const Step& step);
  void normalise(int num_rows, const float* added, const Buffer<float>* bias, const Buffer<float>& weight,
                 const Forms& forms);
  void keep_logit_rows(const Step& step);
  template <class Element>
  void rotate_and_store(const Step& step, const KvCache<Element>& cache, int layer);
  void compute_logits(const Step& step);

  template <class Body>
  void for_rows(int num_rows, const Body& body);
  template <class Body>
  void timed(Phase phase, const Body& body);

  float* at(Buffer<float>& rows, int row, int width) {
    return rows.data() + static_cast<size_t>(row) * width;
  }

  Config config_;
  int hidden_width_, query_width_, kv_width_, mlp_width_;  // padded rows
  ThreadPool pool_;
  AttentionPlan plan_, logit_plan_;  // of all rows, and of those with logits in the last layer
  LogitsProduct logits_;
  Arena weights_;
  std::vector<Layer> layers_;
  Matrix output_;
  Buffer<float> final_norm_;
  Buffer<float> inverse_frequencies_;
  Format embedding_format_ = Format::kF32;
  const uint8_t* embedding_ = nullptr;
  size_t embedding_row_bytes_ = 0;

  // rows of a step, [max_num_tokens][width]
  Buffer<float> residual_, projected_, query_, kept_query_, key_, value_;
  Buffer<float> cosines_, sines_;  // [max_num_tokens][head_dim / 2]
  Activations normed_, attended_, mixed_;
  double phase_seconds_[kNumPhases] = {};
};

}  // namespace quire
