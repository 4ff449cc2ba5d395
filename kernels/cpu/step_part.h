// Neighbouring rows of a step, as a step of their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "step.h"

namespace quire {

class StepPart {
 public:
  // Rows [first_row, end_row) of `whole`, whose arrays must stay as they are meanwhile.
  void take(const Step& whole, int first_row, int end_row) {
    step_ = whole;
    step_.num_tokens = end_row - first_row;
    take_sequences(whole, first_row, end_row);
    logit_rows_.clear();
    logit_places_.clear();
    for (int i = 0; i < whole.num_logit_rows; ++i) {
      if (whole.logit_rows[i] < first_row || whole.logit_rows[i] >= end_row) continue;
      logit_rows_.push_back(whole.logit_rows[i] - first_row);
      logit_places_.push_back(i);
    }
    step_.num_logit_rows = static_cast<int32_t>(logit_rows_.size());
    step_.token_ids = whole.token_ids + first_row;
    step_.positions = whole.positions + first_row;
    step_.slots = whole.slots + first_row;
    step_.query_start = query_start_.data();
    step_.seq_lens = seq_lens_.data();
    step_.logit_rows = logit_rows_.data();
  }

  const Step& step() const { return step_; }
  // Where the logit rows stand among those of the whole step
  const std::vector<int>& logit_places() const { return logit_places_; }

 private:
  // A sequence that goes on in the next part is as long here as what it has up to there.
  void take_sequences(const Step& whole, int first_row, int end_row) {
    query_start_.assign(1, 0);
    seq_lens_.clear();
    step_.num_seqs = 0;
    if (first_row == end_row) return;
    const int first_seq = whole.sequence(first_row), last_seq = whole.sequence(end_row - 1);
    for (int seq = first_seq; seq <= last_seq; ++seq) {
      const int end = std::min(whole.query_start[seq + 1], end_row);
      query_start_.push_back(end - first_row);
      seq_lens_.push_back(whole.seq_lens[seq] - (whole.query_start[seq + 1] - end));
    }
    step_.num_seqs = last_seq + 1 - first_seq;
    step_.block_tables = whole.block_table(first_seq);
  }

  Step step_{};
  std::vector<int32_t> query_start_, seq_lens_;
  std::vector<int64_t> logit_rows_;
  std::vector<int> logit_places_;
};

}  // namespace quire
