// SPDX-License-Identifier: Apache-2.0
// Attention, with scores where they are wanted, for the listed rows of a batch: tasks, threads, memory. Called through ctypes.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "few.hpp"
#include "packed.hpp"
#include "tile.hpp"

using namespace h2o;

// Mirrored field by field in cpp.py.
struct Call {
  const void* query;                 // [T, H, D], stride query_stride elements along T
  const void* cache;
  float* scores;
  const int32_t* table;              // [B, MB], stride table_stride
  const int32_t* lens;               // [B]
  const int32_t* starts;             // decode: [R] token of each listed row; prompt: [B + 1]
  const int32_t* rows;               // [R]; the first `scored` of them add to the scores
  void* out;                         // [T, H, D] or null
  const float* sinks;                // [H] logits of no key, or null
  const int32_t* lane_rows;          // [B] where a row's lanes stand in the next three, or -1; null: no row has any
  const int32_t* lane_pages;         // [S, KH, MP], stride lane_stride
  const int32_t* lane_counts;        // [S, KH]
  const int32_t* lane_heavy;         // [S] so many first blocks of the row's table hold its lanes
  int64_t query_stride, out_stride, table_stride, lane_stride;
  int32_t count, scored, heads, group, size, block, dtype, prompt;
  float scale, softcap;              // softcap: 0 for none
};

namespace {

constexpr int64_t TILE_FLOATS = 3 << 16;  // logits of one tile: 768 KiB, most of a 1 MiB L2
constexpr int DECODE_SPLIT = 1024;         // keys of one split of a row
constexpr int PROMPT_SPLIT = 128;          // queries of one split, at least
constexpr int RUN = 256;                   // keys between two looks at the maximum, where no scores are kept
constexpr int RUN_ROWS = 96;               // query rows of such a tile

thread_local Scratch own;   // one tile
thread_local Scratch joint; // what the splits of one call leave for each other, kept by the calling thread

int threads_available() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

struct Task {
  int r, row, head;    // listed row, batch row, kv head
  int split, splits;   // of this (row, kv head)
  bool scored;
  size_t part;         // where in `joint` what it leaves for join() lies
};

template <class K>
struct Attend {
  using T = typename K::Cache;
  using Query = typename K::Query;
  using Prob = typename K::Prob;
  static constexpr int PROBS = sizeof(float) / sizeof(Prob);  // per float

  const Call& call;
  Layer layer{(const char*)call.cache, call.scores, call.heads, call.group, call.size, call.block, call.scale,
              call.softcap};

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
  const T* query(int token, int head, int m) const {
    return (const T*)call.query + (token + m / call.group) * call.query_stride + query_head(head, m) * call.size;
  }
  T* output(int token, int head, int m) const {
    return (T*)call.out + (token + m / call.group) * call.out_stride + query_head(head, m) * call.size;
  }
  int64_t query_head(int head, int m) const { return head * call.group + m % call.group; }
  const Query* queries(int token, int tokens, int head, float* memory) const {
    Query* to = (Query*)memory;
    for (int m = 0; m < tokens * call.group; ++m)
      K::pack_query(query(token, head, m), to + int64_t(m) * call.size, call.size);
    return to;
  }
  void write(int token, int tokens, int head, const float* from) const {
    for (int m = 0; m < tokens * call.group; ++m) {
      T* to = output(token, head, m);
      const float* row = from + int64_t(m) * call.size;
      for (int d = 0; d < call.size; ++d) narrow(row[column(d, call.size, K::shuffled)], to + d);
    }
  }

  // What the sink of a head adds to the sum of exponentials of row m, given their base-2 maximum `top`. A sink far
  // above all logits makes it infinite, and every probability 0.
  float sink(const Task& task, int m, float top) const {
    return call.sinks ? std::exp2(call.sinks[query_head(task.head, m)] * LOG2E - top) : 0.f;
  }

  // Whether exponentials have the type that V is multiplied with. Where the probabilities are not wanted
  // the output is then divided by their sum instead: a pass over the logits less.
  static constexpr bool as_is = std::is_same_v<Prob, float>;
  void multiply(float* out, int rows, const float* by) const {
    for (int m = 0; m < rows; ++m)
      for (int d = 0; d < call.size; ++d) out[int64_t(m) * call.size + d] *= by[m];
  }

  // ---- prompt: a split is a run of the row's queries; each of its tiles sees all keys up to its own.
  // Part: the split's column sums (or maxima) [S], if the row is scored.

