// A pool of threads that share the items of one phase after another.
//
// A step is a few hundred short phases. The caller publishes a phase and works on it too; helpers that
// are awake join in. A phase ends when its items are done, not when every helper has come by, so a
// helper that the machine has taken off its core delays nobody but the item in its hands. Helpers spin
// for a moment between the phases of a step and sleep between steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace quire {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  // Takes what the system gives: a pool of fewer threads is slower, not wrong.
  explicit ThreadPool(int num_threads) : ranges_(num_threads) {
    helpers_.reserve(num_threads);
    try {
      for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this, i] { help(i); });
    } catch (const std::system_error&) {
    }
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // Wakes the helpers; they stay awake until end_step.
  void begin_step() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      in_step_.store(true);
    }
    wake_.notify_all();
  }

  void end_step() { in_step_.store(false); }

  // Calls body(item, thread) for every item in [0, num_items), in any order, and returns when all are
  // done. `thread` is below num_threads(); no two calls at once have the same. Not re-entrant.
  template <class Body>
  void run(int num_items, const Body& body) {
    if (num_items <= 1 || helpers_.empty()) {
      for (int item = 0; item < num_items; ++item) body(item, 0);
      return;
    }
    ticket_.store(static_cast<uint64_t>(phase_) << 32 | kClosed);
    phase_body_.store(&body, std::memory_order_release);
    phase_call_.store(&call<Body>, std::memory_order_release);
    phase_items_.store(static_cast<uint32_t>(num_items), std::memory_order_release);
    num_done_.store(0, std::memory_order_relaxed);
    ++phase_;
    ticket_.store(static_cast<uint64_t>(phase_) << 32);
    if (num_sleeping_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take_items(0);
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < num_items; ++spins) {
      if (spins < kSpins) {
        pause_briefly();
      } else {
        std::this_thread::yield();
      }
    }
  }

  // As run, but each thread takes items one after the other from a part of its own, so that what it
  // asks memory for ahead is its own next item, and then what the others have left.
  template <class Body>
  void run_in_order(int num_items, const Body& body) {
    const int num_ranges = num_threads();
    for (int i = 0; i < num_ranges; ++i) {
      ranges_[i].next.store(part(num_items, i), std::memory_order_relaxed);
      ranges_[i].end = part(num_items, i + 1);
    }
    run(num_ranges, [&](int own, int thread) {
      for (int i = 0; i < num_ranges; ++i) {
        Range& range = ranges_[(own + i) % num_ranges];
        int item;
        while ((item = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end) body(item, thread);
      }
    });
  }

 private:
  // Items [next, end) that nobody has taken; a cache line each.
  struct alignas(64) Range {
    std::atomic<int> next{0};
    int end = 0;
  };

  int part(int num_items, int index) const {
    return static_cast<int>(static_cast<int64_t>(num_items) * index / num_threads());
  }

  using Call = void (*)(const void* body, int item, int thread);
  static constexpr int kSpins = 2000;  // some tens of microseconds
  static constexpr uint64_t kClosed = 0xffffffffu;  // an item number beyond any phase's

  template <class Body>
  static void call(const void* body, int item, int thread) {
    (*static_cast<const Body*>(body))(item, thread);
  }

  // Takes items of the published phase until none is left.
  //
  // The ticket is (phase, next item). A helper reads the phase's fields after it has read the ticket and
  // takes an item by exchanging the ticket that it read. The fields change only while the ticket is
  // closed, so an exchange that succeeds has seen the fields of its own phase, and an unfinished one.
  void take_items(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t item = static_cast<uint32_t>(ticket);
      const Call call = phase_call_.load(std::memory_order_acquire);
      const void* body = phase_body_.load(std::memory_order_acquire);
      if (item >= phase_items_.load(std::memory_order_acquire)) return;
      if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        call(body, static_cast<int>(item), thread);
        num_done_.fetch_add(1, std::memory_order_release);
        ticket = ticket_.load(std::memory_order_acquire);
      }
    }
  }

  void help(int thread) {
    uint64_t seen_phase = 0;
    int spins = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
      const uint64_t phase = ticket_.load(std::memory_order_acquire) >> 32;
      if (phase != seen_phase) {
        seen_phase = phase;
        take_items(thread);
        spins = 0;
      } else if (in_step_.load(std::memory_order_relaxed) && ++spins < kSpins) {
        pause_briefly();
      } else {
        sleep(seen_phase);
        spins = 0;
      }
    }
  }

  void sleep(uint64_t seen_phase) {
    std::unique_lock<std::mutex> lock(mutex_);
    num_sleeping_.fetch_add(1);
    const bool was_in_step = in_step_.load();
    wake_.wait(lock, [&] {
      return stopping_.load() || (ticket_.load() >> 32) != seen_phase ||
             (!was_in_step && in_step_.load());
    });
    num_sleeping_.fetch_sub(1);
  }

  std::atomic<uint64_t> ticket_{0};
  std::atomic<Call> phase_call_{nullptr};
  std::atomic<const void*> phase_body_{nullptr};
  std::atomic<uint32_t> phase_items_{0};
  std::atomic<int> num_done_{0};
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> in_step_{false};
  std::atomic<bool> stopping_{false};
  uint32_t phase_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Range> ranges_;  // one for each thread
  std::vector<std::thread> helpers_;
};

}  // namespace quire
