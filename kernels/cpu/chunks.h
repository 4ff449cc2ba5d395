// Loops cut into pieces whose length the compiler knows.
#pragma once

#include <type_traits>

namespace quire {

// Calls body(std::integral_constant<int, size>()); 0 < size <= kMax, else nothing is called.
template <int kMax, class Body>
void with_size(int size, const Body& body) {
  if constexpr (kMax > 0) {
    if (size == kMax) return body(std::integral_constant<int, kMax>());
    with_size<kMax - 1>(size, body);
  }
}

// Calls body(std::integral_constant<int, size>(), start) over [0, count), size = kMax but at the end.
template <int kMax, class Body>
void in_chunks(int count, const Body& body) {
  int start = 0;
  for (; start + kMax <= count; start += kMax) body(std::integral_constant<int, kMax>(), start);
  with_size<kMax - 1>(count - start, [&](auto size) { body(size, start); });
}

// The same with sizes that differ by one at most.
template <int kMax, class Body>
void in_even_chunks(int count, const Body& body) {
  const int num_chunks = (count + kMax - 1) / kMax;
  for (int i = 0, start = 0; i < num_chunks; ++i) {
    const int end = (i + 1) * count / num_chunks;
    with_size<kMax>(end - start, [&](auto size) { body(size, start); });
    start = end;
  }
}

}  // namespace quire
