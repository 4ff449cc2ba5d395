// Searches the likeliest tokens of rows in Q8_0 matrices and holds them against the full products, bit for bit;
// prints what is wrong and exits with 1. On instruction sets that need no search it checks nothing.
#include "logits.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

using namespace quire;

static int failures = 0;

static uint32_t state = 1;
static uint32_t draw() { return state = state * 1664525u + 1013904223u; }
static float draw_float() { return static_cast<float>(static_cast<int32_t>(draw())) * 0x1p-31f; }

constexpr int kColumns = 576, kBlocks = kColumns / kBlock;

struct Weights {
  explicit Weights(int num_rows) : num_rows(num_rows), quants(static_cast<size_t>(num_rows) * kColumns) {}
  int num_rows;
  uint16_t scale = 0x2000;  // of all blocks, a half: 2^-7
  std::vector<int8_t> quants;

  int8_t* row(int index) { return quants.data() + static_cast<size_t>(index) * kColumns; }

  Matrix pack(ThreadPool& pool, Arena& arena) const {
    std::vector<uint8_t> data(static_cast<size_t>(num_rows) * kBlocks * 34);
    for (size_t block = 0; block < data.size() / 34; ++block) {
      std::memcpy(data.data() + block * 34, &scale, 2);
      std::memcpy(data.data() + block * 34 + 2, quants.data() + block * kBlock, kBlock);
    }
    return pack_matrix(Format::kQ8_0, data.data(), num_rows, kColumns, pool, arena).value();
  }
};

struct Found {
  std::vector<float> logits;
  std::vector<int64_t> ids;
  int64_t num_full = 0;
};

// By the full products, or by a search
static Found find(const Matrix& matrix, const Activations& rows, const OutputBounds* bounds) {
  const int num_rows = rows.chunks().num_rows(), num_chunks = rows.chunks().count();
  std::vector<Best> best(num_rows);
  Found found;
  LikeliestSearch search;
  search.reserve(num_rows, kBlocks);
  if (bounds != nullptr) search.begin(*bounds, rows, kBlocks);
  std::vector<float> block(static_cast<size_t>(num_rows) * kPanel);
  for (int panel = 0; panel < matrix.num_panels(); ++panel) {
    if (bounds != nullptr) {
      found.num_full += search.search(matrix, panel, rows, 0, num_chunks, best);
      continue;
    }
    int8::multiply_panel<Octets>(matrix, panel, rows, 0, num_chunks, block.data());
    for (int row = 0; row < num_rows; ++row) {
      best[row].meet_panel(block.data() + row * kPanel, panel * kPanel,
                           std::min(kPanel, matrix.num_rows - panel * kPanel));
    }
  }
  for (const Best& of_row : best) {
    found.logits.push_back(of_row.logit);
    found.ids.push_back(of_row.token_id);
  }
  return found;
}

// Returns the share of rows times panels that the search multiplied in full.
static double check(const char* what, const Weights& weights, int num_rows, const std::vector<float>& values) {
  ThreadPool pool(1);
  Arena arena;
  const Matrix matrix = weights.pack(pool, arena);
  if (!OutputBounds::are_for(matrix)) return 0.0;
  OutputBounds bounds;
  bounds.measure(matrix, pool);
  Activations rows(num_rows, kColumns, true);
  Forms forms = Forms().add(matrix);
  forms.bytes = true;
  rows.arrange(num_rows, forms);
  for (int row = 0; row < num_rows; ++row) {
    std::copy_n(values.data() + static_cast<size_t>(row) * kColumns, kColumns, rows.row(row));
  }
  for (int chunk = 0; chunk < rows.chunks().count(); ++chunk) rows.quantise(chunk, kColumns);
  const Found wanted = find(matrix, rows, nullptr), found = find(matrix, rows, &bounds);
  for (int row = 0; row < num_rows; ++row) {
    const bool is_same = std::memcmp(&wanted.logits[row], &found.logits[row], 4) == 0 ||
                         (std::isnan(wanted.logits[row]) && std::isnan(found.logits[row]));
    if (is_same && wanted.ids[row] == found.ids[row]) continue;
    if (++failures < 10) {
      std::printf("%s: row %d of %d is %lld (%g), not %lld (%g)\n", what, row, num_rows,
                  static_cast<long long>(found.ids[row]), found.logits[row],
                  static_cast<long long>(wanted.ids[row]), wanted.logits[row]);
    }
  }
  return static_cast<double>(found.num_full) / num_rows / matrix.num_panels();
}