  int prompt_queries(int row) const { return call.starts[row + 1] - call.starts[row]; }
  int prompt_step(const Task& task) const {
#ifdef H2O_PAIRED
    if constexpr (K::packs)
      if (packs(task)) {
        const int rows = PackedRows<K>::most(blocks(task) * call.block, task.scored);
        return std::min(prompt_queries(task.row), std::max(1, rows / call.group));
      }
#endif
    const int64_t fitting = std::clamp<int64_t>(TILE_FLOATS / (blocks(task) * call.block), 12, 96);
    const int64_t rows = task.scored ? fitting : RUN_ROWS;
    return std::min<int64_t>(prompt_queries(task.row), std::max<int64_t>(1, rows / call.group));
  }
  // First query of a split, such that all splits see about the same number of keys.
  int cut(const Task& task, int split) const {
    const double n = prompt_queries(task.row), before = length(task) - n;
    const double area = (before * n + n * n / 2) * split / task.splits;
    const int at = int(std::sqrt(before * before + 2 * area) - before), step = prompt_step(task);
    return split == task.splits ? int(n) : std::min(int(n), (at + step / 2) / step * step);
  }

  void prompt_part(const Task& task, float* part) const {
    const int n = prompt_queries(task.row), length = this->length(task), step = prompt_step(task);
    const int64_t span = blocks(task) * call.block, most = step * call.group;
    float* e = own.get(most * (span + 2 * call.size + 3) + span);
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
      tile.logits(queries(token, here, task.head, memory), e);
      tile.exponentials(e, top, sum);
      for (int m = 0; m < tile.rows; ++m) inverse[m] = 1 / (sum[m] + sink(task, m, top[m]));
      tile.normalise(e, inverse, call.out ? (Prob*)e : nullptr, span * PROBS, sums);
      if (!call.out) continue;
      std::fill_n(out, int64_t(tile.rows) * call.size, 0.f);
      tile.values((Prob*)e, span * PROBS, out);
      write(token, here, task.head, out);
    }
    if (!part) prompt_join(task, sums);
  }
  // Where the column sums are not wanted: run by run, with maximum, sum and output of the runs so far, as
  // FlashAttention (arXiv 2205.14135). Logits of many rows stay in L2, whatever the length.
  void prompt_alone(const Task& task) const {
    const int n = prompt_queries(task.row), length = this->length(task), step = prompt_step(task);
    const int64_t span = std::max(1, RUN / call.block) * call.block, most = step * call.group;
    float* e = own.get(most * (span + 2 * call.size + 3));
    float *memory = e + most * span, *out = memory + most * call.size;
    float *top = out + most * call.size, *sum = top + most, *factor = sum + most;
    const Pages all = pages(task);
    const int end = cut(task, task.split + 1);
    for (int t = cut(task, task.split); t < end; t += step) {
      const int here = std::min(step, end - t), token = call.starts[task.row] + t, rows = here * call.group;
      const int first_limit = length - n + t + 1, keys = first_limit + here - 1;
      const Query* q = queries(token, here, task.head, memory);
      std::fill_n(out, int64_t(rows) * call.size, 0.f);
      std::fill_n(top, rows, -INFINITY);
      std::fill_n(sum, rows, 0.f);
      std::fill_n(factor, rows, 1.f);
      for (int k = 0; k < keys; k += span) {
        const Tile<K> tile{layer, all.from(k / call.block), rows, first_limit - k, span, int(span)};
        tile.logits(q, e);
        tile.exponentials(e, top, sum, out);
        if (!as_is) tile.normalise(e, factor, (Prob*)e, span * PROBS, nullptr);
        tile.values((Prob*)e, span * PROBS, out);
      }
      for (int m = 0; m < rows; ++m) factor[m] = 1 / (sum[m] + sink(task, m, top[m]));
      multiply(out, rows, factor);
      write(token, here, task.head, out);
    }
  }
#ifdef H2O_AMX
  bool few(const Task& task) const {
    return call.out && !task.scored && FewRows::fit(call.block, call.size, prompt_queries(task.row) * call.group);
  }
#endif
#ifdef H2O_PAIRED
  bool packs(const Task& task) const {
    return PackedRows<K>::fit(call.block, call.size, call.group) && prompt_queries(task.row) * call.group >= K::FEWEST;
  }
  // With the column sums or without, of packed keys and values.
  void prompt_packed(const Task& task, float* part) const {
    const int n = prompt_queries(task.row), length = this->length(task);
    const int end = cut(task, task.split + 1), keys = length - n + end, step = prompt_step(task);
    const Tile<K> tile{layer, pages(task)};
    const Packed packed = Packed::of([&](int b) { return tile.page(b); }, keys, call.block, call.size);
    PackedRows<K> rows(layer, packed, call.out, task.scored, keys);
    const int64_t span = blocks(task) * call.block, most = rows.padded(step * call.group);
    float *memory = own.get(most * (call.size + 1) + span), *inverse = memory + most * call.size;
    float* sums = part ? part : inverse + most;
    if (task.scored) std::fill_n(sums, span, 0.f);
    for (int t = cut(task, task.split); t < end; t += step) {
      const int here = std::min(step, end - t), token = call.starts[task.row] + t;
      rows.rows = here * call.group;
      rows.first_limit = length - n + t + 1;
      Query* q = (Query*)memory;
      for (int m = 0; m < rows.rows; ++m)
        K::place_query(query(token, task.head, m), q, m, call.size);
      rows.attend(q);
      for (int m = 0; m < rows.rows; ++m) inverse[m] = 1 / (rows.sum[m] + sink(task, m, rows.top[m]));
      if (task.scored) rows.add_columns(inverse, sums);
      for (int m = 0; m < rows.rows && call.out; ++m)
        rows.write(m, inverse[m], output(token, task.head, m));
    }
    if (task.scored && !part) prompt_join(task, sums);
  }
#endif
  void prompt_join(const Task& task, const float* sums) const {
    Tile<K>{layer, pages(task), call.group, length(task), 0}.add_scores(sums);
  }

