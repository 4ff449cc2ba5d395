// Cuts steps into chunks of rows; prints the first that is wrong and exits with 1.
#include "quants.h"

#include <cstdio>

int main() {
  quire::RowChunks chunks;
  for (const int num_rows : {0, 1, 5, 6, 7, 13, 512, 1 << 18}) {
    chunks.cut(num_rows);
    int row = 0;
    for (int chunk = 0; chunk < chunks.count(); ++chunk) {
      const int size = chunks.size(chunk), least = num_rows / chunks.count();
      const bool is_even = size == least || size == least + 1;
      if (chunks.start(chunk) != row || size < 1 || size > quire::kRowChunk || !is_even) {
        std::printf("chunk %d of %d rows\n", chunk, num_rows);
        return 1;
      }
      row += size;
    }
    if (row == num_rows && chunks.count() == quire::RowChunks::count(num_rows)) continue;
    std::printf("%d of %d rows\n", row, num_rows);
    return 1;
  }
}
