// SPDX-License-Identifier: Apache-2.0
// Decode steps: a split is a run of the row's blocks, attended to as if there were no others.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "batch.hpp"
#include "few.hpp"

namespace h2o {
namespace {

template <class K>
struct DecodeSteps : Batch {
  using Prob = typename K::Prob;
  using Session = typename K::Session;
  static constexpr int PROBS = sizeof(float) / sizeof(Prob);  // per float
  static constexpr int SPLIT = 1024;                          // keys of one split of a row

  bool padding(int row) const { return call.lens[row] <= 0; }

  int splits(int row, int head, int /*threads*/) const { return std::max(1, length(row, head) / SPLIT); }

  // Floats that a task leaves for join(): e [G, span] if the row is scored, out [G, D], base-2 maximum [G],
  // sum [G].
  int64_t left(const Task& task) const {
    return task.splits == 1 ? 0 : call.group * ((task.scored ? tile_of(task).span : 0) + call.size + 2);
  }

  // Leaves them in `part`; null: writes the output, and adds to the scores.
  void attend(const Task& task, float* part) const {
#ifdef H2O_AMX
    if constexpr (K::matrices) by_matrices(task, part);
    else
#endif
    by_vectors(task, part);
  }

  // After all parts: each split scores its own blocks, the first one also writes the output.
  void join(const Task& task) const {
    if (!task.scored && task.split) return;
    const int g = call.group;
    const Task* siblings = &task - task.split;
    auto tail = [&](int s) { return tail_of(siblings[s], joint + siblings[s].part); };
    auto stat = [&](int s) { return tail(s) + g * call.size; };
    std::vector<float> weight(size_t(task.splits) * g), factor(g), out(size_t(g) * call.size);
    for (int m = 0; m < g; ++m) {
      float best = -INFINITY, total = 0;
      for (int s = 0; s < task.splits; ++s) best = std::max(best, stat(s)[m]);
      for (int s = 0; s < task.splits; ++s)
        total += weight[s * g + m] = std::exp2(stat(s)[m] - best) * stat(s)[g + m];
      total += sink(task, m, best);
      for (int s = 0; s < task.splits; ++s) weight[s * g + m] /= total;
      factor[m] = weight[task.split * g + m] / stat(task.split)[g + m];
    }
    if (task.scored) {
      const Tile<K> tile = tile_of(task);
      float* sums = own(tile.span);
      std::fill_n(sums, tile.span, 0.f);
      tile.normalise(joint + task.part, factor.data(), nullptr, 0, sums);
      tile.add_scores(sums);
    }
    if (task.split) return;
    for (int s = 0; s < task.splits; ++s)
      for (int m = 0; m < g; ++m)
        for (int d = 0; d < call.size; ++d)
          out[m * call.size + d] += weight[s * g + m] * tail(s)[m * call.size + d];
    write<K>(call.starts[task.r], 1, task.head, out.data());
  }

 private:
  Tile<K> tile_of(const Task& task) const {
    const int64_t all = blocks(task);
    const int begin = all * task.split / task.splits, end = all * (task.split + 1) / task.splits;
    const int tokens = std::min(end * call.block, length(task)) - begin * call.block;
    return {layer, pages(task).from(begin), call.group, tokens, int64_t(end - begin) * call.block};
  }
  // The same, which fetches what this thread will probably do next: threads that are equally fast take turns.
  Tile<K> fetching_tile(const Task& task) const {
    Tile<K> tile = tile_of(task);
    if (const Task* next = &task + turns; next < no_task) {
      const Tile<K> other = tile_of(*next);
      tile.then = other.pages;
      tile.then_blocks = other.span / call.block;
    }
    return tile;
  }
  // Behind e, if there is one.
  float* tail_of(const Task& task, float* part) const {
    return part + (task.scored ? call.group * tile_of(task).span : 0);
  }

  void by_vectors(const Task& task, float* part) const {
    const int token = call.starts[task.r], g = call.group;
    const Tile<K> tile = fetching_tile(task);
    float* prob = own(g * (tile.span + 2 * call.size + 3) + tile.span);
    float *sums = prob + g * tile.span, *memory = sums + tile.span, *rest = memory + g * call.size;
    float* e = part && task.scored ? part : prob;  // overlaid where e is not needed afterwards
    float *out = part ? tail_of(task, part) : rest, *top = out + g * call.size, *sum = top + g;
    float* inverse = part ? rest : sum + g;
    tile.logits(queries<K>(token, 1, task.head, memory), e);
    tile.exponentials(e, top, sum);
    // A part knows its own keys only; the sink is for the whole row.
    for (int m = 0; m < g; ++m) inverse[m] = 1 / (sum[m] + (part ? 0 : sink(task, m, top[m])));
    const bool adds = task.scored && !part;
    if (adds) std::fill_n(sums, tile.span, 0.f);
    if (task.scored || !as_is<K>)
      tile.normalise(e, inverse, (Prob*)prob, tile.span * PROBS, adds ? sums : nullptr);
    std::fill_n(out, int64_t(g) * call.size, 0.f);
    tile.values((Prob*)prob, tile.span * PROBS, out);
    if (!task.scored && as_is<K>) multiply(out, g, inverse);
    if (part) return;
    if (adds) tile.add_scores(sums);
    write<K>(token, 1, task.head, out);
  }
#ifdef H2O_AMX
  void by_matrices(const Task& task, float* part) const {
    const int g = call.group, token = call.starts[task.r];
    const Tile<K> tile = fetching_tile(task);
    const FewRows rows{tile};
    const int64_t asked = FewRows::padded_rows(g) * call.size;
    const int64_t words = asked + FewRows::padded_rows(g) * FewRows::padded(tile.span);
    float* e = own(words / 2 + g * (tile.span + call.size + 3));
    uint16_t *q = (uint16_t*)(e + g * tile.span), *prob = q + asked;
    float* rest = (float*)q + words / 2;
    float *out = part ? tail_of(task, part) : rest, *top = out + g * call.size, *sum = top + g;
    float* inverse = part ? rest : sum + g;
    if (part && task.scored) e = part;
    const bool adds = task.scored && !part;
    rows.logits(queries<K>(token, 1, task.head, (float*)q), e, adds);
    tile.exponentials(e, top, sum);
    // A part knows its own keys only; the sink is for the whole row.
    for (int m = 0; m < g; ++m) inverse[m] = 1 / (sum[m] + (part ? 0 : sink(task, m, top[m])));
    rows.probabilities(e, inverse, prob, adds);
    std::fill_n(out, int64_t(g) * call.size, 0.f);
    rows.values(prob, out);
    if (!part) write<K>(token, 1, task.head, out);
  }
#endif
};

}  // namespace
}  // namespace h2o
