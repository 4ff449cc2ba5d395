// What this machine can do at most, per run with a number of threads: bytes read from memory, 8-bit
// multiply-adds and float32 multiply-adds, each the best of several tries. Prints three numbers a second:
// bytes, 8-bit operations, float32 operations.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

constexpr int kTries = 7;
constexpr int kChains = 12;  // independent, to fill the pipelines

static double read_bytes(const uint8_t* data, size_t size) {
  __m256i sums[4] = {};
  for (size_t i = 0; i < size; i += 128) {
    for (int j = 0; j < 4; ++j) {
      sums[j] = _mm256_add_epi8(sums[j], _mm256_load_si256((const __m256i*)(data + i) + j));
    }
  }
  for (const __m256i& sum : sums) asm volatile("" ::"x"(sum));
  return static_cast<double>(size);
}

static double multiply_bytes(int rounds) {
  __m256i chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = _mm256_set1_epi8(static_cast<char>(i));
  for (int round = 0; round < rounds; ++round) {
    for (__m256i& chain : chains) {
      chain = _mm256_maddubs_epi16(chain, chain);
      asm volatile("" : "+x"(chain));
    }
  }
  return 64.0 * kChains * rounds;
}

static double multiply_floats(int rounds) {
  __m256 chains[kChains];
  const __m256 half = _mm256_set1_ps(0.5f);
  for (int i = 0; i < kChains; ++i) chains[i] = _mm256_set1_ps(static_cast<float>(i));
  for (int round = 0; round < rounds; ++round) {
    for (__m256& chain : chains) {
      chain = _mm256_fmadd_ps(chain, half, half);
      asm volatile("" : "+x"(chain));
    }
  }
  return 16.0 * kChains * rounds;
}

// The most that all threads together do in a second.
template <class Work>
static double best_rate(int num_threads, const Work& work) {
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    std::vector<double> done(num_threads);
    std::vector<std::thread> threads;
    const auto start = std::chrono::steady_clock::now();
    for (int t = 0; t < num_threads; ++t) threads.emplace_back([&, t] { done[t] = work(t); });
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    double total = 0;
    for (const double part : done) total += part;
    best = std::max(best, total / taken.count());
  }
  return best;
}

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const size_t size = size_t{128} << 20;  // per thread: beyond the last-level cache
  std::vector<uint8_t*> memory;
  for (int t = 0; t < num_threads; ++t) {
    memory.push_back(static_cast<uint8_t*>(std::aligned_alloc(64, size)));
    std::fill_n(memory.back(), size, 1);
  }
  const double bytes = best_rate(num_threads, [&](int t) { return read_bytes(memory[t], size); });
  const double octets = best_rate(num_threads, [](int) { return multiply_bytes(2000000); });
  const double floats = best_rate(num_threads, [](int) { return multiply_floats(2000000); });
  std::printf("%.0f %.0f %.0f\n", bytes, octets, floats);
}
