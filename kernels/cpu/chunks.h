// Loops cut into pieces whose length the compiler knows.
#pragma once

#include <type_traits>

namespace quire {

template <int kSize, class Body>
void remainder_chunk(int start, int size, const Body& body) {
  if constexpr (kSize > 0) {
    if (size == kSize) return body(std::integral_constant<int, kSize>(), start);
    remainder_chunk<kSize - 1>(start, size, body);
  }
}

// Calls body(std::integral_constant<int, size>(), start) over [0, count), size = kMax but at the end.
template <int kMax, class Body>
void in_chunks(int count, const Body& body) {
  int start = 0;
  for (; start + kMax <= count; start += kMax) body(std::integral_constant<int, kMax>(), start);
  remainder_chunk<kMax - 1>(start, count - start, body);
}

// The same with sizes that differ by one at most.
template <int kMax, class Body>
void in_even_chunks(int count, const Body& body) {
  const int num_chunks = (count + kMax - 1) / kMax;
  for (int i = 0, start = 0; i < num_chunks; ++i) {
    const int end = (i + 1) * count / num_chunks;
    remainder_chunk<kMax>(start, end - start, body);
    start = end;
  }
}

}  // namespace quire
