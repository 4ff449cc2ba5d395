#include "decoder.h"

#include <algorithm>
#include <optional>

namespace quire {

namespace {

Buffer<float> padded_copy(const float* data, int size) {
  Buffer<float> copy(static_cast<size_t>(padded(size)));
  std::copy_n(data, size, copy.data());
  return copy;
}

void add_bias(const Buffer<float>& bias, float* row) {
  if (!bias.empty()) add_row(bias.data(), static_cast<int>(bias.size()), row);
}

}  // namespace

Decoder::Decoder(const Config& config)
    : config_(config),
      hidden_width_(padded(config.hidden_size)),
      query_width_(padded(config.num_heads * config.head_dim)),
      kv_width_(padded(config.num_kv_heads * config.head_dim)),
      mlp_width_(padded(config.intermediate_size)),
      pool_(config.num_threads),
      plan_(config.num_heads / config.num_kv_heads, config.num_kv_heads, config.head_dim,
            config.num_threads),
      logit_plan_(config.num_heads / config.num_kv_heads, config.num_kv_heads, config.head_dim,
                  config.num_threads),
      logits_(config.num_threads),
      layers_(config.num_layers) {
  const size_t rows = config.max_num_tokens;
  residual_ = Buffer<float>(rows * hidden_width_);
  projected_ = Buffer<float>(rows * hidden_width_);
  query_ = Buffer<float>(rows * query_width_);
  kept_query_ = Buffer<float>(rows * query_width_);
  key_ = Buffer<float>(rows * kv_width_);
  value_ = Buffer<float>(rows * kv_width_);
  cosines_ = Buffer<float>(rows * config.head_dim / 2);
  sines_ = Buffer<float>(rows * config.head_dim / 2);
  const bool with_quants = config.with_quants != 0;
  normed_ = Activations(config.max_num_tokens, hidden_width_, with_quants);
  attended_ = Activations(config.max_num_tokens, query_width_, with_quants);
  mixed_ = Activations(config.max_num_tokens, mlp_width_, with_quants);
}

Error Decoder::set_matrix(int layer, MatrixName name, Format format, const uint8_t* data, int num_rows,
                          int num_columns) {
  Matrix& target =
      name == MatrixName::kOutput ? output_ : layers_[layer].matrices[static_cast<int>(name)];
  pool_.begin_step();
  const std::optional<Matrix> packed = pack_matrix(format, data, num_rows, num_columns, pool_, weights_);
  pool_.end_step();
  if (!packed) return Error::kWeights;
  target = *packed;
  return Error::kNone;
}

void Decoder::set_vector(int layer, VectorName name, const float* data, int size) {
  Buffer<float> copy = padded_copy(data, size);
  switch (name) {
    case VectorName::kAttentionNorm: layers_[layer].attention_norm = std::move(copy); break;
    case VectorName::kMlpNorm: layers_[layer].mlp_norm = std::move(copy); break;
    case VectorName::kFinalNorm: final_norm_ = std::move(copy); break;
    case VectorName::kInverseFrequencies: inverse_frequencies_ = std::move(copy); break;
  }
}

void Decoder::set_bias(int layer, MatrixName name, const float* data, int size) {
  layers_[layer].biases[static_cast<int>(name)] = padded_copy(data, size);
}

void Decoder::set_embedding(Format format, const uint8_t* data) {
  const BlockShape shape = block_shape(format);
  embedding_format_ = format;
  embedding_ = data;
  embedding_row_bytes_ = static_cast<size_t>(config_.hidden_size) / shape.num_weights * shape.num_bytes;
}

// The rows of a chunk go to one thread, so that no two write to one line of its quants.
template <class Body>
void Decoder::for_rows(int num_rows, const Body& body) {
  pool_.run(RowChunks::count(num_rows), [&](int chunk, int) {
    const int end = RowChunks::start(num_rows, chunk + 1);
    for (int row = RowChunks::start(num_rows, chunk); row < end; ++row) body(row);
  });
}

template <class Body>
void Decoder::timed(Phase phase, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  phase_seconds_[static_cast<int>(phase)] += taken.count();
}

Error Decoder::forward(const Step& step) {
  const Error error = check(config_, step);
  if (error != Error::kNone) return error;
  plan(step);
  pool_.begin_step();
  timed(Phase::kEmbed, [&] { embed(step); });
  switch (static_cast<KvType>(config_.kv_type)) {
    case KvType::kFloat32: run_layers<float>(step); break;
    case KvType::kBfloat16: run_layers<uint16_t>(step); break;
    case KvType::kInt8: run_layers<int8_t>(step); break;
  }
  timed(Phase::kLogits, [&] { compute_logits(step); });
  pool_.end_step();
  return Error::kNone;
}

void Decoder::plan(const Step& step) {
  plan_.begin();
  for (int seq = 0; seq < step.num_seqs; ++seq) {
    const int first = step.query_start[seq];
    plan_.add(step.block_table(seq), first, step.num_new(seq), step.context(seq, first));
  }
  plan_.finish();
  if (!step.narrows()) return;
  logit_plan_.begin();
  for (int i = 0; i < step.num_logit_rows; ++i) {
    const int seq = step.sequence(step.logit_rows[i]);
    logit_plan_.add(step.block_table(seq), i, 1, step.context(seq, step.logit_rows[i]));
  }
  logit_plan_.finish();
}

// Embedding rows, and the angles of each row's position.
void Decoder::embed(const Step& step) {
  const int half = config_.head_dim / 2;
  for_rows(step.num_tokens, [&](int row) {
    dequantise_row(embedding_format_, embedding_ + step.token_ids[row] * embedding_row_bytes_,
                   config_.hidden_size, at(residual_, row, hidden_width_));
    for (int d = 0; d < half; ++d) {
      const float angle = static_cast<float>(step.positions[row]) * inverse_frequencies_[d];
      at(cosines_, row, half)[d] = std::cos(angle);
      at(sines_, row, half)[d] = std::sin(angle);
    }
  });
}

// residual += added (+ bias), if any; normed = RMS norm of it, in the forms wanted.
void Decoder::normalise(int num_rows, const float* added, const Buffer<float>* bias,
                        const Buffer<float>& weight, const Forms& forms) {
  normed_.arrange(num_rows, forms);
  for_rows(num_rows, [&](int row) {
    float* x = at(residual_, row, hidden_width_);
    if (added != nullptr) {
      add_row(added + static_cast<size_t>(row) * hidden_width_, hidden_width_, x);
      add_bias(*bias, x);
    }
    rms_norm(x, weight.data(), config_.hidden_size, hidden_width_, config_.rms_norm_eps,
             normed_.row(row));
    normed_.quantise(row, config_.hidden_size);
  });
}

template <class Element>
void Decoder::rotate_and_store(const Step& step, const KvCache<Element>& cache, int layer) {
  const Layer& weights = layers_[layer];
  const int head_dim = config_.head_dim;
  constexpr double kLog2E = 1.4426950408889634;
  const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(head_dim)));
  for_rows(step.num_tokens, [&](int row) {
    float* query = at(query_, row, query_width_);
    float* key = at(key_, row, kv_width_);
    float* value = at(value_, row, kv_width_);
    const float* cosines = at(cosines_, row, head_dim / 2);
    const float* sines = at(sines_, row, head_dim / 2);
    add_bias(weights.bias(MatrixName::kQuery), query);
    add_bias(weights.bias(MatrixName::kKey), key);
    add_bias(weights.bias(MatrixName::kValue), value);
    for (int head = 0; head < config_.num_heads; ++head) {
      rotate_head(cosines, sines, head_dim, scale, query + head * head_dim);
    }
    for (int head = 0; head < config_.num_kv_heads; ++head) {
      rotate_head(cosines, sines, head_dim, 1.0f, key + head * head_dim);
      cache.write(step.slots[row], layer, head, key + head * head_dim, value + head * head_dim);
    }
  });
}

