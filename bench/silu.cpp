// What SiLU and quantising take of the phase of gate and up: prints the seconds of one row of one block of 32
// columns on one core, the best of several tries, for each of the numbers of rows that a thread may have.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "activations.h"
#include "rows.h"

using namespace quire;

static double seconds_of_row(int num_rows) {
  constexpr int kNumBlocks = 16, kNumTries = 30, kNumRounds = 200;  // in the first-level cache
  Matrix reader;
  reader.format = Format::kQ4_1;
  Activations mixed(num_rows, kNumBlocks * kBlock, true);
  mixed.arrange(num_rows, Forms().add(reader));
  std::vector<float> gate(static_cast<size_t>(num_rows) * kBlock), up(gate.size()), product(gate.size());
  for (size_t i = 0; i < gate.size(); ++i) {
    gate[i] = static_cast<float>(static_cast<int>(i * 37 % 201) - 100) * 0.05f;
    up[i] = static_cast<float>(static_cast<int>(i * 53 % 211) - 105) * 0.02f;
  }
  double best = 1e9;
  for (int i = 0; i < kNumTries; ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < kNumRounds; ++round) {
      for (int row = 0; row < num_rows; ++row) {
        silu_multiply(&gate[row * kBlock], &up[row * kBlock], kBlock, &product[row * kBlock]);
      }
      for (int chunk = 0; chunk < mixed.chunks().count(); ++chunk) {
        const int first_row = mixed.chunks().start(chunk);
        mixed.put_block(chunk, round % kNumBlocks, &product[first_row * kBlock], kBlock);
      }
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best / kNumRounds / num_rows;
}

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) std::printf("%.4e\n", seconds_of_row(std::atoi(argv[i])));
}
