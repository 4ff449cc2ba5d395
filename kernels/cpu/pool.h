// A pool of threads that share the items of one phase after another.
//
// A step is a few hundred short phases, so what counts is how often a cache line goes from core to core.
// Each thread has a share of a phase, in a line of its own that holds all that it needs: it works along
// its share, and then on what others have left of theirs. A phase ends when its items are done, not when
// every helper has come by, so a helper that the machine has taken off its core delays nobody but the item
// in its hands. Helpers spin for a moment between the phases of a step and sleep between steps.
//
// Threads of another pool may visit: their shares are empty, and they take of the others'.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace quire {

constexpr int kSpins = 2000;  // some tens of microseconds

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A wait for another thread: spins for a while, then gives way to others.
class Waiting {
 public:
  void pause() {
    if (num_spins_++ < kSpins) {
      pause_briefly();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  int num_spins_ = 0;
};

class ThreadPool {
 public:
  // Takes what the system gives: a pool of fewer threads is slower, not wrong.
  explicit ThreadPool(int num_threads, int max_visitors = 0) : shares_(num_threads + max_visitors) {
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
  // The numbers of threads and visitors are below this.
  int max_threads() const { return static_cast<int>(shares_.size()); }

  // As long as there is one, the helpers are awake.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool) : pool_(pool) {
      {
        std::lock_guard<std::mutex> lock(pool.mutex_);
        pool.in_step_.store(true);
      }
      pool.wake_.notify_all();
    }
    ~Awake() { pool_.in_step_.store(false); }
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool& pool_;
  };

  // Who calls `run` from now on is this one of its threads and visitors; without helpers it may be any.
  void lead(int thread) { leader_ = thread; }
  int leader() const { return leader_; }

  // Calls body(item, thread) for every item in [0, num_items) and returns when all are done. Each thread
  // takes items one after the other from a part of its own, so that what it asks memory for ahead is its
  // own next item, and then what the others have left. `thread` is below max_threads(); no two calls at
  // once have the same. Not re-entrant.
  template <class Body>
  void run(int num_items, const Body& body) {
    if (num_items <= 1 || (helpers_.empty() && num_visitors_.load(std::memory_order_relaxed) == 0)) {
      for (int item = 0; item < num_items; ++item) body(item, leader_);
      return;
    }
    ++phase_;
    wanted_ += num_items;
    for (int i = 1; i < num_threads(); ++i) {
      shares_[i].publish(phase_, part(num_items, i), part(num_items, i + 1), &call<Body>, &body);
    }
    // The first item is the caller's: it need not wait until the others' shares have left its core.
    shares_[leader_].publish(phase_, 1, part(num_items, 1), &call<Body>, &body);
    // One that falls asleep just now may be missed, and wakes with the next phase.
    if (num_sleeping_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    body(0, leader_);
    shares_[leader_].add_done();
    work(leader_);
    for (Waiting waiting; num_done() != wanted_; waiting.pause()) {
    }
  }

  // Between them a visitor may work along. The phase that runs when it comes may be over before it is noticed.
  void enter() { num_visitors_.fetch_add(1, std::memory_order_relaxed); }
  void leave() { num_visitors_.fetch_sub(1, std::memory_order_relaxed); }

  // Takes items of the published phase until none is left.
  void work(int thread) {
    const int num_shares = max_threads();
    for (int i = 0; i < num_shares; ++i) {
      Share& share = shares_[(thread + i) % num_shares];
      while (share.work_on_next(thread)) shares_[thread].add_done();
    }
  }

 private:
  using Call = void (*)(const void* body, int item, int thread);

  // A thread's part of the phase, and how many items it has done of all phases, whosesoever they were.
  //
  // A ticket is (phase, next item). Who takes an item reads the ticket, then the other fields, and then
  // exchanges the ticket that it read. The fields change only when all items of a phase are done, so an
  // exchange that succeeds has seen the fields of its own phase, but for the end: it may be the next
  // phase's before its ticket is, and so holds its phase too.
  class alignas(64) Share {
   public:
    void publish(uint32_t phase, int first, int end, Call call, const void* body) {
      end_.store(pair(phase, end), std::memory_order_release);
      call_.store(call, std::memory_order_release);
      body_.store(body, std::memory_order_release);
      ticket_.store(pair(phase, first), std::memory_order_release);
    }

    uint32_t phase() const { return static_cast<uint32_t>(ticket_.load(std::memory_order_acquire) >> 32); }

    // Takes an item, if any is left, and works on it.
    bool work_on_next(int thread) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      for (;;) {
        const uint64_t end = end_.load(std::memory_order_acquire);
        const Call call = call_.load(std::memory_order_acquire);
        const void* body = body_.load(std::memory_order_acquire);
        if (ticket >> 32 != end >> 32 || ticket >= end) return false;
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
          call(body, static_cast<int>(static_cast<uint32_t>(ticket)), thread);
          return true;
        }
      }
    }

    // By its own thread only
    void add_done() {
      num_done_.store(num_done_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    }
    uint64_t num_done() const { return num_done_.load(std::memory_order_acquire); }

   private:
    static uint64_t pair(uint32_t phase, int item) {
      return static_cast<uint64_t>(phase) << 32 | static_cast<uint32_t>(item);
    }

    std::atomic<uint64_t> ticket_{0};
    std::atomic<uint64_t> end_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> body_{nullptr};
    std::atomic<uint64_t> num_done_{0};
  };

  template <class Body>
  static void call(const void* body, int item, int thread) {
    (*static_cast<const Body*>(body))(item, thread);
  }

  // Where a thread's part begins; the first one's is never empty.
  int part(int num_items, int thread) const {
    const int64_t n = num_threads();
    return static_cast<int>((int64_t{num_items} * thread + n - 1) / n);
  }

  uint64_t num_done() const {
    uint64_t sum = 0;
    for (const Share& share : shares_) sum += share.num_done();
    return sum;
  }

  void help(int thread) {
    uint32_t seen_phase = 0;
    int spins = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
      const uint32_t phase = shares_[thread].phase();
      if (phase != seen_phase) {
        seen_phase = phase;
        work(thread);
        spins = 0;
      } else if (in_step_.load(std::memory_order_relaxed) && ++spins < kSpins) {
        pause_briefly();
      } else {
        sleep(thread, seen_phase);
        spins = 0;
      }
    }
  }

  void sleep(int thread, uint32_t seen_phase) {
    std::unique_lock<std::mutex> lock(mutex_);
    num_sleeping_.fetch_add(1);
    const bool was_in_step = in_step_.load();
    wake_.wait(lock, [&] {
      return stopping_.load() || shares_[thread].phase() != seen_phase ||
             (!was_in_step && in_step_.load());
    });
    num_sleeping_.fetch_sub(1);
  }

  std::vector<Share> shares_;  // one for each thread and visitor
  int leader_ = 0;
  uint32_t phase_ = 0;
  uint64_t wanted_ = 0;  // items of all phases
  alignas(64) std::atomic<int> num_visitors_{0};
  alignas(64) std::atomic<int> num_sleeping_{0};  // what helpers look at while they wait: seldom written
  std::atomic<bool> in_step_{false};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> helpers_;
};

}  // namespace quire