// Moves what the last layer goes on with, of the rows with logits alone, to the first rows.
void Decoder::keep_logit_rows(const Step& step) {
  for_rows(step.num_logit_rows, [&](int i) {
    const int row = static_cast<int>(step.logit_rows[i]);
    std::copy_n(at(query_, row, query_width_), query_width_, at(kept_query_, i, query_width_));
    std::copy_n(at(residual_, row, hidden_width_), hidden_width_, at(projected_, i, hidden_width_));
  });
  std::swap(query_, kept_query_);
  std::swap(residual_, projected_);
}

template <class Element>
void Decoder::run_layers(const Step& step) {
  int num_rows = step.num_tokens;
  AttentionPlan* plan = &plan_;
  const KvCache<Element> cache{static_cast<Element*>(step.kv_cache), step.num_blocks,
                               config_.num_kv_heads, step.block_size, config_.head_dim};
  const float* added = nullptr;
  const Buffer<float>* bias = nullptr;
  for (int index = 0; index < config_.num_layers; ++index) {
    const Layer& layer = layers_[index];
    const auto product = [&](MatrixName name, Buffer<float>& output, int width) {
      return Product{&layer.matrix(name), output.data(), static_cast<size_t>(width)};
    };
    timed(Phase::kNorm, [&] {
      normalise(num_rows, added, bias, layer.attention_norm,
                layer.forms({MatrixName::kQuery, MatrixName::kKey, MatrixName::kValue}));
    });
    timed(Phase::kQueryKeyValue, [&] {
      multiply(pool_, normed_,
               {product(MatrixName::kQuery, query_, query_width_),
                product(MatrixName::kKey, key_, kv_width_),
                product(MatrixName::kValue, value_, kv_width_)});
    });
    timed(Phase::kRotary, [&] { rotate_and_store(step, cache, index); });
    if (index + 1 == config_.num_layers && step.narrows()) {
      timed(Phase::kRotary, [&] { keep_logit_rows(step); });
      num_rows = step.num_logit_rows;
      plan = &logit_plan_;
    }
    timed(Phase::kAttention, [&] {
      const Attention<Element> attention{
          cache,          index, config_.num_heads / config_.num_kv_heads, query_.data(),
          static_cast<size_t>(query_width_), attended_.row(0), static_cast<size_t>(query_width_)};
      plan->run(pool_, attention);
      const int width = config_.num_heads * config_.head_dim;
      attended_.arrange(num_rows, layer.forms({MatrixName::kAttentionOutput}));
      for_rows(num_rows, [&](int row) { attended_.quantise(row, width); });
    });
    timed(Phase::kAttentionOutput, [&] {
      multiply(pool_, attended_, {product(MatrixName::kAttentionOutput, projected_, hidden_width_)});
    });
    timed(Phase::kNorm, [&] {
      normalise(num_rows, projected_.data(), &layer.bias(MatrixName::kAttentionOutput),
                layer.mlp_norm, layer.forms({MatrixName::kGate, MatrixName::kUp}));
    });
    timed(Phase::kGateUp, [&] {
      mixed_.arrange(num_rows, layer.forms({MatrixName::kDown}));
      multiply_gated(pool_, normed_,
                     {&layer.matrix(MatrixName::kGate), &layer.matrix(MatrixName::kUp),
                      &layer.bias(MatrixName::kGate), &layer.bias(MatrixName::kUp)},
                     mixed_);
    });
    timed(Phase::kDown, [&] {
      multiply(pool_, mixed_, {product(MatrixName::kDown, projected_, hidden_width_)});
    });
    added = projected_.data();
    bias = &layer.bias(MatrixName::kDown);
  }
}