static Weights random_weights(int num_rows) {
  Weights weights(num_rows);
  for (int8_t& quant : weights.quants) quant = static_cast<int8_t>(127.0f * draw_float() * std::fabs(draw_float()));
  return weights;
}

// Rows as a model has them: each near some weights, and large in two dimensions
static std::vector<float> rows_near(Weights& weights, int num_rows) {
  std::vector<float> values;
  for (int row = 0; row < num_rows; ++row) {
    const int8_t* near = weights.row(static_cast<int>(draw() % weights.num_rows));
    for (int i = 0; i < kColumns; ++i) {
      values.push_back(0.02f * static_cast<float>(near[i]) + 0.3f * draw_float() + (i == 17 ? 30.0f : i == 199 ? -60.0f : 0.0f));
    }
  }
  return values;
}

// A row of weights whose lower bits all add to its logit, so that the bound is tight, after one whose logit is a
// little less.
static void check_tight() {
  Weights weights(1000);
  std::vector<float> values(4 * kColumns);
  int8_t *larger = weights.row(900), *smaller = weights.row(1);
  for (int i = 0; i < kColumns; ++i) {
    const bool is_positive = draw() >> 31 != 0;
    for (int row = 0; row < 4; ++row) values[row * kColumns + i] = is_positive ? 1.0f : -1.0f;
    larger[i] = smaller[i] = static_cast<int8_t>(is_positive ? 43 : -40);  // their lower bits: 3 and 0
  }
  smaller[0] = static_cast<int8_t>(smaller[0] + (values[0] > 0.0f ? -1 : 1));
  check("lower bits", weights, 4, values);
}

// A sum that overflows on the way, in the full product's order of blocks alone: its logit is infinite.
static void check_overflow() {
  Weights weights(1000);
  weights.scale = 0x7bff;  // 65504
  std::vector<float> values(4 * kColumns);
  for (int block = 0; block < 4; ++block) {
    for (int i = block * kBlock; i < (block + 1) * kBlock; ++i) {
      for (int row = 0; row < 4; ++row) values[row * kColumns + i] = block % 2 == 0 ? 0x1p100f : 0x0.ep100f;
      weights.row(900)[i] = static_cast<int8_t>(block < 2 ? 110 : -110);
      weights.row(1)[i] = static_cast<int8_t>(block == 0 ? 50 : 0);
    }
  }
  check("an overflow", weights, 4, values);
}

int main() {
  Weights weights = random_weights(2005);
  for (const int num_rows : {1, 4, 5, 6, 13}) {
    const double share = check("near", weights, num_rows, rows_near(weights, num_rows));
    if (share > 0.2) {
      ++failures;
      std::printf("%g of the panels are multiplied in full\n", share);
    }
    std::vector<float> values(static_cast<size_t>(num_rows) * kColumns);
    check("zeros", weights, num_rows, values);
    for (float& value : values) value = draw_float();
    check("random", weights, num_rows, values);
    for (float& value : values) value = draw_float() * 0x1p-98f;
    check("tiny", weights, num_rows, values);
    for (float& value : values) value = draw_float() * 0x1p100f;
    check("huge", weights, num_rows, values);
    values = rows_near(weights, num_rows);
    values[kColumns - 1] = NAN;
    check("a NaN", weights, num_rows, values);
    values[kColumns - 1] = INFINITY;
    check("an infinity", weights, num_rows, values);
  }
  const std::vector<float> near = rows_near(weights, 6);
  for (int row = 100; row < 2000; row += 100) std::copy_n(weights.row(row - 100), kColumns, weights.row(row));
  check("equal rows", weights, 6, near);
  check_tight();
  check_overflow();
  return failures == 0 ? 0 : 1;
}
