// Rows of a step on their way through all layers. A chain of phases:
//
//   embed | per layer: norm, query/key/value, rotary and KV write, attention, output projection,
//                      norm, gate/up and SiLU, down | norm of the sampled rows, logits
//
// each shared out over the threads of a pool. In the last layer the rows without logits end with their keys
// and values. Every row is computed in one fixed order, whatever the batch, the chunking and the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "activations.h"
#include "attention_plan.h"
#include "buffer.h"
#include "gated.h"
#include "kv_cache.h"
#include "logits.h"
#include "matmul.h"
#include "model.h"
#include "pool.h"
#include "rows.h"
#include "step.h"
#include "step_part.h"

namespace quire {

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

class Pass {
 public:
  // `scratch`: one of each thread that may work on a step
  Pass(const Model& model, ThreadPool& pool, std::vector<AttentionScratch>& scratch)
      : model_(model),
        config_(model.config),
        pool_(pool),
        scratch_(scratch),
        plan_(config_.num_heads / config_.num_kv_heads, config_.num_kv_heads, config_.head_dim,
              pool.max_threads()),
        logit_plan_(config_.num_heads / config_.num_kv_heads, config_.num_kv_heads, config_.head_dim,
                    pool.max_threads()),
        logits_(pool.max_threads()) {
    const size_t rows = config_.max_num_tokens;
    residual_ = Buffer<float>(rows * model.hidden_width);
    projected_ = Buffer<float>(rows * model.hidden_width);
    query_ = Buffer<float>(rows * model.query_width);
    kept_query_ = Buffer<float>(rows * model.query_width);
    key_ = Buffer<float>(rows * model.kv_width);
    value_ = Buffer<float>(rows * model.kv_width);
    cosines_ = Buffer<float>(rows * config_.head_dim / 2);
    sines_ = Buffer<float>(rows * config_.head_dim / 2);
    const bool with_quants = config_.with_quants != 0;
    normed_ = Activations(config_.max_num_tokens, model.hidden_width, with_quants);
    attended_ = Activations(config_.max_num_tokens, model.query_width, with_quants);
    mixed_ = Activations(config_.max_num_tokens, model.mlp_width, with_quants);
  }

  // Takes rows [first_row, end_row) of a step that `check` has passed. `earlier` are the passes of the rows
  // before them that belong to the same sequence as the first. Allocates all that `run` needs.
  void take(const Step& whole, int first_row, int end_row, std::vector<Pass*> earlier = {}) {
    part_.take(whole, first_row, end_row);
    earlier_ = std::move(earlier);
    layers_stored_.store(0, std::memory_order_relaxed);
    plan();
  }

  // By the pool's leader
  void run() {
    const Step& step = part_.step();
    if (step.num_tokens > 0) {
      timed(Phase::kEmbed, [&] { embed(step); });
      switch (static_cast<KvType>(config_.kv_type)) {
        case KvType::kFloat32: run_layers<float>(step); break;
        case KvType::kBfloat16: run_layers<uint16_t>(step); break;
        case KvType::kInt8: run_layers<int8_t>(step); break;
      }
      timed(Phase::kLogits, [&] { compute_logits(step); });
    }
    layers_stored_.store(config_.num_layers + 1, std::memory_order_release);
  }

  // Another thread helps with the phases of this pass until is_over().
  template <class IsOver>
  void help(int thread, const IsOver& is_over) {
    pool_.enter();
    for (Waiting waiting; !is_over(); waiting.pause()) pool_.work(thread);
    pool_.leave();
  }

  bool is_done() const { return has_stored(config_.num_layers + 1); }

  double phase_seconds(int phase) const { return phase_seconds_[phase]; }

 private:
  float* at(Buffer<float>& rows, int row, int width) {
    return rows.data() + static_cast<size_t>(row) * width;
  }

  static void add_bias(const Buffer<float>& bias, float* row) {
    if (!bias.empty()) add_row(bias.data(), static_cast<int>(bias.size()), row);
  }