  // ---- decode: a split is a run of the row's blocks, attended to as if there were no others.
  // Part: e [G, span] if the row is scored, out [G, D], base-2 maximum [G], sum [G].

  Tile<K> decode_tile(const Task& task) const {
    const int64_t all = blocks(task);
    const int begin = all * task.split / task.splits, end = all * (task.split + 1) / task.splits;
    const int tokens = std::min(end * call.block, length(task)) - begin * call.block;
    return {layer, pages(task).from(begin), call.group, tokens, int64_t(end - begin) * call.block};
  }

  // The same, which fetches what this thread will probably do next: threads that are equally fast take tasks by turns.
  Tile<K> fetching_tile(const Task& task) const {
    Tile<K> tile = decode_tile(task);
    if (const Task* next = &task + turns; next < no_task) {
      const Tile<K> other = decode_tile(*next);
      tile.then = other.pages;
      tile.then_blocks = other.span / call.block;
    }
    return tile;
  }

  void decode_part(const Task& task, float* part) const {
    const int token = call.starts[task.r], g = call.group;
    const Tile<K> tile = fetching_tile(task);
    float* prob = own.get(g * (tile.span + 2 * call.size + 3) + tile.span);
    float *sums = prob + g * tile.span, *memory = sums + tile.span, *rest = memory + g * call.size;
    float* e = part && task.scored ? part : prob;  // overlaid where e is not needed afterwards
    float *out = part ? tail_of(task, part) : rest, *top = out + g * call.size, *sum = top + g;
    float* inverse = part ? rest : sum + g;
    tile.logits(queries(token, 1, task.head, memory), e);
    tile.exponentials(e, top, sum);
    // A part knows its own keys only; the sink is for the whole row.
    for (int m = 0; m < g; ++m) inverse[m] = 1 / (sum[m] + (part ? 0 : sink(task, m, top[m])));
    const bool adds = task.scored && !part;
    if (adds) std::fill_n(sums, tile.span, 0.f);
    if (task.scored || !as_is) tile.normalise(e, inverse, (Prob*)prob, tile.span * PROBS, adds ? sums : nullptr);
    std::fill_n(out, int64_t(g) * call.size, 0.f);
    tile.values((Prob*)prob, tile.span * PROBS, out);
    if (!task.scored && as_is) multiply(out, g, inverse);
    if (part) return;
    if (adds) tile.add_scores(sums);
    write(token, 1, task.head, out);
  }

  // The same by matrices, and prompt_alone() of few queries.
  void decode_by_matrices(const Task& task, float* part) const;
  void prompt_by_matrices(const Task& task) const;

  // Behind e, if there is one.
  float* tail_of(const Task& task, float* part) const {
    return part + (task.scored ? call.group * decode_tile(task).span : 0);
  }

