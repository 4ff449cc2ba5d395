// Paged causal attention with grouped query heads.
//
// A context is cut into tiles of 256 positions from its start. A tile's result for a query is a partial
// softmax (largest score, sum of powers, weighted sum of values), and the tiles are merged in order
// (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867). Neither depends on which queries are
// worked on together or on which thread, so decoding, chunked prefill and any batch give equal bits.
//
// A tile's groups of positions are worked on in turns from four places of it: the hardware asks ahead for each
// run of addresses that it sees, and for more lines of four than of one. What it does not see in time, the
// values while keys are read and the next keys while values are, is asked for here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "buffer.h"
#include "chunks.h"
#include "kv_cache.h"
#include "simd.h"

namespace quire {

constexpr int kTile = 256;  // positions
constexpr int kTileGroups = kTile / simd::kLanes;
constexpr int kRuns = 4;  // places of a tile that are worked on in turns
constexpr int kRunGroups = kTileGroups / kRuns;
constexpr int kQueryChunk = 5;
constexpr int kQueriesWanted = 24;  // queries that share a pass over keys and values

// Rows that share such a pass
constexpr int rows_per_tile(int heads_per_kv) { return std::max(1, kQueriesWanted / heads_per_kv); }

// Vectors beside so many queries: 8 to 10 sums keep the multiply-adds busy, and fit the registers together
// with what they are made of.
constexpr int vectors_beside(int num_queries) {
  return num_queries <= 2 ? 8 / num_queries : num_queries == 3 ? 3 : 2;
}

// Neighbouring rows of one sequence, each with the query heads of one KV head.
struct QueryTile {
  const int32_t* block_table;
  int first_row;  // in the step
  int num_rows;
  int first_context;  // positions that the first row attends to; each further row one more

  int context() const { return first_context + num_rows - 1; }
  int num_tiles() const { return (context() + kTile - 1) / kTile; }
};

// Partial softmax of some queries: state per query, values [num_queries][head_dim].
struct Partial {
  float* largest;
  float* total;
  float* values;
};

// Where a tile's groups of kLanes positions begin, in the order in which they take their turns.
template <class Element>
struct TileRuns {
  const Element* keys[kTileGroups];
  const Element* values[kTileGroups];
  int turns[kTileGroups];  // of the groups as their positions follow each other
  int num_positions;

  void locate(const KvCache<Element>& cache, int layer, int kv_head, const QueryTile& queries, int tile) {
    num_positions = std::min(kTile, queries.context() - tile * kTile);
    const Element* groups[kTileGroups];
    const int32_t* block = queries.block_table + tile * kTile / cache.block_size;
    int offset = tile * kTile % cache.block_size;
    for (int g = 0; g < num_groups(); ++block) {
      const Element* run = cache.keys(*block, layer, kv_head);
      for (; offset < cache.block_size && g < num_groups(); offset += simd::kLanes, ++g) {
        groups[g] = run + offset / simd::kLanes * cache.group_size();
      }
      offset = 0;
    }
    int turn = 0;
    for (int place = 0; place < kRunGroups; ++place) {
      for (int g = place; g < num_groups(); g += kRunGroups, ++turn) {
        keys[turn] = groups[g];
        values[turn] = groups[g] + cache.run_size();
        turns[g] = turn;
      }
    }
  }
  int num_groups() const { return (num_positions + simd::kLanes - 1) / simd::kLanes; }

  // Positions of the group whose turn it is: the last may have fewer.
  int group_size(int turn) const {
    const int last = num_groups() - 1;
    return turn == turns[last] ? num_positions - last * simd::kLanes : simd::kLanes;
  }
};

// sums [kRows][kColumns] += x (numbers) times y (vectors), the fewer of them held in registers
template <int kRows, int kColumns, class LoadX, class LoadY>
inline void add_products(const LoadX& load_x, const LoadY& load_y, simd::Floats (&sums)[kRows][kColumns]) {
  using namespace simd;
  if constexpr (kRows < kColumns) {
    Floats x[kRows];
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) x[r] = splat(load_x(r));
    QUIRE_UNROLL for (int c = 0; c < kColumns; ++c) {
      const Floats y = load_y(c);
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][c] = fused_multiply_add(x[r], y, sums[r][c]);
      }
    }
  } else {
    Floats y[kColumns];
    QUIRE_UNROLL for (int c = 0; c < kColumns; ++c) y[c] = load_y(c);
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      const Floats x = splat(load_x(r));
      QUIRE_UNROLL for (int c = 0; c < kColumns; ++c) {
        sums[r][c] = fused_multiply_add(x, y[c], sums[r][c]);
      }
    }
  }
}

