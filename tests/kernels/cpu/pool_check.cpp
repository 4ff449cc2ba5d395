// A pool where the system gives one thread and no more: it says so, and does all its work.
#include "pool.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdio>
#include <vector>

static int num_left = 1;

// Stands before the C library's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) {
  if (num_left-- <= 0) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, start, argument);
}

int main() {
  quire::ThreadPool pool(4);
  std::vector<int> calls(100);
  const quire::ThreadPool::Awake awake(pool);
  pool.run(100, [&](int item, int thread) { calls[item] += thread < 2 ? 1 : 1000; });
  for (const int n : calls) {
    if (n != 1) return std::printf("an item was worked on %d times\n", n), 1;
  }
  if (pool.num_threads() != 2) return std::printf("%d threads\n", pool.num_threads()), 1;
}
