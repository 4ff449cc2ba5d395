// Memory for weights: taken once, read in full by every step, freed all together.
//
// It comes in large pieces that ask for huge pages. With pages of 4 KiB a core reads from memory at two
// thirds of its speed, as the hardware fetches ahead within a page only and each page costs a walk.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace quire {

class Arena {
 public:
  Arena() = default;
  ~Arena() {
    for (const Piece& piece : pieces_) munmap(piece.mapped, piece.mapped_bytes);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Zeroed bytes, aligned to a cache line. Throws std::bad_alloc.
  uint8_t* take(size_t num_bytes) {
    const size_t rounded = (num_bytes + kLine - 1) / kLine * kLine;
    if (pieces_.empty() || pieces_.back().num_free < rounded) add_piece(std::max(rounded, kPieceBytes));
    Piece& piece = pieces_.back();
    uint8_t* taken = piece.next;
    piece.next += rounded;
    piece.num_free -= rounded;
    return taken;
  }

 private:
  static constexpr size_t kLine = 64;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kPieceBytes = size_t{32} << 20;

  struct Piece {
    void* mapped;
    size_t mapped_bytes;
    uint8_t* next;
    size_t num_free;
  };

  // Pages are given by the system when they are first written, so that what is not taken costs nothing.
  void add_piece(size_t num_bytes) {
    const size_t mapped_bytes = num_bytes + kHugePage;
    pieces_.reserve(pieces_.size() + 1);
    void* mapped =
        mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t start = (reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) / kHugePage * kHugePage;
    uint8_t* aligned = reinterpret_cast<uint8_t*>(start);
#ifdef MADV_HUGEPAGE
    madvise(aligned, num_bytes, MADV_HUGEPAGE);  // it may refuse: then the pages are small ones
#endif
    pieces_.push_back({mapped, mapped_bytes, aligned, num_bytes});
  }

  std::vector<Piece> pieces_;
};

}  // namespace quire
