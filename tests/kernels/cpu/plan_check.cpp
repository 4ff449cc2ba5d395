// A plan that found no memory is made again, with room for all that its threads write.
#include <cstdlib>

namespace std {
inline int num_callocs_left = -1;  // below 0: no end
inline void* scarce_calloc(size_t count, size_t size) {
  return num_callocs_left >= 0 && num_callocs_left-- == 0 ? nullptr : calloc(count, size);
}
}  // namespace std

#define calloc scarce_calloc
#include "attention_plan.h"
#undef calloc

#include <cstdint>
#include <cstdio>
#include <new>
#include <vector>

int main() {
  constexpr int kHeadDim = 32, kBlocks = 64, kBlockSize = 16, kContext = 1000;
  quire::ThreadPool pool(1);
  quire::AttentionPlan plan(1, 1, kHeadDim, 4);
  std::vector<int32_t> table(kBlocks);
  for (int i = 0; i < kBlocks; ++i) table[i] = i;
  quire::Buffer<float> memory(kBlocks * 2 * kBlockSize * kHeadDim), query(kHeadDim), output(kHeadDim);
  const quire::KvCache<float> cache(memory.data(), kBlocks, 1, 1, kBlockSize, kHeadDim);
  const quire::Attention<float> attention{cache, 0, 1, query.data(), kHeadDim, output.data(), kHeadDim};
  quire::AttentionScratch scratch(1, kHeadDim);
  for (const int num_callocs : {0, 1, -1}) {
    std::num_callocs_left = num_callocs;
    plan.begin();
    plan.add(table.data(), 0, 1, kContext);
    try {
      plan.finish();
      if (num_callocs >= 0) return std::puts("there was memory"), 1;
      plan.run(pool, attention, [&](int) -> quire::AttentionScratch& { return scratch; });
    } catch (const std::bad_alloc&) {
      if (num_callocs < 0) return std::puts("there was none"), 1;
    }
  }
}
