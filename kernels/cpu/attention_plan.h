// How the attention of some rows is shared out among threads: one plan for all layers that compute them.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "pool.h"

namespace quire {

class AttentionPlan {
 public:
  AttentionPlan(int heads_per_kv, int num_kv_heads, int head_dim, int num_threads)
      : num_kv_heads_(num_kv_heads),
        head_dim_(head_dim),
        num_threads_(num_threads),
        rows_per_tile_(rows_per_tile(heads_per_kv)),
        max_queries_(rows_per_tile_ * heads_per_kv) {}

  // A plan begins, gets rows of sequences, and is finished.
  void begin() {
    tiles_.clear();
    splits_.clear();
  }

  // Rows from `first_row` on of the sequence with this block table; the first attends to
  // `first_context` positions, each further one to one more.
  void add(const int32_t* block_table, int first_row, int num_rows, int first_context) {
    for (int i = 0; i < num_rows; i += rows_per_tile_) {
      tiles_.push_back({block_table, first_row + i, std::min(rows_per_tile_, num_rows - i), first_context + i});
    }
  }

  void finish() {
    if (static_cast<int>(tiles_.size()) * num_kv_heads_ < kItemsPerThread * num_threads_) split();
  }

  // Threads go along the items in order, so that each can ask memory for the next one's keys. scratch_of
  // gives a thread's AttentionScratch.
  template <class Element, class ScratchOf>
  void run(ThreadPool& pool, const Attention<Element>& attention, const ScratchOf& scratch_of) {
    const int num_items = static_cast<int>(tiles_.size()) * num_kv_heads_;
    if (splits_.empty()) {
      pool.run(num_items, [&](int item, int thread) {
        const int next = std::min(item + 1, num_items - 1);
        attention.attend(tiles_[item / num_kv_heads_], item % num_kv_heads_,
                         tiles_[next / num_kv_heads_], next % num_kv_heads_, scratch_of(thread));
      });
      return;
    }
    const int num_splits = static_cast<int>(splits_.size()), num_parts = num_splits * num_kv_heads_;
    pool.run(num_parts, [&](int item, int thread) {
      TileRuns<Element> runs, next;
      locate(attention, item, runs);
      locate(attention, std::min(item + 1, num_parts - 1), next);
      const Split& split = splits_[item % num_splits];
      const QueryTile& rows = tiles_[split.query_tile];
      AttentionScratch& scratch = scratch_of(thread);
      attention.gather_queries(rows, item / num_splits, scratch.queries.data());
      attention.attend_tile(rows, runs, split.tile, scratch.queries.data(), scratch.scores.data(), next,
                            partial(item));
    });
    pool.run(num_items, [&](int item, int) { merge_splits(attention, item); });
  }

 private:
  static constexpr int kItemsPerThread = 4;

  // One tile of the context of one query tile.
  struct Split {
    int query_tile;
    int tile;
  };

  template <class Element>
  void locate(const Attention<Element>& attention, int item, TileRuns<Element>& runs) const {
    const int num_splits = static_cast<int>(splits_.size());
    const Split& split = splits_[item % num_splits];
    attention.locate(tiles_[split.query_tile], item / num_splits, split.tile, runs);
  }

  // Too few items for the threads, and a context of several tiles: each of them becomes an item.
  void split() {
    for (int i = 0; i < static_cast<int>(tiles_.size()); ++i) {
      for (int tile = 0; tile < tiles_[i].num_tiles(); ++tile) splits_.push_back({i, tile});
    }
    if (splits_.size() == tiles_.size()) return splits_.clear();
    const size_t num_queries = splits_.size() * num_kv_heads_ * max_queries_;
    if (values_.size() < num_queries * head_dim_) {  // what comes last, if there is memory
      states_ = Buffer<float>(num_queries * 2);
      values_ = Buffer<float>(num_queries * head_dim_);
    }
  }

  Partial partial(int index) {
    const size_t first = static_cast<size_t>(index) * max_queries_;
    return {states_.data() + 2 * first, states_.data() + 2 * first + max_queries_,
            values_.data() + first * head_dim_};
  }

  template <class Element>
  void merge_splits(const Attention<Element>& attention, int item) {
    const int num_splits = static_cast<int>(splits_.size());
    const int query_tile = item / num_kv_heads_, kv_head = item % num_kv_heads_;
    const QueryTile& rows = tiles_[query_tile];
    int first = 0;
    while (splits_[first].query_tile != query_tile) ++first;
    const Partial merged = partial(kv_head * num_splits + first);
    for (int tile = 1; tile < rows.num_tiles(); ++tile) {
      const Partial later = partial(kv_head * num_splits + first + tile);
      for (int q = 0; q < attention.num_queries(rows); ++q) attention.merge(merged, later, q);
    }
    attention.write_output(rows, kv_head, merged);
  }

  int num_kv_heads_;
  int head_dim_;
  int num_threads_;
  int rows_per_tile_;
  int max_queries_;
  std::vector<QueryTile> tiles_;
  std::vector<Split> splits_;
  Buffer<float> states_;
  Buffer<float> values_;
};

}  // namespace quire
