// SPDX-License-Identifier: Apache-2.0
// Prompts on AMX: products of 16 x 32 by 32 x 16 bfloat16 in eight registers of 16 rows, 64 bytes each.
// What they are called here: matrices. (A tile is what tile.hpp says.)
//
// H2O_EMULATE_AMX replaces the registers by memory, so that all but these few instructions is tested on
// CPUs that have AVX512-BF16 only.
#pragma once
#include "pairs.hpp"

#if defined(H2O_PAIRED) && ((defined(__AMX_TILE__) && defined(__AMX_BF16__)) || defined(H2O_EMULATE_AMX))
#define H2O_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#include <type_traits>

namespace h2o {
namespace amx {

constexpr int SIDE = 16;   // rows of a matrix, floats of a row
constexpr int DEPTH = 32;  // bfloat16 of a row

#if defined(H2O_EMULATE_AMX)

inline thread_local uint8_t registers[8][SIDE][64];

struct Session {};
inline bool available() { return true; }

template <int R> void zero() { std::memset(registers[R], 0, sizeof registers[R]); }
template <int R> void load(const void* from, int64_t stride) {
  for (int i = 0; i < SIDE; ++i) std::memcpy(registers[R][i], (const char*)from + i * stride, 64);
}
template <int R> void save(void* to, int64_t stride) {
  for (int i = 0; i < SIDE; ++i) std::memcpy((char*)to + i * stride, registers[R][i], 64);
}
template <int C, int A, int B> void multiply() {
  float(*c)[SIDE] = (float(*)[SIDE])registers[C];
  const bf16(*a)[DEPTH] = (const bf16(*)[DEPTH])registers[A], (*b)[DEPTH] = (const bf16(*)[DEPTH])registers[B];
  for (int m = 0; m < SIDE; ++m)
    for (int n = 0; n < SIDE; ++n)
      for (int k = 0; k < DEPTH; ++k) c[m][n] += widen(a[m][k]) * widen(b[k / 2][2 * n + k % 2]);
}

#else

struct alignas(64) Shape {  // the operand of LDTILECFG
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

// All registers whole, as long as it lives; then as other code on this thread had them.
class Session {
 public:
  Session() {
    Shape ours;
    ours.palette = 1;
    for (int r = 0; r < 8; ++r) ours.bytes[r] = 64, ours.rows[r] = SIDE;
    asm volatile("sttilecfg %0" : "=m"(before_)::"memory");
    asm volatile("ldtilecfg %0" ::"m"(ours) : "memory");
  }
  ~Session() {
    if (before_.palette) asm volatile("ldtilecfg %0" ::"m"(before_) : "memory");
    else asm volatile("tilerelease" ::: "memory");
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
 private:
  Shape before_;
};

// Linux gives the registers' state to processes that ask; for all their threads.
inline bool available() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool yes = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return yes;
}

template <int R> H2O_INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(R)); }
template <int R> H2O_INLINE void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R> H2O_INLINE void save(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
}
template <int C, int A, int B> H2O_INLINE void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace amx

// Outputs, as Paired's, keep the order of column().
struct Amx : Pairs {
  using Session = amx::Session;
  static constexpr bool matrices = true;
  static constexpr int ROWS = 2 * amx::SIDE;  // query rows of two matrices
  static constexpr int FEWEST = 1;
  static constexpr int64_t KEPT = 3 << 18;    // of an L2 of 2 MiB

  static void place_query(const bf16* q, Query* to, int m, int size) { pack_query(q, to + int64_t(m) * size, size); }

  // out[m][0 .. block) = q[m] . k^T for m in [first, last), whole ROWS;  k: [size / 2, block] pairs.
  static void logits(const Query* q, const uint32_t* k, int first, int last, int block, int size, float* out,
                     int64_t span) {
    for (int m = first; m < last; m += ROWS)
      for (int c = 0; c < block; c += 2 * amx::SIDE) {
        amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
        for (int d = 0; d < size; d += amx::DEPTH)
          step(q + int64_t(m) * size + d, size, k + int64_t(d / 2) * block + c, block);
        float* to = out + m * span + c;
        quarters(to, span, [](auto r, float* at, int64_t stride) { amx::save<decltype(r)::value>(at, stride); });
      }
  }

  // out [.., size] += p . v for rows in [first, last), whole ROWS;  v: [tokens / 2, size] pairs.
  static void outputs(const Prob* p, int64_t span, const uint32_t* v, int tokens, int first, int last, int size,
                      float* out) {
    for (int m = first; m < last; m += ROWS)
      for (int d = 0; d < size; d += 2 * amx::SIDE) {
        float* to = out + int64_t(m) * size + d;
        quarters(to, size, [](auto r, float* at, int64_t stride) { amx::load<decltype(r)::value>(at, stride); });
        for (int t = 0; t < tokens; t += amx::DEPTH)
          step(p + m * span + t, span, v + int64_t(t / 2) * size + d, size);
        quarters(to, size, [](auto r, float* at, int64_t stride) { amx::save<decltype(r)::value>(at, stride); });
      }
  }

 private:
  // Registers 0 to 3 += ROWS rows of 32 words x 32 columns of 16 pairs; spans in words and in pairs.
  static H2O_INLINE void step(const uint16_t* a, int64_t a_span, const uint32_t* b, int64_t b_span) {
    amx::load<4>(a, 2 * a_span);
    amx::load<6>(b, 4 * b_span);
    amx::load<7>(b + amx::SIDE, 4 * b_span);
    amx::multiply<0, 4, 6>();
    amx::multiply<1, 4, 7>();
    amx::load<5>(a + amx::SIDE * a_span, 2 * a_span);
    amx::multiply<2, 5, 6>();
    amx::multiply<3, 5, 7>();
  }
  // Calls f(register, its place, its stride in bytes) for the four that cover ROWS x 32 floats at `at`.
  template <class F>
  static H2O_INLINE void quarters(float* at, int64_t span, const F& f) {
    f(std::integral_constant<int, 0>(), at, 4 * span);
    f(std::integral_constant<int, 1>(), at + amx::SIDE, 4 * span);
    f(std::integral_constant<int, 2>(), at + amx::SIDE * span, 4 * span);
    f(std::integral_constant<int, 3>(), at + amx::SIDE * span + amx::SIDE, 4 * span);
  }
};

}  // namespace h2o
#endif
