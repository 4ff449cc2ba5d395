// Cuts steps into chunks of rows; prints the first row that has a wrong place and exits with 1.
#include "quants.h"

#include <cstdio>

int main() {
  quire::RowChunks chunks;
  for (const int num_rows : {0, 1, 5, 6, 7, 13, 512, 1 << 18}) {
    chunks.cut(num_rows);
    for (int row = 0; row < num_rows; ++row) {
      const quire::RowChunks::Place& place = chunks.place(row);
      const bool is_inside = place.index >= 0 && place.index < place.size;
      if (place.start + place.index == row && is_inside && place.size <= quire::kRowChunk) continue;
      std::printf("row %d of %d\n", row, num_rows);
      return 1;
    }
  }
}
