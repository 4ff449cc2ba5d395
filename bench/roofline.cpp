// What this machine can do at most, per run with a number of threads: bytes read from memory, 8-bit
// multiply-adds and float32 multiply-adds, each the best of several tries, with the instructions that it is
// built for (AVX2 at least). Prints three numbers a second: bytes, 8-bit operations, float32 operations.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#define QUIRE_REGISTER(v) "+v"(v)
#else
#define QUIRE_REGISTER(v) "+x"(v)
#endif

constexpr int kTries = 8;
constexpr size_t kHugePage = size_t{2} << 20;

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

// Steps twelve independent chains, which fill the pipelines. They are variables, not an array, so that the
// compiler keeps them in registers.
template <class Vector, class Operation>
static double run_chains(int rounds, double operations, Vector start, const Operation& step) {
  Vector a = start, b = start, c = start, d = start, e = start, f = start;
  Vector g = start, h = start, i = start, j = start, k = start, l = start;
  for (int round = 0; round < rounds; ++round) {
    a = step(a), b = step(b), c = step(c), d = step(d), e = step(e), f = step(f);
    g = step(g), h = step(h), i = step(i), j = step(j), k = step(k), l = step(l);
    asm volatile("" : QUIRE_REGISTER(a), QUIRE_REGISTER(b), QUIRE_REGISTER(c), QUIRE_REGISTER(d));
    asm volatile("" : QUIRE_REGISTER(e), QUIRE_REGISTER(f), QUIRE_REGISTER(g), QUIRE_REGISTER(h));
    asm volatile("" : QUIRE_REGISTER(i), QUIRE_REGISTER(j), QUIRE_REGISTER(k), QUIRE_REGISTER(l));
  }
  return operations * 12 * rounds;
}

#if defined(__AVX512VNNI__)
using Wide = __m512i;
constexpr double kOctetOperations = 128.0;
static Wide splat_octet(char value) { return _mm512_set1_epi8(value); }
static Wide add_products(Wide sums, Wide factor) { return _mm512_dpbusd_epi32(sums, factor, factor); }
#elif defined(__AVXVNNI__)
using Wide = __m256i;
constexpr double kOctetOperations = 64.0;
static Wide splat_octet(char value) { return _mm256_set1_epi8(value); }
static Wide add_products(Wide sums, Wide factor) { return _mm256_dpbusd_avx_epi32(sums, factor, factor); }
#else
using Wide = __m256i;
constexpr double kOctetOperations = 64.0;
static Wide splat_octet(char value) { return _mm256_set1_epi8(value); }
// As each product's sum must be added, the addition counts: it takes places from the multiplications.
static Wide add_products(Wide sums, Wide factor) {
  Wide products;
  asm volatile("vpmaddubsw %1, %1, %0" : "=x"(products) : "x"(factor));
  return _mm256_add_epi16(sums, products);
}
#endif

static double multiply_bytes(int rounds) {
  Wide factor = splat_octet(3);
  asm volatile("" : QUIRE_REGISTER(factor));  // not known to the compiler, nor the same each round
  return run_chains(rounds, kOctetOperations, factor, [&](Wide sums) { return add_products(sums, factor); });
}

#if defined(__AVX512F__)
static double multiply_floats(int rounds) {
  const __m512 half = _mm512_set1_ps(0.5f);
  return run_chains(rounds, 32.0, half, [&](__m512 v) { return _mm512_fmadd_ps(v, half, half); });
}
#else
static double multiply_floats(int rounds) {
  const __m256 half = _mm256_set1_ps(0.5f);
  return run_chains(rounds, 16.0, half, [&](__m256 v) { return _mm256_fmadd_ps(v, half, half); });
}
#endif

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
    memory.push_back(static_cast<uint8_t*>(std::aligned_alloc(kHugePage, size)));
    madvise(memory.back(), size, MADV_HUGEPAGE);
    std::fill_n(memory.back(), size, 1);
  }
  const double bytes = best_rate(num_threads, [&](int t) { return read_bytes(memory[t], size); });
  const double octets = best_rate(num_threads, [](int) { return multiply_bytes(2000000); });
  const double floats = best_rate(num_threads, [](int) { return multiply_floats(2000000); });
  std::printf("%.0f %.0f %.0f\n", bytes, octets, floats);
}