template <int kRows, int kColumns>
inline void clear(simd::Floats (&sums)[kRows][kColumns]) {
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int c = 0; c < kColumns; ++c) sums[r][c] = simd::Floats{};
  }
}

// scores [kQueries][kTile], from group `first`: queries [kQueries][head_dim] times kGroups groups of keys.
// Asks for the groups of elements at `later` meanwhile, if any.
template <int kQueries, int kGroups, class Element>
void score(const float* queries, int head_dim, const Element* const* keys, const Element* const* later,
           float* scores) {
  using namespace simd;
  constexpr int kPair = 2 * kLanes, kPairBytes = kPair * static_cast<int>(sizeof(Element));
  Floats sums[kQueries][kGroups];
  clear(sums);
  for (int d = 0, pair = kGroupHead<Element>; d < head_dim; d += 2, pair += kPair) {
    if (later != nullptr && d / 2 * kPairBytes % 64 < kPairBytes) {
      for (int g = 0; g < kGroups; ++g) prefetch(later[g] + pair, kPairBytes);
    }
    add_products([&](int q) { return queries[q * head_dim + d]; },
                 [&](int g) { return load_of_pair<0>(keys[g] + pair); }, sums);
    stay_in_memory();
    add_products([&](int q) { return queries[q * head_dim + d + 1]; },
                 [&](int g) { return load_of_pair<1>(keys[g] + pair); }, sums);
  }
  QUIRE_UNROLL for (int q = 0; q < kQueries; ++q) {
    QUIRE_UNROLL for (int g = 0; g < kGroups; ++g) {
      if constexpr (kScaleSize<Element> != 0) sums[q][g] = sums[q][g] * load_scales(keys[g]);
      store(scores + q * kTile + g * kLanes, sums[q][g]);
    }
  }
}

// Turns the scores of the tile's first `count` positions into powers of two relative to the largest, the rest
// of the groups into 0.
template <class Element>
void soften(float* scores, int count, const TileRuns<Element>& runs, float& largest_score, float& total) {
  using namespace simd;
  constexpr int kTogether = 4;
  static_assert(kTileGroups % kTogether == 0);
  const int num_groups = runs.num_groups();
  const int end = (num_groups + kTogether - 1) / kTogether * kTogether * kLanes;
  const float lowest = -std::numeric_limits<float>::infinity();
  for (int g = count / kLanes; g < num_groups; ++g) {
    float* group = scores + runs.turns[g] * kLanes;
    std::fill(group + std::max(0, count - g * kLanes), group + kLanes, lowest);
  }
  std::fill(scores + num_groups * kLanes, scores + end, lowest);
  Floats top = splat(lowest), sums = {};
  for (int i = 0; i < end; i += kLanes) top = max(top, load(scores + i));
  largest_score = largest(top);
  top = splat(largest_score);
  for (int i = 0; i < end; i += kTogether * kLanes) {
    Floats e[kTogether];
    QUIRE_UNROLL for (int g = 0; g < kTogether; ++g) e[g] = load(scores + i + g * kLanes) - top;
    power_of_two(e);
    QUIRE_UNROLL for (int g = 0; g < kTogether; ++g) {
      store(scores + i + g * kLanes, e[g]);
      sums = sums + e[g];
    }
  }
  total = sum(sums);
}

// Weights of values become weights of their quants.
inline void scale_weights(float* weights, const TileRuns<int8_t>& runs) {
  for (int g = 0; g < runs.num_groups(); ++g) {
    float* w = weights + g * simd::kLanes;
    simd::store(w, simd::load(w) * load_scales(runs.values[g]));
  }
}