void Decoder::compute_logits(const Step& step) {
  const Buffer<float>& bias = layers_.back().bias(MatrixName::kDown);
  normed_.arrange(step.num_logit_rows, Forms().add(output_));
  for_rows(step.num_logit_rows, [&](int i) {
    const int row = step.narrows() ? i : static_cast<int>(step.logit_rows[i]);
    float* x = normed_.row(i);
    std::copy_n(at(residual_, row, hidden_width_), hidden_width_, x);
    add_row(at(projected_, row, hidden_width_), hidden_width_, x);
    add_bias(bias, x);
    rms_norm(x, final_norm_.data(), config_.hidden_size, hidden_width_, config_.rms_norm_eps, x);
    normed_.quantise(i, config_.hidden_size);
  });
  logits_.run(pool_, output_, normed_, step.logits);
}

}  // namespace quire

// The library's interface. Exceptions do not cross it; the only ones here are those of allocations.
namespace {

template <class Body>
int32_t guarded(const Body& body) {
  try {
    return static_cast<int32_t>(body());
  } catch (...) {
    return static_cast<int32_t>(quire::Error::kOutOfMemory);
  }
}

}  // namespace

extern "C" {

quire::Decoder* quire_create(const quire::Config* config) {
  try {
    return new quire::Decoder(*config);
  } catch (...) {
    return nullptr;
  }
}

void quire_destroy(quire::Decoder* decoder) { delete decoder; }

// The threads that work on a step: fewer than wanted if the system gave no more.
int32_t quire_num_threads(const quire::Decoder* decoder) { return decoder->num_threads(); }

int32_t quire_num_lanes() { return quire::simd::kLanes; }

int32_t quire_set_matrix(quire::Decoder* decoder, int32_t layer, int32_t name, int32_t format,
                         const void* data, int32_t num_rows, int32_t num_columns) {
  return guarded([&] {
    return decoder->set_matrix(layer, static_cast<quire::MatrixName>(name),
                               static_cast<quire::Format>(format), static_cast<const uint8_t*>(data),
                               num_rows, num_columns);
  });
}

int32_t quire_set_vector(quire::Decoder* decoder, int32_t layer, int32_t name, const float* data,
                         int32_t size) {
  return guarded([&] {
    decoder->set_vector(layer, static_cast<quire::VectorName>(name), data, size);
    return quire::Error::kNone;
  });
}

int32_t quire_set_bias(quire::Decoder* decoder, int32_t layer, int32_t name, const float* data,
                       int32_t size) {
  return guarded([&] {
    decoder->set_bias(layer, static_cast<quire::MatrixName>(name), data, size);
    return quire::Error::kNone;
  });
}

void quire_set_embedding(quire::Decoder* decoder, int32_t format, const void* data) {
  decoder->set_embedding(static_cast<quire::Format>(format), static_cast<const uint8_t*>(data));
}

int32_t quire_forward(quire::Decoder* decoder, const quire::Step* step) {
  return guarded([&] { return decoder->forward(*step); });
}

// Seconds spent in each phase since the decoder was made.
void quire_phase_seconds(const quire::Decoder* decoder, double* seconds) {
  std::copy_n(decoder->phase_seconds(), quire::kNumPhases, seconds);
}
}
