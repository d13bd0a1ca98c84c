// SPDX-License-Identifier: Apache-2.0
// Compaction and score reset, all layers in one call: the rule is written down in h2o_vllm/kernels/lanes.py. Called
// through ctypes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace {

// Larger means kept first: the score, then the lower candidate number. NaN ranks with -infinity, and the
// two zeros are equal, as the reference has it.
uint64_t rank(float score, uint32_t candidate) {
  uint32_t u = 0x007fffff;  // -infinity, after the mapping below
  if (score == score) {
    score += 0.0f;
    std::memcpy(&u, &score, 4);
    u = u >> 31 ? ~u : u | 0x80000000u;
  }
  return uint64_t(u) << 32 | ~candidate;
}

template <class Word>
struct Layer {
  Word* cache;
  float* scores;
  int heads, size, block;

  Word* keys(int64_t page) const { return cache + page * 2 * size * block; }

  // A token's K, V and score, from one offset in a page to another.
  void move(int64_t from, int at, int64_t to, int into) const {
    const int64_t half = int64_t(size) * block;
    const Word* source = keys(from);
    Word* target = keys(to);
    for (int d = 0; d < size; ++d) target[d * block + into] = source[d * block + at];
    std::memcpy(target + half + int64_t(into) * size, source + half + int64_t(at) * size, size * sizeof(Word));
    scores[to * block + into] = scores[from * block + at];
  }

  // A token is moved from and to all lines of a page's keys: memory is kept busy only if they are asked for before.
  void fetch(int64_t page) const {
    for (int i = 0; i < size * block; i += 64 / sizeof(Word)) __builtin_prefetch(keys(page) + i);
  }
};

// Of one token: pages, and its places in them.
struct Move {
  int64_t from, to;
  int at, into;
};

// Moves tokens in order; pages are asked for some moves before.
template <class Word>
void carry_out(const Layer<Word>& layer, const std::vector<Move>& moves) {
  constexpr size_t AHEAD = 4;
  for (size_t i = 0; i < moves.size() + AHEAD; ++i) {
    if (i < moves.size()) {
      const Move& next = moves[i];
      if (i == 0 || next.from != moves[i - 1].from) layer.fetch(next.from);
      if (i == 0 || next.to != moves[i - 1].to) layer.fetch(next.to);
    }
    if (i >= AHEAD) layer.move(moves[i - AHEAD].from, moves[i - AHEAD].at, moves[i - AHEAD].to, moves[i - AHEAD].into);
  }
}

struct Eviction {
  const int32_t* order;  // block ids, the first `heavy` of which are written
  int heavy, total;
};

struct Head {
  std::vector<int64_t> pages;   // candidates: those in heavy blocks, then those in doomed ones
  std::vector<uint64_t> ranks;  // of their tokens
  int owned = 0;                // of the pages, the first ones, in heavy blocks
  int wanted = 0;               // of its tokens: among the best of all heads
  int lanes = 1;                // that it gets
};

// The n-th largest; no two are equal. They are counted by their first bits, and looked at where it must lie.
uint64_t nth(const std::vector<uint64_t>& ranks, int64_t n) {
  constexpr int BITS = 12;
  std::vector<int32_t> counts(1 << BITS);
  for (uint64_t rank : ranks) ++counts[rank >> (64 - BITS)];
  size_t bucket = counts.size() - 1;
  for (; counts[bucket] < n; --bucket) n -= counts[bucket];
  std::vector<uint64_t> near;
  near.reserve(counts[bucket]);
  for (uint64_t rank : ranks)
    if (rank >> (64 - BITS) == bucket) near.push_back(rank);
  std::nth_element(near.begin(), near.begin() + n - 1, near.end(), std::greater<uint64_t>());
  return near[n - 1];
}

// Gives each head its lanes, `total` in all.
void share(std::vector<Head>& heads, int64_t total, int block) {
  if (heads.size() == 1) {
    heads[0].lanes = int(total);
    return;
  }
  std::vector<uint64_t> all;
  for (const Head& head : heads) all.insert(all.end(), head.ranks.begin(), head.ranks.end());
  const uint64_t bar = nth(all, total * block);
  for (Head& head : heads)
    for (uint64_t rank : head.ranks) head.wanted += rank >= bar;
  auto need = [&](const Head& head) { return head.wanted - head.lanes * block; };
  for (int64_t left = total - int64_t(heads.size()); left > 0; --left) {
    Head* neediest = &heads[0];
    for (Head& head : heads)
      if (need(head) > need(*neediest)) neediest = &head;
    ++neediest->lanes;
  }
}