  // Calls body(chunk, first row, end row) for all chunks of rows.
  template <class Body>
  void for_chunks(int num_rows, const Body& body) {
    pool_.run(RowChunks::count(num_rows), [&](int chunk, int) {
      body(chunk, RowChunks::start(num_rows, chunk), RowChunks::start(num_rows, chunk + 1));
    });
  }
  template <class Body>
  void for_rows(int num_rows, const Body& body) {
    for_chunks(num_rows, [&](int, int first, int end) {
      for (int row = first; row < end; ++row) body(row);
    });
  }

  template <class Body>
  void timed(Phase phase, const Body& body) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    phase_seconds_[static_cast<int>(phase)] += taken.count();
  }

  void plan() {
    const Step& step = part_.step();
    logits_.reserve(step.num_logit_rows, config_.hidden_size);
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
  void embed(const Step& step) {
    const int half = config_.head_dim / 2;
    for_rows(step.num_tokens, [&](int row) {
      dequantise_row(model_.embedding_format, model_.embedding + step.token_ids[row] * model_.embedding_row_bytes,
                     config_.hidden_size, at(residual_, row, model_.hidden_width));
      for (int d = 0; d < half; ++d) {
        const float angle = static_cast<float>(step.positions[row]) * model_.inverse_frequencies[d];
        at(cosines_, row, half)[d] = std::cos(angle);
        at(sines_, row, half)[d] = std::sin(angle);
      }
    });
  }

  // residual += added (+ bias), if any; normed = RMS norm of it, in the forms wanted.
  void normalise(int num_rows, const float* added, const Buffer<float>* bias,
                          const Buffer<float>& weight, const Forms& forms) {
    normed_.arrange(num_rows, forms);
    for_chunks(num_rows, [&](int chunk, int first, int end) {
      for (int row = first; row < end; ++row) {
        float* x = at(residual_, row, model_.hidden_width);
        if (added != nullptr) {
          add_row(added + static_cast<size_t>(row) * model_.hidden_width, model_.hidden_width, x);
          add_bias(*bias, x);
        }
        rms_norm(x, weight.data(), config_.hidden_size, model_.hidden_width, config_.rms_norm_eps,
                 normed_.row(row));
      }
      normed_.quantise(chunk, config_.hidden_size);
    });
  }

  template <class Element>
  void rotate_and_store(const Step& step, const KvCache<Element>& cache, int layer) {
    const Layer& weights = model_.layers[layer];
    const int head_dim = config_.head_dim;
    constexpr double kLog2E = 1.4426950408889634;
    const float scale = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(head_dim)));
    for_rows(step.num_tokens, [&](int row) {
      float* query = at(query_, row, model_.query_width);
      float* key = at(key_, row, model_.kv_width);
      float* value = at(value_, row, model_.kv_width);
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
  void keep_logit_rows(const Step& step) {
    for_rows(step.num_logit_rows, [&](int i) {
      const int row = static_cast<int>(step.logit_rows[i]);
      const int query_width = model_.query_width, hidden_width = model_.hidden_width;
      std::copy_n(at(query_, row, query_width), query_width, at(kept_query_, i, query_width));
      std::copy_n(at(residual_, row, hidden_width), hidden_width, at(projected_, i, hidden_width));
    });
    std::swap(query_, kept_query_);
    std::swap(residual_, projected_);
  }

  template <class Element>
  void run_layers(const Step& step) {
    int num_rows = step.num_tokens;
    AttentionPlan* plan = &plan_;
    const KvCache<Element> cache{static_cast<Element*>(step.kv_cache), step.blocks_per_slab,
                                 config_.num_layers, config_.num_kv_heads, step.block_size,
                                 config_.head_dim};
    const float* added = nullptr;
    const Buffer<float>* bias = nullptr;
    for (int index = 0; index < config_.num_layers; ++index) {
      const Layer& layer = model_.layers[index];
      const auto product = [&](MatrixName name, Buffer<float>& output, int width) {
        return Product{&layer.matrix(name), output.data(), static_cast<size_t>(width)};
      };
      timed(Phase::kNorm, [&] {
        normalise(num_rows, added, bias, layer.attention_norm,
                  layer.forms({MatrixName::kQuery, MatrixName::kKey, MatrixName::kValue}));
      });
      timed(Phase::kQueryKeyValue, [&] {
        multiply(pool_, normed_,
                 {product(MatrixName::kQuery, query_, model_.query_width),
                  product(MatrixName::kKey, key_, model_.kv_width),
                  product(MatrixName::kValue, value_, model_.kv_width)});
      });
      timed(Phase::kRotary, [&] { rotate_and_store(step, cache, index); });
      layers_stored_.store(index + 1, std::memory_order_release);
      if (index + 1 == config_.num_layers && step.narrows()) {
        timed(Phase::kRotary, [&] { keep_logit_rows(step); });
        num_rows = step.num_logit_rows;
        plan = &logit_plan_;
      }
      timed(Phase::kAttention, [&] {
        wait_for_keys(index);
        const size_t stride = model_.query_width;
        const Attention<Element> attention{
            cache, index, config_.num_heads / config_.num_kv_heads, query_.data(), stride, attended_.row(0), stride};
        plan->run(pool_, attention, [&](int thread) -> AttentionScratch& { return scratch_[thread]; });
        const int width = config_.num_heads * config_.head_dim;
        attended_.arrange(num_rows, layer.forms({MatrixName::kAttentionOutput}));
        for_chunks(num_rows, [&](int chunk, int, int) { attended_.quantise(chunk, width); });
      });
      timed(Phase::kAttentionOutput, [&] {
        multiply(pool_, attended_, {product(MatrixName::kAttentionOutput, projected_, model_.hidden_width)});
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
        multiply(pool_, mixed_, {product(MatrixName::kDown, projected_, model_.hidden_width)});
      });
      added = projected_.data();
      bias = &layer.bias(MatrixName::kDown);
    }
  }

  void compute_logits(const Step& step) {
    const Buffer<float>& bias = model_.layers.back().bias(MatrixName::kDown);
    normed_.arrange(step.num_logit_rows, model_.output_forms());
    for_chunks(step.num_logit_rows, [&](int chunk, int first, int end) {
      for (int i = first; i < end; ++i) {
        const int row = step.narrows() ? i : static_cast<int>(step.logit_rows[i]);
        float* x = normed_.row(i);
        std::copy_n(at(residual_, row, model_.hidden_width), model_.hidden_width, x);
        add_row(at(projected_, row, model_.hidden_width), model_.hidden_width, x);
        add_bias(bias, x);
        rms_norm(x, model_.final_norm.data(), config_.hidden_size, model_.hidden_width, config_.rms_norm_eps, x);
      }
      normed_.quantise(chunk, config_.hidden_size);
    });
    logits_.run(pool_, model_.output, model_.output_bounds, normed_, part_.logit_places(), step.logits);
  }

  bool has_stored(int num_layers) const {
    return layers_stored_.load(std::memory_order_acquire) >= num_layers;
  }

  // Helps the passes of the same sequence's earlier rows until they have stored a layer's keys and values.
  void wait_for_keys(int layer) {
    for (Pass* pass : earlier_) {
      if (pass->has_stored(layer + 1)) continue;
      pass->help(pool_.leader(), [&] { return pass->has_stored(layer + 1); });
    }
  }

  const Model& model_;
  const Config& config_;
  ThreadPool& pool_;
  std::vector<AttentionScratch>& scratch_;
  StepPart part_;
  std::vector<Pass*> earlier_;
  alignas(64) std::atomic<int> layers_stored_{0};  // how many layers' keys and values are there; one more: all is done
  alignas(64) AttentionPlan plan_;  // of all rows
  AttentionPlan logit_plan_;        // of those with logits, in the last layer
  LogitsProduct logits_;

  // [max_num_tokens][width]
  Buffer<float> residual_, projected_, query_, kept_query_, key_, value_;
  Buffer<float> cosines_, sines_;  // [max_num_tokens][head_dim / 2]
  Activations normed_, attended_, mixed_;
  double phase_seconds_[kNumPhases] = {};
};

}  // namespace quire
