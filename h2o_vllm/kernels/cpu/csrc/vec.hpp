// SPDX-License-Identifier: Apache-2.0
// The widest float vector this CPU has, and how cache words become floats.
//
// GCC/Clang vector extensions: one source for AVX-512, AVX2, NEON. Compiled with -march=native, never
// with -ffast-math: the rounding trick in exp2 and the handling of NaN must stay as written.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace h2o {

#if defined(__AVX512F__)
constexpr int W = 16;          // floats per vector
constexpr int MAX_ROWS = 12;   // query rows per register tile: 12 * 2 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int MAX_ROWS = 6;    // 6 * 2 of 16
#else
constexpr int W = 4;
constexpr int MAX_ROWS = 8;    // 8 * 2 of 32 (NEON)
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

#define H2O_INLINE inline __attribute__((always_inline))

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

H2O_INLINE float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
H2O_INLINE uint32_t as_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

H2O_INLINE vf splat(float x) { return x - (vf){}; }
H2O_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

H2O_INLINE vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
H2O_INLINE vf load(const bf16* p) {
  // GCC 12 makes five instructions of the last lines.
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
H2O_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  vu u = __builtin_convertvector(h, vu);
  // Move the exponent into place; a multiplication corrects its bias, subnormals included.
  vf low = (vf)((u & 0x7fffu) << 13) * 0x1p112f;
  return (vf)((vu)low | (u & 0x8000u) << 16);
#endif
}

H2O_INLINE float widen(float x) { return x; }
H2O_INLINE float widen(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
H2O_INLINE float widen(f16 x) {
  float low = as_float(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
  return as_float(as_bits(low) | uint32_t(x.bits & 0x8000) << 16);
}

// To nearest even, as torch does.
H2O_INLINE void narrow(float x, float* to) { *to = x; }
H2O_INLINE void narrow(float x, bf16* to) {
  uint32_t u = as_bits(x);
  to->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
H2O_INLINE void narrow(float x, f16* to) {
  uint32_t u = as_bits(x), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a >= 0x477ff000) a = a > 0x7f800000 ? 0x7e00 : 0x7c00;            // past 65504, or NaN
  else if (a < 0x38800000) a = as_bits(as_float(a) + 0.5f) - 0x3f000000; // subnormal
  else a = (a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13;
  to->bits = uint16_t(sign | a);
}

H2O_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
#if defined(__AVX512F__)
H2O_INLINE float hmax(vf v) { return _mm512_reduce_max_ps((__m512)v); }
H2O_INLINE float hsum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
#else
H2O_INLINE float hmax(vf v) { float m = v[0]; for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m; return m; }
H2O_INLINE float hsum(vf v) {
  float s[W];
  std::memcpy(s, &v, sizeof v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) s[i] += s[i + n];
  return s[0];
}
#endif

// The sum of each of W vectors.
H2O_INLINE vf hsums(const vf* v) {
#if defined(__AVX512F__)
  // Halves, quarters, ... of two vectors become one: 30 shuffles, where sums one by one take 64.
  __m512 two[8], four[4], eight[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)two[2 * i], b = (__m512d)two[2 * i + 1];
    four[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  for (int i = 0; i < 2; ++i)
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xee));
  return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                           _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
#elif defined(__AVX2__)
  auto add = [](vf a, vf b) { return (vf)_mm256_hadd_ps((__m256)a, (__m256)b); };
  const vf first = add(add(v[0], v[1]), add(v[2], v[3])), last = add(add(v[4], v[5]), add(v[6], v[7]));
  // Each holds the sums of the lower halves of four vectors, then those of the upper ones.
  return (vf)_mm256_permute2f128_ps((__m256)first, (__m256)last, 0x20) +
         (vf)_mm256_permute2f128_ps((__m256)first, (__m256)last, 0x31);
#else
  vf sums;
  for (int i = 0; i < W; ++i) sums[i] = hsum(v[i]);
  return sums;
#endif
}

// One instruction, as std::sqrt sets no errno (-fno-math-errno).
H2O_INLINE vf root(vf x) {
  float s[W];
  store(s, x);
  for (int i = 0; i < W; ++i) s[i] = std::sqrt(s[i]);
  return load(s);
}

// 2^x for x <= 0, relative error below 3e-7; what would be below 2^-126 becomes 2^-126.
// Polynomial: Cephes exp2f.
H2O_INLINE vf exp2_neg(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  x = vmax(x, splat(-126.0f));
  vf t = x + magic;
  vf r = x - (t - magic);
  vf y = splat(1.535336188319500e-4f);
  y = y * r + 1.339887440266574e-3f;
  y = y * r + 9.618437357674640e-3f;
  y = y * r + 5.550332471162809e-2f;
  y = y * r + 2.402264791363012e-1f;
  y = y * r + 6.931472028550421e-1f;
  y = y * r + 1.0f;
  return (vf)((vi)y + ((vi)t << 23));
}

// tanh, relative error below 5e-7. Rational function: Eigen's, of degree 13 over 6; beyond 7.9 it is 1 in float.
H2O_INLINE vf tanh(vf x) {
  const vf most = splat(7.90531110763549805f);
  x = vmax(x, -most);
  x = x < most ? x : most;
  const vf z = x * x;
  vf p = splat(-2.76076847742355e-16f);
  p = p * z + 2.00018790482477e-13f;
  p = p * z - 8.60467152213735e-11f;
  p = p * z + 5.12229709037114e-08f;
  p = p * z + 1.48572235717979e-05f;
  p = p * z + 6.37261928875436e-04f;
  p = p * z + 4.89352455891786e-03f;
  vf q = splat(1.19825839466702e-06f);
  q = q * z + 1.18534705686654e-04f;
  q = q * z + 2.26843463243900e-03f;
  q = q * z + 4.89352518554385e-03f;
  return x * p / q;
}

}  // namespace h2o
