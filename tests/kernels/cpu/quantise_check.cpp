// Holds quantised rows, and where they lie in a chunk, against scalar arithmetic; prints what is wrong and
// exits with 1.
#include "quants.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

using namespace quire;

static int failures = 0;

static void expect(bool holds, const char* what, int rows, int row) {
  if (!holds && ++failures < 10) std::printf("%s is wrong in row %d of %d\n", what, row, rows);
}

static bool is_same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

struct Wanted {
  int quants[kBlock] = {};
  float scale, sum, half_sums[2];

  explicit Wanted(const float* x) {
    float magnitude = 0.0f;
    bool is_sound = true;
    for (int i = 0; i < kBlock; ++i) {
      magnitude = std::fmax(magnitude, std::fabs(x[i]));
      is_sound &= std::fabs(x[i]) <= 127.0f * kMaxScale;
    }
    scale = kMinScale;
    while (scale < magnitude * (1.0f / 127.0f) && scale < kMaxScale) scale *= 2.0f;
    if (!is_sound) scale = std::numeric_limits<float>::quiet_NaN();
    int sums[2] = {};
    for (int i = 0; is_sound && i < kBlock; ++i) {
      quants[i] = static_cast<int>(std::nearbyint(x[i] / scale));
      sums[i / (kBlock / 2)] += quants[i];
    }
    for (int half = 0; half < 2; ++half) half_sums[half] = scale * static_cast<float>(sums[half]);
    sum = half_sums[0] + half_sums[1];
  }
};

static uint32_t state = 1;
static uint32_t draw() { return state = state * 1664525u + 1013904223u; }

static void fill(float* x, int kind) {
  for (int i = 0; i < kBlock; ++i) {
    const int32_t drawn = static_cast<int32_t>(draw());
    switch (kind) {
      case 0: x[i] = static_cast<float>(drawn) * 1e-9f; break;
      case 1: x[i] = 0.0f; break;
      case 2: x[i] = static_cast<float>(drawn >> 24) * 0.5f; break;  // ties
      case 3: x[i] = static_cast<float>(drawn) * 1e-45f; break;  // less than the least scale
      case 4: x[i] = static_cast<float>(drawn >> 24) * kMaxScale; break;  // up to the bound, or above
      default: x[i] = static_cast<float>(drawn);
    }
  }
  const float extremes[] = {INFINITY, -INFINITY, NAN, -NAN, std::numeric_limits<float>::max(), 127.0f, -127.0f};
  if (kind > 5) x[draw() % kBlock] = extremes[kind - 6];
}
constexpr int kKinds = 13;

template <int kRows, int kFirst = 0, class Quant>
static void put(const float* x, ChunkBlock<Quant, kRows>& chunk) {
  constexpr int kCount = kRows - kFirst < 4 ? kRows - kFirst : 4;
  RowBlocks blocks;
  quantise_rows<kCount>(x + kFirst * kBlock, kBlock, blocks);
  chunk.template put<kFirst, kCount>(blocks);
  if constexpr (kFirst + kCount < kRows) put<kRows, kFirst + kCount>(x, chunk);
}

template <int kRows>
static void check() {
  for (int turn = 0; turn < 3 * kKinds; ++turn) {
    std::vector<float> x(kRows * kBlock);
    for (int row = 0; row < kRows; ++row) fill(x.data() + row * kBlock, (turn + row) % kKinds);
    ChunkBlock<int8_t, kRows> bytes;
    ChunkBlock<int16_t, kRows> words;
    put<kRows>(x.data(), bytes);
    put<kRows>(x.data(), words);
    for (int row = 0; row < kRows; ++row) {
      const Wanted wanted(x.data() + row * kBlock);
      for (int i = 0; !std::isnan(wanted.scale) && i < kBlock; ++i) {
        const int quad = i / 4, half = i % 2, place = i % 4 / 2;
        expect(bytes.quants[(quad * kRows + row) * 4 + i % 4] == wanted.quants[i], "a byte", kRows, row);
        expect(words.quants[((2 * quad + half) * kRows + row) * 2 + place] == wanted.quants[i], "a word", kRows, row);
      }
      for (int half = 0; half < 2; ++half) {
        expect(is_same(bytes.half_sums[half][row], wanted.half_sums[half]), "a half's sum", kRows, row);
      }
      expect(is_same(bytes.scales[row], wanted.scale), "a scale", kRows, row);
      expect(is_same(bytes.sums[row], wanted.sum), "a sum", kRows, row);
      expect(is_same(words.sums[row], wanted.sum), "a sum beside words", kRows, row);
    }
  }
}

int main() {
  check<1>();
  check<2>();
  check<3>();
  check<4>();
  check<5>();
  check<6>();
  return failures == 0 ? 0 : 1;
}
