// What the library is asked for: a model's sizes, and one step of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "logits.h"

namespace quire {

// These structures and numbers are the library's interface: kernels/cpu/library.py mirrors them.
struct Config {
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t vocab_size;
  int32_t with_quants;   // activations in 8 bits where weights are quantised
  int32_t kv_type;       // KvType
  int32_t num_threads;
  int32_t max_num_tokens;
  float rms_norm_eps;
};

struct Step {
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t table_size;
  int32_t block_size;
  int64_t num_blocks;
  int32_t blocks_per_slab;
  int32_t num_logit_rows;
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const int64_t* logit_rows;
  void* kv_cache;
  LogitsOut logits;

  const int32_t* block_table(int seq) const { return block_tables + int64_t{seq} * table_size; }
  int num_new(int seq) const { return query_start[seq + 1] - query_start[seq]; }
  // Positions that a row of a sequence attends to
  int context(int seq, int64_t row) const {
    return seq_lens[seq] - static_cast<int>(query_start[seq + 1] - 1 - row);
  }
  // The sequence of a row
  int sequence(int64_t row) const {
    return static_cast<int>(std::upper_bound(query_start, query_start + num_seqs + 1, row) - query_start) - 1;
  }
  // Whether logits are wanted of fewer rows than the step has
  bool narrows() const { return num_logit_rows < num_tokens; }
};

enum class Error : int32_t {
  kNone,
  kTooManyTokens,
  kTokenId,
  kSlot,
  kSequence,
  kBlockTable,
  kLogitRow,
  kOutOfMemory,
  kWeights,
};

enum class KvType : int32_t { kFloat32, kBfloat16, kInt8 };

// Checks every index of a step.
inline Error check(const Config& config, const Step& step) {
  if (step.num_tokens > config.max_num_tokens || step.num_logit_rows > config.max_num_tokens) {
    return Error::kTooManyTokens;
  }
  const int64_t num_slots = step.num_blocks * step.block_size;
  for (int row = 0; row < step.num_tokens; ++row) {
    if (step.token_ids[row] < 0 || step.token_ids[row] >= config.vocab_size) return Error::kTokenId;
    if (step.slots[row] < 0 || step.slots[row] >= num_slots) return Error::kSlot;
  }
  if (step.query_start[0] != 0 || step.query_start[step.num_seqs] != step.num_tokens) {
    return Error::kSequence;
  }
  for (int i = 0; i < step.num_seqs; ++i) {
    if (step.num_new(i) < 0 || step.seq_lens[i] < step.num_new(i)) return Error::kSequence;
    const int64_t num_blocks = (int64_t{step.seq_lens[i]} + step.block_size - 1) / step.block_size;
    if (num_blocks > step.table_size) return Error::kBlockTable;
    const int32_t* table = step.block_table(i);
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (table[b] < 0 || table[b] >= step.num_blocks) return Error::kBlockTable;
    }
  }
  for (int i = 0; i < step.num_logit_rows; ++i) {
    if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.num_tokens) return Error::kLogitRow;
  }
  return Error::kNone;
}

}  // namespace quire
