// SPDX-License-Identifier: Apache-2.0
// Prompts: a split is a run of the row's queries; each of its tiles sees all keys up to its own.
#pragma once
#include <algorithm>
#include <cmath>
#include "batch.hpp"
#include "few.hpp"
#include "packed.hpp"

namespace h2o {
namespace {

template <class K>
struct Prompts : Batch {
  using T = typename K::Cache;
  using Query = typename K::Query;
  using Prob = typename K::Prob;
  using Session = typename K::Session;
  static constexpr int PROBS = sizeof(float) / sizeof(Prob);  // per float
  static constexpr int64_t TILE_FLOATS = 3 << 16;  // logits of one tile: 768 KiB, most of a 1 MiB L2
  static constexpr int SPLIT = 128;     // queries of one split, at least
  static constexpr int RUN = 256;       // keys between two looks at the maximum, where no scores are kept
  static constexpr int RUN_ROWS = 96;   // query rows of such a tile
  static constexpr int FEW_RUN = 1024;  // keys between two looks, where the queries are few

  bool padding(int row) const { return call.lens[row] <= 0 || count(row) <= 0; }

  int splits(int row, int /*head*/, int threads) const {
    // A split packs its keys, so there are no more than keep the threads busy.
    const int most = K::packs ? (8 * threads + call.heads - 1) / call.heads : 4 * threads;
    return std::clamp(count(row) / SPLIT, 1, most);
  }

  // Floats that a task leaves for join(): the split's column sums (or maxima) [S], if the row is scored.
  int64_t left(const Task& task) const {
    return task.splits == 1 || !task.scored ? 0 : blocks(task) * call.block;
  }

  // Leaves them in `sums`; null: adds them to the scores.
  void attend(const Task& task, float* sums) const {
#ifdef H2O_AMX
    if constexpr (K::matrices)
      if (few(task)) return by_matrices(task);
#endif
#ifdef H2O_PAIRED
    if constexpr (K::packs)
      if (packs(task)) return packed(task, sums);
#endif
    if (task.scored) summed(task, sums);
    else alone(task);
  }

  // The first split does it, in order, so that the sum is the same every time.
  void join(const Task& task) const {
    if (task.split) return;
    for (int s = 0; s < task.splits; ++s) add(task, joint + (&task)[s].part);
  }

 private:
  // Queries of a row, and of a tile.
  int count(int row) const { return call.starts[row + 1] - call.starts[row]; }
  int step_of(const Task& task) const {
#ifdef H2O_PAIRED
    if constexpr (K::packs)
      if (packs(task)) {
        const int rows = PackedRows<K>::most(blocks(task) * call.block, task.scored);
        return std::min(count(task.row), std::max(1, rows / call.group));
      }
#endif
    const int64_t fitting = std::clamp<int64_t>(TILE_FLOATS / (blocks(task) * call.block), 12, 96);
    const int64_t rows = task.scored ? fitting : RUN_ROWS;
    return std::min<int64_t>(count(task.row), std::max<int64_t>(1, rows / call.group));
  }
  // First query of a split, such that all splits see about the same number of keys.
  int cut(const Task& task, int split) const {
    const double n = count(task.row), before = length(task) - n;
    const double area = (before * n + n * n / 2) * split / task.splits;
    const int at = int(std::sqrt(before * before + 2 * area) - before), step = step_of(task);
    return split == task.splits ? int(n) : std::min(int(n), (at + step / 2) / step * step);
  }