// out [kQueries][head_dim], kVectors vectors from dimension d: weights [kQueries][kTile] times values of the
// groups [first, end), added to those of the groups before. Asks for the share of these dimensions of the keys
// of `next` meanwhile, if any.
template <int kQueries, int kVectors, class Element>
void weigh(const float* weights, const TileRuns<Element>& runs, int first, int end, int head_dim, int d,
           const TileRuns<Element>* next, float* out) {
  using namespace simd;
  constexpr int kPair = 2 * kLanes, kStep = kVectors * kPair * static_cast<int>(sizeof(Element));
  Floats sums[kQueries][kVectors];
  clear(sums);
  if (first > 0) {
    QUIRE_UNROLL for (int q = 0; q < kQueries; ++q) {
      QUIRE_UNROLL for (int v = 0; v < kVectors; ++v) sums[q][v] = load(out + q * head_dim + d + v * kLanes);
    }
  }
  const int num_next = next == nullptr ? 0 : next->num_groups();
  for (int g = first; g < end; ++g) {
    const float* weight = weights + g * kLanes;
    const Element* row = runs.values[g] + kGroupHead<Element> + 2 * d;
    const Element* ask = g < num_next ? next->keys[g] + d * kLanes : nullptr;
    const int count = runs.group_size(g);
    for (int i = 0; i < count; i += 2, row += 2 * head_dim) {
      if (ask != nullptr) {
        prefetch(ask, kStep);
        ask += kStep / static_cast<int>(sizeof(Element));
      }
      add_products([&](int q) { return weight[q * kTile + i]; },
                   [&](int v) { return load_of_pair<0>(row + v * kPair); }, sums);
      if (i + 1 == count) break;
      stay_in_memory();
      add_products([&](int q) { return weight[q * kTile + i + 1]; },
                   [&](int v) { return load_of_pair<1>(row + v * kPair); }, sums);
    }
  }
  QUIRE_UNROLL for (int q = 0; q < kQueries; ++q) {
    QUIRE_UNROLL for (int v = 0; v < kVectors; ++v) {
      store(out + q * head_dim + d + v * kLanes, sums[q][v]);
    }
  }
}

// What a thread needs beside the caches: packed queries, scores and two partials.
struct AttentionScratch {
  AttentionScratch(int heads_per_kv, int head_dim)
      : AttentionScratch(head_dim, rows_per_tile(heads_per_kv) * static_cast<size_t>(heads_per_kv)) {}

  Buffer<float> queries;
  Buffer<float> scores;
  Buffer<float> state;
  Buffer<float> values;
  Partial tile;
  Partial merged;

 private:
  AttentionScratch(int head_dim, size_t max_queries)
      : queries(max_queries * head_dim),
        scores(max_queries * kTile),
        state(max_queries * 4),
        values(max_queries * head_dim * 2),
        tile{state.data(), state.data() + max_queries, values.data()},
        merged{state.data() + 2 * max_queries, state.data() + 3 * max_queries,
               values.data() + max_queries * head_dim} {}
};

// Attention of one layer; query and output rows are [num_heads][head_dim], `stride` floats apart.
template <class Element>
struct Attention {
  KvCache<Element> cache;
  int layer;
  int heads_per_kv;
  const float* query;  // scaled by log2(e) / sqrt(head_dim): scores are exponents of two
  size_t query_stride;
  float* output;
  size_t output_stride;

  int num_queries(const QueryTile& rows) const { return rows.num_rows * heads_per_kv; }

  // Positions of `tile` that query q may see.
  int visible(const QueryTile& rows, int q, int tile) const {
    return std::clamp(rows.first_context + q / heads_per_kv - tile * kTile, 0, kTile);
  }

  void gather_queries(const QueryTile& rows, int kv_head, float* packed) const {
    const int width = heads_per_kv * cache.head_dim;
    for (int row = 0; row < rows.num_rows; ++row) {
      std::copy_n(query + (rows.first_row + row) * query_stride + kv_head * width, width,
                  packed + row * width);
    }
  }

