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

std::vector<AttentionScratch> new_scratch(const Config& config, int num_threads) {
  std::vector<AttentionScratch> scratch;
  for (int i = 0; i < num_threads; ++i) {
    scratch.emplace_back(config.num_heads / config.num_kv_heads, config.head_dim);
  }
  return scratch;
}

}  // namespace

Decoder::Decoder(const Config& config)
    : model_(config),
      pool_(config.num_threads),
      scratch_(new_scratch(config, pool_.num_threads())),
      shared_(model_, pool_, scratch_),
      apart_(model_, pool_, scratch_) {}

Error Decoder::set_matrix(int layer, MatrixName name, Format format, const uint8_t* data, int num_rows,
                          int num_columns) {
  Matrix& target =
      name == MatrixName::kOutput ? model_.output : model_.layers[layer].matrices[static_cast<int>(name)];
  const ThreadPool::Awake awake(pool_);
  const std::optional<Matrix> packed = pack_matrix(format, data, num_rows, num_columns, pool_, model_.arena);
  if (!packed) return Error::kWeights;
  target = *packed;
  if (name == MatrixName::kOutput && model_.config.with_quants != 0 && OutputBounds::are_for(target)) {
    model_.output_bounds.measure(target, pool_);
  }
  return Error::kNone;
}

void Decoder::set_vector(int layer, VectorName name, const float* data, int size) {
  Buffer<float> copy = padded_copy(data, size);
  switch (name) {
    case VectorName::kAttentionNorm: model_.layers[layer].attention_norm = std::move(copy); break;
    case VectorName::kMlpNorm: model_.layers[layer].mlp_norm = std::move(copy); break;
    case VectorName::kFinalNorm: model_.final_norm = std::move(copy); break;
    case VectorName::kInverseFrequencies: model_.inverse_frequencies = std::move(copy); break;
  }
}

void Decoder::set_bias(int layer, MatrixName name, const float* data, int size) {
  model_.layers[layer].biases[static_cast<int>(name)] = padded_copy(data, size);
}

void Decoder::set_embedding(Format format, const uint8_t* data) {
  const BlockShape shape = block_shape(format);
  const size_t blocks_per_row = model_.config.hidden_size / shape.num_weights;
  model_.embedding_format = format;
  model_.embedding = data;
  model_.embedding_row_bytes = blocks_per_row * shape.num_bytes;
}

Error Decoder::forward(const Step& step) {
  const Error error = check(model_.config, step);
  if (error != Error::kNone) return error;
  const ThreadPool::Awake awake(pool_);
  if (apart_.are_for(step)) {
    apart_.take(step);
    apart_.run();
  } else {
    shared_.take(step, 0, step.num_tokens);
    shared_.run();
  }
  return Error::kNone;
}

double Decoder::phase_seconds(int phase) const {
  return shared_.phase_seconds(phase) + apart_.phase_seconds(phase);
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
  for (int phase = 0; phase < quire::kNumPhases; ++phase) seconds[phase] = decoder->phase_seconds(phase);
}
}
