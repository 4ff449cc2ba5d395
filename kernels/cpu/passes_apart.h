// A step of many rows, in parts of the same work: each thread takes one of them through all layers.
//
// It reads all weights for its rows alone, but its phases are nobody else's, and what it writes stays in its
// own caches. Who is done helps with the phases of the others. A part that begins within a sequence waits in
// each layer for the keys and values of that sequence's rows in the parts before, and helps them meanwhile.
// No sequence of a step reads what another one writes in it (`StepPlan` in shared/plan.py).
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>
#include <vector>

#include "model.h"
#include "pass.h"
#include "pool.h"
#include "step.h"
#include "step_cut.h"

namespace quire {

class PassesApart {
 public:
  PassesApart(const Model& model, ThreadPool& pool, std::vector<AttentionScratch>& scratch)
      : model_(model), pool_(pool) {
    const int num_threads = pool.num_threads();
    if (num_threads == 1) return;
    for (int i = 0; i < num_threads; ++i) parts_.emplace_back(model, scratch);
  }

  // Whether a step has rows enough. The more threads read all weights at once, the more each must do with
  // them.
  bool are_for(const Step& step) const {
    const int num_parts = static_cast<int>(parts_.size());
    return num_parts > 0 && step.num_tokens >= num_parts * std::max(kFewestRows, num_parts);
  }

  // Allocates all that `run` needs.
  void take(const Step& step) {
    const std::vector<int> cuts = cut_.rows(model_, step, static_cast<int>(parts_.size()));
    for (size_t i = 0; i < parts_.size(); ++i) {
      std::vector<Pass*> earlier;
      if (cuts[i] < cuts[i + 1]) {
        const int start = step.query_start[step.sequence(cuts[i])];
        for (size_t j = 0; j < i; ++j) {
          if (cuts[j + 1] > start) earlier.push_back(&parts_[j].pass);
        }
      }
      parts_[i].pass.take(step, cuts[i], cuts[i + 1], std::move(earlier));
    }
  }

  void run() {
    next_part_.store(0);
    pool_.run(static_cast<int>(parts_.size()), [&](int, int thread) {
      lead_parts(thread);
      for (Part& part : parts_) {
        part.pass.help(thread, [&] { return part.pass.is_done(); });
      }
    });
  }

  // Seconds, the mean of the parts
  double phase_seconds(int phase) const {
    double sum = 0.0;
    for (const Part& part : parts_) sum += part.pass.phase_seconds(phase);
    return parts_.empty() ? 0.0 : sum / static_cast<double>(parts_.size());
  }

 private:
  static constexpr int kFewestRows = 6;  // of a part: fewer read the weights faster together

  struct Part {
    Part(const Model& model, std::vector<AttentionScratch>& scratch)
        : pool(1, static_cast<int>(scratch.size()) - 1), pass(model, pool, scratch) {}
    ThreadPool pool;  // its leader, and who helps
    Pass pass;
  };

  // In order, so that what a part waits for has begun.
  void lead_parts(int thread) {
    const int num_parts = static_cast<int>(parts_.size());
    for (int i = next_part_.fetch_add(1); i < num_parts; i = next_part_.fetch_add(1)) {
      parts_[i].pool.lead(thread);
      parts_[i].pass.run();
    }
  }

  const Model& model_;
  ThreadPool& pool_;
  StepCut cut_;
  std::deque<Part> parts_;  // one for each thread; none if there is one thread
  std::atomic<int> next_part_{0};
};

}  // namespace quire
