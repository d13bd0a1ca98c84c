// SPDX-License-Identifier: Apache-2.0
// Compaction where the heads of a layer share its heavy slots, all layers in one call: the rule is written down in
// h2o_vllm/kernels/lanes.py. Called through ctypes.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "candidates.hpp"

namespace {

using namespace h2o;

template <class Word>
struct Layer {
  Word* cache;
  float* scores;
  int heads, size, block;

  Word* page(int64_t id) const { return cache + id * 2 * size * block; }
};

struct Head {
  std::vector<int64_t> pages;   // candidates: those in heavy blocks, then those in doomed ones
  std::vector<uint64_t> ranks;  // of their tokens
  int owned = 0;                // of the pages, the first ones, in heavy blocks
  int wanted = 0;               // of its tokens: among the best of all heads
  int lanes = 1;                // that it gets
  uint64_t bar = 0;             // rank of the worst that it keeps
};

// The n-th largest.
uint64_t nth(std::vector<uint64_t> ranks, int64_t n) {
  std::nth_element(ranks.begin(), ranks.begin() + n - 1, ranks.end(), std::greater<uint64_t>());
  return ranks[n - 1];
}

// Gives each head its lanes, `total` in all.
void share(std::vector<Head>& heads, int64_t total, int block) {
  std::vector<uint64_t> all;
  for (const Head& head : heads) all.insert(all.end(), head.ranks.begin(), head.ranks.end());
  const uint64_t bar = nth(std::move(all), total * block);
  for (Head& head : heads)
    for (uint64_t rank : head.ranks) head.wanted += rank >= bar;
  auto need = [&](const Head& head) { return head.wanted - head.lanes * block; };
  for (int64_t left = total - int64_t(heads.size()); left > 0; --left) {
    Head* neediest = &heads[0];
    for (Head& head : heads)
      if (need(head) > need(*neediest)) neediest = &head;
    ++neediest->lanes;
  }
  for (Head& head : heads) head.bar = nth(head.ranks, int64_t(head.lanes) * block);
}

template <class Word>
void compact_layer(const Layer<Word>& layer, const int32_t* order, int heavy, int total, const int32_t* owners,
                   int32_t* now) {
  const int block = layer.block, count = layer.heads, size = layer.size;
  std::vector<Head> heads(count);
  for (int b = 0; b < total; ++b)
    for (int lane = 0; lane < count; ++lane) {
      Head& head = heads[owners[b * count + lane]];
      head.pages.push_back(int64_t(order[b]) * count + lane);
      head.owned += b < heavy;
    }
  uint32_t candidate = 0;
  for (Head& head : heads)
    for (int64_t page : head.pages)
      for (int i = 0; i < block; ++i) head.ranks.push_back(rank(layer.scores[page * block + i], candidate++));
  share(heads, int64_t(heavy) * count, block);

  // Which lanes each head has then: of its own the first, and what others give up, in order.
  std::vector<int64_t> given_up;
  for (const Head& head : heads)
    for (int p = head.lanes; p < head.owned; ++p) given_up.push_back(head.pages[p]);
  auto set_owner = [&](int64_t page, int head) {
    const int b = int(std::find(order, order + heavy, int32_t(page / count)) - order);
    now[b * count + page % count] = head;
  };

  struct Move {
    int64_t from, to;  // page * block + slot
  };
  std::vector<Move> moves;
  size_t next = 0;
  for (int h = 0; h < count; ++h) {
    const Head& head = heads[h];
    const int kept = std::min(head.owned, head.lanes);
    std::vector<int64_t> mine(head.pages.begin(), head.pages.begin() + kept);
    while (int(mine.size()) < head.lanes) mine.push_back(given_up[next++]);
    for (int64_t page : mine) set_owner(page, h);
    int64_t target = 0;
    for (size_t c = size_t(kept) * block; c < head.ranks.size(); ++c) {
      if (head.ranks[c] < head.bar) continue;
      while (target < int64_t(kept) * block && head.ranks[target] >= head.bar) ++target;
      moves.push_back({head.pages[c / block] * block + int64_t(c % block), mine[target / block] * block + target % block});
      ++target;
    }
  }

  // What moves may lie where something else is moved to: all is read before anything is written.
  std::vector<Word> tokens(moves.size() * 2 * size);
  std::vector<float> scores(moves.size());
  Word* at = tokens.data();
  for (size_t m = 0; m < moves.size(); ++m, at += 2 * size) {
    const Word *page = layer.page(moves[m].from / block), *values = page + int64_t(size) * block;
    const int slot = int(moves[m].from % block);
    for (int d = 0; d < size; ++d) at[d] = page[d * block + slot];
    std::copy_n(values + int64_t(slot) * size, size, at + size);
    scores[m] = layer.scores[moves[m].from];
  }
  at = tokens.data();
  for (size_t m = 0; m < moves.size(); ++m, at += 2 * size) {
    Word *page = layer.page(moves[m].to / block), *values = page + int64_t(size) * block;
    const int slot = int(moves[m].to % block);
    for (int d = 0; d < size; ++d) page[d * block + slot] = at[d];
    std::copy_n(at + size, size, values + int64_t(slot) * size);
    layer.scores[moves[m].to] = scores[m];
  }
}

}  // namespace

// As h2o_compact; owners: [L, total, KH], whose lane each is; now: [L, heavy, KH], whose it is then.
extern "C" void h2o_compact_shared(void* const* caches, float* scores, const int32_t* order, int heavy, int total,
                                   const int32_t* owners, int32_t* now, int layers, int64_t blocks, int heads,
                                   int size, int block, int width) {
#pragma omp parallel for schedule(dynamic) if (layers > 1 && heads * total * block > 256)
  for (int layer = 0; layer < layers; ++layer) {
    float* mine = scores + layer * blocks * heads * block;
    const int32_t* before = owners + int64_t(layer) * total * heads;
    int32_t* after = now + int64_t(layer) * heavy * heads;
    if (width == 2)
      compact_layer<uint16_t>({(uint16_t*)caches[layer], mine, heads, size, block}, order, heavy, total, before, after);
    else
      compact_layer<uint32_t>({(uint32_t*)caches[layer], mine, heads, size, block}, order, heavy, total, before, after);
  }
}
