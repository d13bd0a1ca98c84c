// SPDX-License-Identifier: Apache-2.0
// The listed rows of a batch, prompts (prompt.hpp) or decode steps (decode.hpp): where keys, queries and
// outputs lie, and what a task is.
//
// All three are part of attend.cpp alone. Outside, their names are unknown: what is called once is inlined.
#pragma once
#include <cmath>
#include <type_traits>
#include "tile.hpp"

namespace h2o {
namespace {

// Mirrored field by field in cpp.py.
struct Call {
  const void* query;           // [T, H, D], stride query_stride elements along T
  const void* cache;
  float* scores;
  const int32_t* table;        // [B, MB], stride table_stride
  const int32_t* lens;         // [B]
  const int32_t* starts;       // decode: [R] token of each listed row; prompt: [B + 1]
  const int32_t* rows;         // [R]; the first `scored` of them add to the scores
  void* out;                   // [T, H, D]
  const float* sinks;          // [H] logits of no key, or null
  const int32_t* lane_rows;    // [B] where a row's lanes stand in the next three, or -1; null: no row has any
  const int32_t* lane_pages;   // [S, KH, MP], stride lane_stride
  const int32_t* lane_counts;  // [S, KH]
  const int32_t* lane_heavy;   // [S] number of first blocks of the row's table that hold its lanes
  int64_t query_stride, out_stride, table_stride, lane_stride;
  int32_t count, scored, heads, group, size, block, dtype, prompt;
  float scale, softcap;        // softcap: 0 for none
};

struct Task {
  int r, row, head;   // listed row, batch row, kv head
  int split, splits;  // of this (row, kv head)
  bool scored;
  size_t part;        // where in `joint` what it leaves for join() lies
};

struct Batch {
  const Call& call;
  Layer layer{(const char*)call.cache, call.scores, call.heads, call.group, call.size, call.block, call.scale,
              call.softcap};

  // Known once all tasks are listed.
  float* joint = nullptr;         // what splits leave for each other
  const Task* no_task = nullptr;  // behind the last one
  int turns = 1;                  // threads that take one after the other

  Pages pages(int row, int head) const {
    Pages all{call.table + row * call.table_stride, call.heads, head};
    const int at = call.lane_rows ? call.lane_rows[row] : -1;
    if (at >= 0) {
      const int64_t mine = int64_t(at) * call.heads + head;
      all.lanes = call.lane_pages + mine * call.lane_stride;
      all.count = call.lane_counts[mine];
      all.heavy = call.lane_heavy[at];
    }
    return all;
  }
  Pages pages(const Task& task) const { return pages(task.row, task.head); }
  // Live tokens of a head.
  int length(int row, int head) const {
    const Pages all = pages(row, head);
    return call.lens[row] + (all.count - all.heavy) * call.block;
  }
  int length(const Task& task) const { return length(task.row, task.head); }
  int64_t blocks(const Task& task) const { return (length(task) + call.block - 1) / call.block; }

  // Row m of the queries that a kv head has from `token` on, and of what comes of them.
  template <class T>
  const T* query(int token, int head, int m) const {
    const int64_t at = (token + m / call.group) * call.query_stride;
    return (const T*)call.query + at + query_head(head, m) * call.size;
  }
  template <class T>
  T* output(int token, int head, int m) const {
    const int64_t at = (token + m / call.group) * call.out_stride;
    return (T*)call.out + at + query_head(head, m) * call.size;
  }
  int64_t query_head(int head, int m) const { return head * call.group + m % call.group; }
  // As K multiplies them, in `memory`.
  template <class K>
  const typename K::Query* queries(int token, int tokens, int head, float* memory) const {
    auto* to = (typename K::Query*)memory;
    for (int m = 0; m < tokens * call.group; ++m)
      K::pack_query(query<typename K::Cache>(token, head, m), to + int64_t(m) * call.size, call.size);
    return to;
  }
  // Outputs as K leaves them.
  template <class K>
  void write(int token, int tokens, int head, const float* from) const {
    for (int m = 0; m < tokens * call.group; ++m) {
      auto* to = output<typename K::Cache>(token, head, m);
      const float* row = from + int64_t(m) * call.size;
      for (int d = 0; d < call.size; ++d) narrow(row[column(d, call.size, K::shuffled)], to + d);
    }
  }

  // What the sink of a head adds to the sum of exponentials of row m, given their base-2 maximum `top`.
  // A sink far above all logits makes it infinite, and every probability 0.
  float sink(const Task& task, int m, float top) const {
    return call.sinks ? std::exp2(call.sinks[query_head(task.head, m)] * LOG2E - top) : 0.f;
  }

  // Whether exponentials have the type that V is multiplied with. Where the probabilities are not wanted
  // the output is then divided by their sum instead: a pass over the logits less.
  template <class K>
  static constexpr bool as_is = std::is_same_v<typename K::Prob, float>;
  void multiply(float* out, int rows, const float* by) const {
    for (int m = 0; m < rows; ++m)
      for (int d = 0; d < call.size; ++d) out[int64_t(m) * call.size + d] *= by[m];
  }

  // Memory of this thread for one tile.
  static float* own(int64_t floats) {
    static thread_local Scratch memory;
    return memory.get(floats);
  }
};

}  // namespace
}  // namespace h2o