// Compacts lanes of some blocks, `count` of each from `first` on, which as many heads share. Null `owners`: each is
// head 0's.
template <class Word>
void compact_group(const Layer<Word>& layer, const Eviction& eviction, int first, int count, const int32_t* owners,
                   int32_t* now) {
  const int block = layer.block;
  std::vector<Head> heads(count);
  for (int b = 0; b < eviction.total; ++b)
    for (int lane = 0; lane < count; ++lane) {
      Head& head = heads[owners ? owners[b * count + lane] : 0];
      head.pages.push_back(int64_t(eviction.order[b]) * layer.heads + first + lane);
      head.owned += b < eviction.heavy;
    }
  uint32_t candidate = 0;
  for (Head& head : heads) {
    head.ranks.reserve(head.pages.size() * block);
    for (int64_t page : head.pages)
      for (int i = 0; i < block; ++i) head.ranks.push_back(rank(layer.scores[page * block + i], candidate++));
  }
  share(heads, int64_t(eviction.heavy) * count, block);

  // Which lanes each head has then: of its own the first, and what others give up, in order.
  std::vector<int64_t> given_up;
  for (const Head& head : heads)
    for (int p = head.lanes; p < head.owned; ++p) given_up.push_back(head.pages[p]);
  auto set_owner = [&](int64_t page, int head) {
    const int32_t* end = eviction.order + eviction.heavy;
    now[(std::find(eviction.order, end, int32_t(page / count)) - eviction.order) * count + page % count] = head;
  };
  size_t next = 0;
  // Heads that give lanes up move what is in them to those that they keep; the others fill them from doomed blocks.
  for (bool gains : {false, true})
    for (int h = 0; h < count; ++h) {
      const Head& head = heads[h];
      if (gains != (head.lanes > head.owned)) continue;
      const int kept = std::min(head.owned, head.lanes);
      std::vector<int64_t> mine(head.pages.begin(), head.pages.begin() + kept);
      while (int(mine.size()) < head.lanes) mine.push_back(given_up[next++]);
      if (now)
        for (int64_t page : mine) set_owner(page, h);
      const uint64_t bar = nth(head.ranks, int64_t(head.lanes) * block);
      const int64_t room = int64_t(kept) * block;
      int64_t target = 0;
      std::vector<Move> moves;
      for (size_t p = kept; p < head.pages.size(); ++p)
        for (int at = 0; at < block; ++at) {
          if (head.ranks[p * block + at] < bar) continue;
          while (target < room && head.ranks[target] >= bar) ++target;
          moves.push_back({head.pages[p], mine[target / block], at, int(target % block)});
          ++target;
        }
      carry_out(layer, moves);
    }
}

template <class Word>
void compact(void* const* caches, float* scores, const Eviction& eviction, const int32_t* owners, int32_t* now,
             int layers, int64_t blocks, int heads, int size, int block) {
  const int groups = owners ? 1 : heads, count = heads / groups;
#pragma omp parallel for schedule(dynamic) if (layers * groups > 1 && count * eviction.total * block > 256)
  for (int i = 0; i < layers * groups; ++i) {
    const int64_t at = i / groups;
    const Layer<Word> layer{(Word*)caches[at], scores + at * blocks * heads * block, heads, size, block};
    compact_group(layer, eviction, i % groups, count, owners ? owners + at * eviction.total * heads : nullptr,
                  owners ? now + at * eviction.heavy * heads : nullptr);
  }
}

}  // namespace

// caches: L pointers to [N, KH, 2 * D * BS] words of `width` bytes; scores: [L, N, KH, BS];
// order: [total] block ids, the first `heavy` of which are written; owners: [L, total, KH], the head of each lane;
// now: [L, heavy, KH], its head then; both null: each lane is that of its own head, and stays so.
extern "C" void h2o_compact(void* const* caches, float* scores, const int32_t* order, int heavy, int total,
                            const int32_t* owners, int32_t* now, int layers, int64_t blocks, int heads, int size,
                            int block, int width) {
  const auto run = width == 2 ? compact<uint16_t> : compact<uint32_t>;
  run(caches, scores, {order, heavy, total}, owners, now, layers, blocks, heads, size, block);
}

// slots: [n], block_id * BS + offset, negative ones skipped.
extern "C" void h2o_reset(float* scores, const int64_t* slots, int64_t n, int layers, int64_t blocks, int heads,
                          int block) {
  for (int layer = 0; layer < layers; ++layer)
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] < 0) continue;
      float* to = scores + (layer * blocks + slots[i] / block) * heads * block + slots[i] % block;
      for (int head = 0; head < heads; ++head) to[head * block] = 0.f;
    }
}