  // The partial softmax of one tile. A query that sees none of it gets the sum 0. Meanwhile memory is
  // asked for the tile's values, and then for the keys of `next`.
  void attend_tile(const QueryTile& rows, const TileRuns<Element>& runs, int tile, const float* queries,
                   float* scores, const TileRuns<Element>& next, const Partial& out) const {
    const int head_dim = cache.head_dim, count = num_queries(rows), num_groups = runs.num_groups();
    in_even_chunks<kQueryChunk>(count, [&](auto size, int q) {
      constexpr int kQueries = decltype(size)::value;
      in_chunks<vectors_beside(kQueries)>(num_groups, [&](auto groups, int g) {
        score<kQueries, decltype(groups)::value>(queries + q * head_dim, head_dim, runs.keys + g,
                                                 q == 0 ? runs.values + g : nullptr,
                                                 scores + q * kTile + g * simd::kLanes);
      });
    });
    for (int q = 0; q < count; ++q) {
      const int seen = visible(rows, q, tile);
      if (seen > 0) {
        soften(scores + q * kTile, seen, runs, out.largest[q], out.total[q]);
        if constexpr (kScaleSize<Element> != 0) scale_weights(scores + q * kTile, runs);
      } else {
        std::fill_n(scores + q * kTile, num_groups * simd::kLanes, 0.0f);
        out.total[q] = 0.0f;
      }
    }
    // Few queries wait for values: all their sums get some groups' while these are in the first-level cache.
    const int most = count <= kQueryChunk ? kRuns : kTileGroups;
    in_even_chunks<kQueryChunk>(count, [&](auto size, int q) {
      constexpr int kQueries = decltype(size)::value;
      for (int g = 0; g < num_groups; g += most) {
        const int end = std::min(g + most, num_groups);
        in_chunks<vectors_beside(kQueries)>(head_dim / simd::kLanes, [&](auto vectors, int v) {
          weigh<kQueries, decltype(vectors)::value>(scores + q * kTile, runs, g, end, head_dim, v * simd::kLanes,
                                                    q == 0 ? &next : nullptr, out.values + q * head_dim);
        });
      }
    });
  }

  // Adds a later tile's partial of query q to what is merged so far.
  void merge(const Partial& merged, const Partial& tile, int q) const {
    using namespace simd;
    if (tile.total[q] == 0.0f) return;
    const float top = std::max(merged.largest[q], tile.largest[q]);
    Floats factors[1] = {Floats{merged.largest[q] - top, tile.largest[q] - top}};
    power_of_two(factors);
    const float keep_factor = factors[0][0], add_factor = factors[0][1];
    const Floats keep = splat(keep_factor), add = splat(add_factor);
    merged.largest[q] = top;
    merged.total[q] = merged.total[q] * keep_factor + tile.total[q] * add_factor;
    float* target = merged.values + q * cache.head_dim;
    const float* source = tile.values + q * cache.head_dim;
    for (int d = 0; d < cache.head_dim; d += kLanes) {
      store(target + d, fused_multiply_add(load(source + d), add, load(target + d) * keep));
    }
  }

  void write_output(const QueryTile& rows, int kv_head, const Partial& merged) const {
    using namespace simd;
    for (int q = 0; q < num_queries(rows); ++q) {
      const int row = rows.first_row + q / heads_per_kv;
      const int head = kv_head * heads_per_kv + q % heads_per_kv;
      const Floats inverse = splat(1.0f / merged.total[q]);
      float* target = output + row * output_stride + head * cache.head_dim;
      for (int d = 0; d < cache.head_dim; d += kLanes) {
        store(target + d, load(merged.values + q * cache.head_dim + d) * inverse);
      }
    }
  }

  void locate(const QueryTile& rows, int kv_head, int tile, TileRuns<Element>& runs) const {
    runs.locate(cache, layer, kv_head, rows, tile);
  }

  // All tiles of one query tile and KV head, one after another. The first holds position 0, which every
  // query sees, so it starts what is merged. `next_rows` and `next_head` are worked on afterwards.
  void attend(const QueryTile& rows, int kv_head, const QueryTile& next_rows, int next_head,
              AttentionScratch& scratch) const {
    const int num_tiles = rows.num_tiles();
    TileRuns<Element> runs[2];
    locate(rows, kv_head, 0, runs[0]);
    gather_queries(rows, kv_head, scratch.queries.data());
    for (int tile = 0; tile < num_tiles; ++tile) {
      TileRuns<Element>& next = runs[(tile + 1) % 2];
      if (tile + 1 < num_tiles) {
        locate(rows, kv_head, tile + 1, next);
      } else {
        locate(next_rows, next_head, 0, next);
      }
      const Partial& out = tile == 0 ? scratch.merged : scratch.tile;
      attend_tile(rows, runs[tile % 2], tile, scratch.queries.data(), scratch.scores.data(), next, out);
      for (int q = 0; tile > 0 && q < num_queries(rows); ++q) merge(scratch.merged, out, q);
    }
    write_output(rows, kv_head, scratch.merged);
  }
};

}  // namespace quire
