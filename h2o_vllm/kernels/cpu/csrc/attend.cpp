// SPDX-License-Identifier: Apache-2.0
// Attention, with scores where they are wanted, for the listed rows of a batch: tasks, threads, memory.
// Called through ctypes.
#include <algorithm>
#include <atomic>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "decode.hpp"
#include "prompt.hpp"

using namespace h2o;

namespace {

thread_local Scratch joint;  // what the splits of one call leave for each other, kept by the calling thread

int threads_available() {
#ifdef _OPENMP
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

// Rows: Prompts or DecodeSteps.
template <class Rows>
void run(const Call& call) {
  Rows rows{{call}};
  int threads = threads_available();
  static thread_local std::vector<Task> kept;
  std::vector<Task>& tasks = kept;  // the one of the calling thread, in all threads
  tasks.clear();
  size_t shared = 0;
  for (int r = 0; r < call.count; ++r) {
    const int row = call.rows[r];
    if (rows.padding(row)) continue;
    const bool scored = r < call.scored;
    for (int head = 0; head < call.heads; ++head) {
      // How a row is split depends on the row and the thread count only: its result must not depend on
      // what else is in the batch.
      const int n = threads == 1 ? 1 : rows.splits(row, head, threads);
      for (int s = 0; s < n; ++s) {
        tasks.push_back({r, row, head, s, n, scored, shared});
        shared += (rows.left(tasks.back()) + 15) / 16 * 16;
      }
    }
  }
  if (tasks.empty()) return;
  const int count = int(tasks.size());
  threads = std::min(threads, count);
  if (shared) rows.joint = joint.get(shared);
  rows.turns = threads, rows.no_task = tasks.data() + count;
  auto attend = [&](const Task& task) {
    rows.attend(task, rows.left(task) ? rows.joint + task.part : nullptr);
  };
  auto join = [&](const Task& task) {
    if (rows.left(task)) rows.join(task);
  };
  if (threads == 1) {
    [[maybe_unused]] typename Rows::Session session;
    for (const Task& task : tasks) attend(task);
    for (const Task& task : tasks) join(task);
    return;
  }
#ifdef _OPENMP
  std::atomic<int> next{0}, then{0};
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] typename Rows::Session session;
    for (int i; (i = next++) < count;) attend(tasks[i]);
    if (shared) {
#pragma omp barrier
      for (int i; (i = then++) < count;) join(tasks[i]);
    }
  }
#endif
}

template <class K>
void attend(const Call& call) {
  if (call.prompt) run<Prompts<K>>(call);
  else run<DecodeSteps<K>>(call);
}

}  // namespace

extern "C" void h2o_attend(const Call* call) {
  switch (call->dtype) {
    case 0: attend<Plain<float>>(*call); break;
#ifdef H2O_PAIRED
    case 1:
#ifdef H2O_AMX
      if (amx::available() && (call->prompt ? PackedRows<Amx>::fit(call->block, call->size, call->group)
                                            : call->group <= FewRows::HALF &&
                                                  FewRows::fit(call->block, call->size, call->group)))
        attend<Amx>(*call);
      else
#endif
      // A prompt is all arithmetic; a decode step waits for memory anyway.
      if (call->prompt) run<Prompts<Pairs>>(*call);
      else run<DecodeSteps<Paired<true>>>(*call);
      break;
#else
    case 1: attend<Plain<bf16>>(*call); break;
#endif
    case 2: attend<Plain<f16>>(*call); break;
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
