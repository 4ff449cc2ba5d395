// A decoder-only model of the Llama family, and steps of it.
//
// In a step of few rows all threads share each product; in one of many each takes rows of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "model.h"
#include "pass.h"
#include "passes_apart.h"
#include "pool.h"
#include "step.h"

namespace quire {

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
  // Seconds; of threads with rows of their own the mean
  double phase_seconds(int phase) const;

 private:
  Model model_;
  ThreadPool pool_;
  std::vector<AttentionScratch> scratch_;  // one for each thread
  Pass shared_;
  PassesApart apart_;
};

}  // namespace quire
