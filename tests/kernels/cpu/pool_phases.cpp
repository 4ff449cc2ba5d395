// Many short phases of a pool: each item is worked on once, with what the phases before it have written.
#include "pool.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>
#include <vector>

int main() {
  constexpr int kSteps = 400;
  constexpr int kSizes[] = {1, 2, 3, 4, 5, 16, 61};
  quire::ThreadPool pool(4);
  std::vector<int> numbers(61);
  for (int step = 0; step < kSteps; ++step) {
    std::optional<quire::ThreadPool::Awake> awake(pool);
    for (int round = 0; round < 10; ++round) {
      for (const int size : kSizes) {
        const std::vector<int> before = numbers;
        pool.run(size, [&](int item, int) { numbers[size - 1 - item] += before[item] + item; });
        for (int i = 0; i < size; ++i) {
          const int item = size - 1 - i;
          if (numbers[i] != before[i] + before[item] + item) {
            return std::printf("step %d: item %d of %d\n", step, item, size), 1;
          }
          numbers[i] %= 1000;
        }
      }
      if (round == 5) std::this_thread::yield();
    }
    awake.reset();
    if (step % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // helpers fall asleep
  }
}