  // After all parts: each split scores its own blocks, the first one also writes the output.
  void decode_join(const Task& task, const Task* siblings) const {
    if (!task.scored && task.split) return;
    const int g = call.group;
    float* shared = joint_data;
    auto tail = [&](int s) { return tail_of(siblings[s], shared + siblings[s].part); };
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
      const Tile<K> tile = decode_tile(task);
      float* sums = own.get(tile.span);
      std::fill_n(sums, tile.span, 0.f);
      tile.normalise(shared + task.part, factor.data(), nullptr, 0, sums);
      tile.add_scores(sums);
    }
    if (task.split) return;
    for (int s = 0; s < task.splits; ++s)
      for (int m = 0; m < g; ++m)
        for (int d = 0; d < call.size; ++d) out[m * call.size + d] += weight[s * g + m] * tail(s)[m * call.size + d];
    write(call.starts[task.r], 1, task.head, out.data());
  }

  // ---- both ----

  float* joint_data = nullptr;
  const Task* no_task = nullptr;  // behind the last one
  int turns = 1;                  // threads that take one after the other

  // How a row is split depends on the row and the thread count only: its result must not depend on
  // what else is in the batch.
  int splits(int row, int head, int threads) const {
    if (threads == 1) return 1;
    // A split packs its keys, so there are no more than keep the threads busy.
    const int most = K::packs ? (8 * threads + call.heads - 1) / call.heads : 4 * threads;
    if (call.prompt) return std::clamp(prompt_queries(row) / PROMPT_SPLIT, 1, most);
    return std::max(1, length(row, head) / DECODE_SPLIT);
  }

  void run() {
    int threads = threads_available();
    static thread_local std::vector<Task> kept;
    std::vector<Task>& tasks = kept;  // the one of the calling thread, in all threads
    tasks.clear();
    size_t shared = 0;
    for (int r = 0; r < call.count; ++r) {
      const int row = call.rows[r];
      if (call.lens[row] <= 0 || (call.prompt && prompt_queries(row) <= 0)) continue;  // padding
      const bool scored = r < call.scored;
      for (int head = 0; head < call.heads; ++head)
        for (int s = 0, n = splits(row, head, threads); s < n; ++s) {
          tasks.push_back({r, row, head, s, n, scored, shared});
          if (n == 1 || (call.prompt && !scored)) continue;
          const int64_t span = call.prompt ? blocks(tasks.back()) * call.block : decode_tile(tasks.back()).span;
          const int64_t floats = call.prompt ? span : call.group * ((scored ? span : 0) + call.size + 2);
          shared += (floats + 15) / 16 * 16;
        }
    }
    if (tasks.empty()) return;
    if (shared) joint_data = joint.get(shared);
    auto part = [&](const Task& task) {
      const bool joins = task.splits > 1 && (task.scored || !call.prompt);
      float* mine = joins ? joint_data + task.part : nullptr;
#ifdef H2O_AMX
      if constexpr (K::matrices)
        if (call.prompt && few(task)) return prompt_by_matrices(task);
#endif
#ifdef H2O_PAIRED
      if constexpr (K::packs)
        if (call.prompt && packs(task)) return prompt_packed(task, mine);
#endif
      if constexpr (K::matrices)
        if (!call.prompt) return decode_by_matrices(task, mine);
      if (call.prompt && !task.scored) prompt_alone(task);
      else if (call.prompt) prompt_part(task, mine);
      else decode_part(task, mine);
    };
    auto join = [&](const Task& task) {
      if (task.splits == 1 || (call.prompt && !task.scored)) return;
      if (!call.prompt) decode_join(task, &task - task.split);
      else if (task.split == 0)  // in order, so that the sum is the same every time
        for (int s = 0; s < task.splits; ++s) prompt_join(task, joint_data + (&task)[s].part);
    };
    const int count = int(tasks.size());
    threads = std::min(threads, count);
    turns = threads, no_task = tasks.data() + count;
    if (threads == 1) {
      [[maybe_unused]] typename K::Session session;
      for (const Task& task : tasks) part(task);
      for (const Task& task : tasks) join(task);
      return;
    }
#ifdef _OPENMP
    std::atomic<int> next{0}, then{0};
#pragma omp parallel num_threads(threads)
    {
      [[maybe_unused]] typename K::Session session;
      for (int i; (i = next++) < count;) part(tasks[i]);
      if (shared) {
#pragma omp barrier
        for (int i; (i = then++) < count;) join(tasks[i]);
      }
    }
#endif
  }
};

