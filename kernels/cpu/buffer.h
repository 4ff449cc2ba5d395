// Owned memory, aligned to a cache line and zeroed. Much of it comes from the system when it is first
// written, so that room for large steps costs nothing where there are none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace quire {

template <class T>
class Buffer {
 public:
  Buffer() = default;

  explicit Buffer(size_t size) : size_(size) {
    memory_.reset(std::calloc(1, size * sizeof(T) + kAlignment));
    if (memory_ == nullptr) throw std::bad_alloc();
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<T*>((start + kAlignment - 1) / kAlignment * kAlignment);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace quire
