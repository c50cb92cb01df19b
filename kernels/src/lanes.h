// 16 floats or 16 integers: one AVX-512 vector, or two of AVX2 that do the same lane by lane. No
// operation depends on how the 16 lanes are stored, so that both give the same bits.
#pragma once
#include <immintrin.h>
#include <cstdint>

namespace {
#ifdef __AVX512F__
struct Floats {
  __m512 v;
};
struct Integers {
  __m512i v;
};
#define EACH(NAME, OPERATION) \
  inline Floats NAME(Floats x, Floats y) { return {_mm512_##OPERATION(x.v, y.v)}; }

inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats fma(Floats x, Floats y, Floats z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
// z - x * y, rounded once
inline Floats less_product(Floats x, Floats y, Floats z) {
  return {_mm512_fnmadd_ps(x.v, y.v, z.v)};
}
inline Integers load_integers(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Integers round_to_even(Floats x) { return {_mm512_cvtps_epi32(x.v)}; }
inline Floats to_float(Integers x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Integers operator+(Integers x, int y) {
  return {_mm512_add_epi32(x.v, _mm512_set1_epi32(y))};
}
inline Floats power_of_two(Integers n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32((n + 127).v, 23))};
}
// x, and 0 in lanes where y is less than a bound.
inline Floats unless_below(Floats x, Floats y, Floats bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y.v, bound.v, _CMP_NLT_UQ), x.v)};
}
// A bit for each lane of x that is greater than y's.
inline unsigned greater(Floats x, Floats y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ); }
inline void store_bytes(void* p, Integers x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x.v));
}
inline __m256 first_half(Floats x) { return _mm512_castps512_ps256(x.v); }
inline __m256 second_half(Floats x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
struct Floats {
  __m256 a, b;
};
struct Integers {
  __m256i a, b;
};
#define EACH(NAME, OPERATION)                                            \
  inline Floats NAME(Floats x, Floats y) {                               \
    return {_mm256_##OPERATION(x.a, y.a), _mm256_##OPERATION(x.b, y.b)}; \
  }

inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 load_half(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Floats load(const int8_t* p) { return {load_half(p), load_half(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats less_product(Floats x, Floats y, Floats z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
inline Integers load_integers(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Integers round_to_even(Floats x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
inline Floats to_float(Integers x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Integers operator+(Integers x, int y) {
  __m256i each = _mm256_set1_epi32(y);
  return {_mm256_add_epi32(x.a, each), _mm256_add_epi32(x.b, each)};
}
inline __m256 power_of_two(__m256i biased) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Floats power_of_two(Integers n) {
  n = n + 127;
  return {power_of_two(n.a), power_of_two(n.b)};
}
inline Floats unless_below(Floats x, Floats y, Floats bound) {
  return {_mm256_and_ps(_mm256_cmp_ps(y.a, bound.a, _CMP_NLT_UQ), x.a),
          _mm256_and_ps(_mm256_cmp_ps(y.b, bound.b, _CMP_NLT_UQ), x.b)};
}
inline unsigned greater(Floats x, Floats y) {
  return _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)) |
         _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)) << 8;
}
inline void store_bytes(void* p, Integers x) {
  const __m256i low = _mm256_set1_epi32(255);
  __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  __m128i first = _mm256_castsi256_si128(words), second = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(first, second));
}
inline __m256 first_half(Floats x) { return x.a; }
inline __m256 second_half(Floats x) { return x.b; }
#endif

EACH(operator+, add_ps)
EACH(operator-, sub_ps)
EACH(operator*, mul_ps)
EACH(operator/, div_ps)
EACH(max, max_ps)
EACH(min, min_ps)
#undef EACH
inline Floats operator+(Floats x, float y) { return x + broadcast(y); }
inline Floats operator-(Floats x, float y) { return x - broadcast(y); }
inline Floats operator*(Floats x, float y) { return x * broadcast(y); }
inline Floats operator/(Floats x, float y) { return x / broadcast(y); }

// 16 lanes to 4: lane i has i and i + 8, added first, and i + 4 and i + 12.
inline __m128 fold_to_4(Floats x) {
  __m256 eight = _mm256_add_ps(first_half(x), second_half(x));
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
inline float sum(Floats x) {
  __m128 four = fold_to_4(x);
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// The sums of 16 vectors, each in the order of `sum`: a row of a 4 x 4 transposition at a time.
inline Floats sums(const Floats (&x)[16]) {
  float out[16];
  for (int i = 0; i < 16; i += 4) {
    __m128 a = fold_to_4(x[i]), b = fold_to_4(x[i + 1]);
    __m128 c = fold_to_4(x[i + 2]), d = fold_to_4(x[i + 3]);
    __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(out + i, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
  }
  return load(out);
}
inline float largest(Floats x) {
  __m256 eight = _mm256_max_ps(first_half(x), second_half(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// e^x of x up to 88, infinite at 89, with the polynomial of Cephes's expf; 0 below -87, NaN of NaN.
inline Floats exponential(Floats x) {
  const Floats least = broadcast(-87.f);                    // 2^n stays a normal number
  Integers n = round_to_even(max(least, x) * 1.44269504f);  // max takes the second of a NaN
  Floats f = to_float(n);
  Floats r =
      less_product(f, broadcast(-2.12194440e-4f), less_product(f, broadcast(0.693359375f), x));
  Floats p = fma(broadcast(1.9875691500e-4f), r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return unless_below((fma(p, r * r, r) + 1.f) * power_of_two(n), x, least);
}
}  // namespace
