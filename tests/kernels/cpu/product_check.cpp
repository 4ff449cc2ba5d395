// Multiplies seeded matrices of several layouts by seeded rows and prints the bits of every output, for
// any instruction set: what the 8-bit products give must not depend on it, nor on the panels that are
// multiplied at once.
#include "panel_group.h"

#include <cstdio>
#include <cstring>
#include <vector>

using namespace quire;

static uint32_t state = 1;
static uint32_t draw() { return state = state * 1664525u + 1013904223u; }

// Where a block's halves are
static std::vector<int> halves_of(Format format) {
  switch (format) {
    case Format::kQ4_1:
    case Format::kQ5_1:
    case Format::kQ5_K: return {0, 2};
    case Format::kQ2_K: return {80, 82};
    case Format::kQ3_K: return {108};
    case Format::kQ6_K: return {208};
    default: return {0};
  }
}

// Random blocks whose halves are small finite numbers.
static std::vector<uint8_t> random_weights(Format format, size_t num_blocks) {
  const BlockShape shape = block_shape(format);
  std::vector<uint8_t> data(num_blocks * shape.num_bytes);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(draw() >> 24);
  for (size_t i = 0; i < num_blocks; ++i) {
    uint8_t* block = data.data() + i * shape.num_bytes;
    for (const int offset : halves_of(format)) {
      block[offset + 1] = static_cast<uint8_t>(0x20 | (draw() >> 24 & 0x83));
    }
  }
  return data;
}

static Matrix random_matrix(Format format, int num_rows, int num_columns, ThreadPool& pool, Arena& arena) {
  const size_t num_blocks = static_cast<size_t>(num_rows) * num_columns / block_shape(format).num_weights;
  const std::vector<uint8_t> data = random_weights(format, num_blocks);
  return pack_matrix(format, data.data(), num_rows, num_columns, pool, arena).value();
}

static Activations random_rows(int count, int num_columns, const Forms& forms) {
  Activations rows(count, num_columns, true);
  rows.arrange(count, forms);
  for (int row = 0; row < count; ++row) {
    for (int i = 0; i < num_columns; ++i) {
      rows.row(row)[i] = static_cast<float>(static_cast<int32_t>(draw())) * 1e-9f;
    }
  }
  for (int chunk = 0; chunk < rows.chunks().count(); ++chunk) rows.quantise(chunk, num_columns);
  return rows;
}

// `wanted`: [panels of the group][rows][kPanel]
static void check_group(const PanelGroup& group, const Activations& rows, const std::vector<float>& wanted) {
  std::vector<float> out(wanted.size());
  group.multiply(rows, 0, rows.chunks().count(), out.data());
  if (std::memcmp(out.data(), wanted.data(), out.size() * sizeof(float)) != 0) {
    std::printf("%d rows differ in a group of %d panels\n", rows.chunks().num_rows(), group.size());
  }
}

template <class L>
static void check(Format format, int num_rows, int num_columns) {
  ThreadPool pool(1);
  Arena arena;
  const Matrix matrix = random_matrix(format, num_rows, num_columns, pool, arena);
  for (const int count : {1, 2, 5, 7, 13, 19}) {
    const Activations rows = random_rows(count, num_columns, Forms().add(matrix));
    std::vector<float> out(static_cast<size_t>(matrix.num_panels()) * count * kPanel);
    PanelGroup group;
    for (int panel = 0; panel < matrix.num_panels(); ++panel) {
      float* block = out.data() + static_cast<size_t>(panel) * count * kPanel;
      int8::multiply_panel<L>(matrix, panel, rows, 0, rows.chunks().count(), block);
      if (group.size() < PanelGroup::kMost) group.add(matrix, panel);
      for (int row = 0; row < count; ++row) {
        for (int i = 0; i < kPanel && panel * kPanel + i < num_rows; ++i) {
          uint32_t bits;
          std::memcpy(&bits, block + row * kPanel + i, 4);
          std::printf("%d/%d/%d/%d %08x\n", static_cast<int>(format), count, row, panel * kPanel + i, bits);
        }
      }
    }
    out.resize(static_cast<size_t>(group.size()) * count * kPanel);
    check_group(group, rows, out);
  }
}

// A group of two matrices in two formats
static void check_mixed_group() {
  ThreadPool pool(1);
  Arena arena;
  const int num_columns = 512, count = 3;
  const Matrix one = random_matrix(Format::kQ4_K, kPanel, num_columns, pool, arena);
  const Matrix other = random_matrix(Format::kQ6_K, kPanel, num_columns, pool, arena);
  const Activations rows = random_rows(count, num_columns, Forms().add(one).add(other));
  std::vector<float> wanted(2 * count * kPanel);
  int8::multiply_panel<NibblesMinimumWide>(one, 0, rows, 0, 1, wanted.data());
  int8::multiply_panel<Sixes16>(other, 0, rows, 0, 1, wanted.data() + count * kPanel);
  PanelGroup group;
  group.add(one, 0);
  group.add(other, 0);
  check_group(group, rows, wanted);
}

int main() {
  check<Nibbles>(Format::kQ4_0, 40, 320);
  check<NibblesMinimum>(Format::kQ4_1, 40, 320);
  check<Fives>(Format::kQ5_0, 40, 320);
  check<FivesMinimum>(Format::kQ5_1, 40, 320);
  check<FivesMinimumWide>(Format::kQ5_K, 40, 512);
  check<Twos16Minimum>(Format::kQ2_K, 40, 512);
  check<Sixes16>(Format::kQ3_K, 40, 512);
  check<Sixes16>(Format::kQ6_K, 40, 512);
  check<Octets>(Format::kQ8_0, 40, 320);
  check_mixed_group();
}