#ifdef H2O_AMX
template <>
void Attend<Amx>::decode_by_matrices(const Task& task, float* part) const {
  const int g = call.group, token = call.starts[task.r];
  const Tile<Amx> tile = fetching_tile(task);
  const FewRows rows{tile};
  const int64_t asked = FewRows::padded_rows(g) * call.size;
  const int64_t words = asked + FewRows::padded_rows(g) * FewRows::padded(tile.span);
  float* e = own.get(words / 2 + g * (tile.span + call.size + 3));
  uint16_t *q = (uint16_t*)(e + g * tile.span), *prob = q + asked;
  float* rest = (float*)q + words / 2;
  float *out = part ? tail_of(task, part) : rest, *top = out + g * call.size, *sum = top + g;
  float* inverse = part ? rest : sum + g;
  if (part && task.scored) e = part;
  const bool adds = task.scored && !part;
  rows.logits(queries(token, 1, task.head, (float*)q), e, adds);
  tile.exponentials(e, top, sum);
  // A part knows its own keys only; the sink is for the whole row.
  for (int m = 0; m < g; ++m) inverse[m] = 1 / (sum[m] + (part ? 0 : sink(task, m, top[m])));
  rows.probabilities(e, inverse, prob, adds);
  std::fill_n(out, int64_t(g) * call.size, 0.f);
  rows.values(prob, out);
  if (!part) write(token, 1, task.head, out);
}

template <>
void Attend<Amx>::prompt_by_matrices(const Task& task) const {
  const int n = prompt_queries(task.row), token = call.starts[task.row], rows = n * call.group;
  const int length = this->length(task), step = std::max(1, DECODE_SPLIT / call.block);
  const int64_t span = int64_t(step) * call.block, asked = FewRows::padded_rows(rows) * call.size;
  const int64_t words = asked + FewRows::padded_rows(rows) * FewRows::padded(span);
  float* e = own.get(words / 2 + rows * (span + call.size + 3));
  uint16_t *q = (uint16_t*)(e + rows * span), *prob = q + asked;
  float *out = (float*)q + words / 2, *top = out + rows * call.size, *sum = top + rows, *inverse = sum + rows;
  queries(token, n, task.head, (float*)q);
  std::fill_n(out, int64_t(rows) * call.size, 0.f);
  std::fill_n(top, rows, -INFINITY);
  std::fill_n(sum, rows, 0.f);
  const Pages all = pages(task);
  for (int b = 0, count = int(blocks(task)); b < count; b += step) {
    const int seen = length - n + 1 - b * call.block, behind = std::max(0, count - b - step);
    const Tile<Amx> tile{layer, all.from(b), rows, seen, span, int(span), all.from(b + step), behind};
    const FewRows few{tile};
    few.logits(q, e, false);
    tile.exponentials(e, top, sum, out);
    few.probabilities(e, nullptr, prob, false);
    few.values(prob, out);
  }
  for (int m = 0; m < rows; ++m) inverse[m] = 1 / (sum[m] + sink(task, m, top[m]));
  multiply(out, rows, inverse);
  write(token, n, task.head, out);
}
#endif

}  // namespace

extern "C" void h2o_attend(const Call* call) {
  switch (call->dtype) {
    case 0: Attend<Plain<float>>{*call}.run(); break;
#ifdef H2O_PAIRED
    case 1:
#ifdef H2O_AMX
      if (amx::available() && (call->prompt ? PackedRows<Amx>::fit(call->block, call->size, call->group)
                                            : call->group <= FewRows::HALF &&
                                                  FewRows::fit(call->block, call->size, call->group)))
        Attend<Amx>{*call}.run();
      else
#endif
      // A prompt is all arithmetic; a decode step waits for memory anyway.
      if (call->prompt) Attend<Pairs>{*call}.run();
      else Attend<Paired<true>>{*call}.run();
      break;
#else
    case 1: Attend<Plain<bf16>>{*call}.run(); break;
#endif
    case 2: Attend<Plain<f16>>{*call}.run(); break;
  }
}

extern "C" const char* h2o_isa() {
#if defined(H2O_EMULATE_AMX) && defined(H2O_AMX)
  return "AMX, emulated";
#endif
#if defined(H2O_AMX)
  if (amx::available()) return "AMX";
#endif
#if defined(H2O_PAIRED)
  return "AVX512-BF16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "portable";
#endif
}

extern "C" int h2o_threads() { return threads_available(); }