  void summed(const Task& task, float* part) const {
    const int n = count(task.row), length = this->length(task), step = step_of(task);
    const int64_t span = blocks(task) * call.block, most = step * call.group;
    float* e = own(most * (span + 2 * call.size + 3) + span);
    float *memory = e + most * span, *out = memory + most * call.size;
    float *top = out + most * call.size, *sum = top + most, *inverse = sum + most;
    float* sums = part ? part : inverse + most;
    std::fill_n(sums, span, 0.f);
    const int end = cut(task, task.split + 1);
    Tile<K> tile{layer, pages(task), 0, 0, span};
    for (int t = cut(task, task.split); t < end; t += step) {
      const int here = std::min(step, end - t), token = call.starts[task.row] + t;
      tile.rows = here * call.group;
      tile.first_limit = length - n + t + 1;
      tile.logits(queries<K>(token, here, task.head, memory), e);
      tile.exponentials(e, top, sum);
      for (int m = 0; m < tile.rows; ++m) inverse[m] = 1 / (sum[m] + sink(task, m, top[m]));
      tile.normalise(e, inverse, (Prob*)e, span * PROBS, sums);
      std::fill_n(out, int64_t(tile.rows) * call.size, 0.f);
      tile.values((Prob*)e, span * PROBS, out);
      write<K>(token, here, task.head, out);
    }
    if (!part) add(task, sums);
  }
  // Where the column sums are not wanted: run by run, with maximum, sum and output of the runs so far, as
  // FlashAttention (arXiv 2205.14135). Logits of many rows stay in L2, whatever the length.
  void alone(const Task& task) const {
    const int n = count(task.row), length = this->length(task), step = step_of(task);
    const int64_t span = std::max(1, RUN / call.block) * call.block, most = step * call.group;
    float* e = own(most * (span + 2 * call.size + 3));
    float *memory = e + most * span, *out = memory + most * call.size;
    float *top = out + most * call.size, *sum = top + most, *factor = sum + most;
    const Pages all = pages(task);
    const int end = cut(task, task.split + 1);
    for (int t = cut(task, task.split); t < end; t += step) {
      const int here = std::min(step, end - t), token = call.starts[task.row] + t, rows = here * call.group;
      const int first_limit = length - n + t + 1, keys = first_limit + here - 1;
      const Query* q = queries<K>(token, here, task.head, memory);
      std::fill_n(out, int64_t(rows) * call.size, 0.f);
      std::fill_n(top, rows, -INFINITY);
      std::fill_n(sum, rows, 0.f);
      std::fill_n(factor, rows, 1.f);
      for (int k = 0; k < keys; k += span) {
        const Tile<K> tile{layer, all.from(k / call.block), rows, first_limit - k, span, int(span)};
        tile.logits(q, e);
        tile.exponentials(e, top, sum, out);
        if (!as_is<K>) tile.normalise(e, factor, (Prob*)e, span * PROBS, nullptr);
        tile.values((Prob*)e, span * PROBS, out);
      }
      for (int m = 0; m < rows; ++m) factor[m] = 1 / (sum[m] + sink(task, m, top[m]));
      multiply(out, rows, factor);
      write<K>(token, here, task.head, out);
    }
  }
#ifdef H2O_PAIRED
  bool packs(const Task& task) const {
    return PackedRows<K>::fit(call.block, call.size, call.group) && count(task.row) * call.group >= K::FEWEST;
  }
  // With the column sums or without, of packed keys and values.
  void packed(const Task& task, float* part) const {
    const int n = count(task.row), length = this->length(task);
    const int end = cut(task, task.split + 1), keys = length - n + end, step = step_of(task);
    const Tile<K> tile{layer, pages(task)};
    const Packed packed = Packed::of([&](int b) { return tile.page(b); }, keys, call.block, call.size);
    PackedRows<K> rows(layer, packed, task.scored, keys);
    const int64_t span = blocks(task) * call.block, most = rows.padded(step * call.group);
    float *memory = own(most * (call.size + 1) + span), *inverse = memory + most * call.size;
    float* sums = part ? part : inverse + most;
    if (task.scored) std::fill_n(sums, span, 0.f);
    for (int t = cut(task, task.split); t < end; t += step) {
      const int here = std::min(step, end - t), token = call.starts[task.row] + t;
      rows.rows = here * call.group;
      rows.first_limit = length - n + t + 1;
      Query* q = (Query*)memory;
      for (int m = 0; m < rows.rows; ++m) K::place_query(query<T>(token, task.head, m), q, m, call.size);
      rows.attend(q);
      for (int m = 0; m < rows.rows; ++m) inverse[m] = 1 / (rows.sum[m] + sink(task, m, rows.top[m]));
      if (task.scored) rows.add_columns(inverse, sums);
      for (int m = 0; m < rows.rows; ++m) rows.write(m, inverse[m], output<T>(token, task.head, m));
    }
    if (task.scored && !part) add(task, sums);
  }
#endif
#ifdef H2O_AMX
  bool few(const Task& task) const {
    return !task.scored && FewRows::fit(call.block, call.size, count(task.row) * call.group);
  }
  // alone() of few queries: all of them against each run of keys.
  void by_matrices(const Task& task) const {
    const int n = count(task.row), token = call.starts[task.row], rows = n * call.group;
    const int length = this->length(task), step = std::max(1, FEW_RUN / call.block);
    const int64_t span = int64_t(step) * call.block, asked = FewRows::padded_rows(rows) * call.size;
    const int64_t words = asked + FewRows::padded_rows(rows) * FewRows::padded(span);
    float* e = own(words / 2 + rows * (span + call.size + 3));
    uint16_t *q = (uint16_t*)(e + rows * span), *prob = q + asked;
    float *out = (float*)q + words / 2, *top = out + rows * call.size;
    float *sum = top + rows, *inverse = sum + rows;
    queries<K>(token, n, task.head, (float*)q);
    std::fill_n(out, int64_t(rows) * call.size, 0.f);
    std::fill_n(top, rows, -INFINITY);
    std::fill_n(sum, rows, 0.f);
    const Pages all = pages(task);
    for (int b = 0, count = int(blocks(task)); b < count; b += step) {
      const int seen = length - n + 1 - b * call.block, behind = std::max(0, count - b - step);
      const Tile<K> tile{layer, all.from(b), rows, seen, span, int(span), all.from(b + step), behind};
      const FewRows few{tile};
      few.logits(q, e, false);
      tile.exponentials(e, top, sum, out);
      few.probabilities(e, nullptr, prob, false);
      few.values(prob, out);
    }
    for (int m = 0; m < rows; ++m) inverse[m] = 1 / (sum[m] + sink(task, m, top[m]));
    multiply(out, rows, inverse);
    write<K>(token, n, task.head, out);
  }
#endif
  void add(const Task& task, const float* sums) const {
    Tile<K>{layer, pages(task), call.group, length(task), 0}.add_scores(sums);
  }
};

}  // namespace
}  // namespace h2o
