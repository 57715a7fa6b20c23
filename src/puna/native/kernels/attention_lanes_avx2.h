// 8 floats in a register: AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include "formats.h"

namespace puna {
namespace {

struct Floats {
  using F = __m256;
  static constexpr int width = 8;
  static constexpr int few_rows = 4;  // that are computed one by one
  static constexpr int tile_rows = 6, tile_vectors = 2;  // of sums that stay in registers
  static constexpr int dot_rows = 2;                     // beside four cells
  static constexpr int score_rows = 2, score_vectors = 2;                   // of which three sums stay in registers
  static inline F zero() { return _mm256_setzero_ps(); }
  static inline F set(float v) { return _mm256_set1_ps(v); }
  static inline F load(const float* p) { return _mm256_loadu_ps(p); }
  static inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static inline F load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static inline F load_i8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
  static inline F set_half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(bits)));
  }
  static inline F add(F a, F b) { return _mm256_add_ps(a, b); }
  static inline F less(F a, F b) { return _mm256_sub_ps(a, b); }
  static inline F times(F a, F b) { return _mm256_mul_ps(a, b); }
  static inline F over(F a, F b) { return _mm256_div_ps(a, b); }
  static inline F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static inline F larger(F a, F b) { return _mm256_max_ps(a, b); }  // b where one is no number
  static inline F if_less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static inline F whole(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // v 2^n, and 0 where x, of which n is the whole part, is too small for that; what is no number stays none.
  static inline F times_power(F v, F n, F x) {
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), _mm256_mul_ps(v, _mm256_castsi256_ps(power)));
  }
  static inline float first(F v) { return _mm256_cvtss_f32(v); }
  static inline float largest(F v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  // The sums of four registers.
  static inline void store_sums(float* p, F a, F b, F c, F d) {
    const F all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
  // What *of* gives for each place of a register, added up as store_sums adds those.
  template <class Of, class Add> static inline __attribute__((always_inline)) auto in_order(const Of& of, const Add& add) {
    const auto four = [&](int i) __attribute__((always_inline)) { return add(add(of(i), of(i + 1)), add(of(i + 2), of(i + 3))); };
    return add(four(0), four(4));
  }
  // Whether 64 halves are all of these bits.
  static inline bool are_all(const half* p, half bits) {
    const __m256i wanted = _mm256_set1_epi16(static_cast<short>(bits));
    __m256i same = _mm256_set1_epi16(-1);
    for (int i = 0; i < 64; i += 16)
      same = _mm256_and_si256(same, _mm256_cmpeq_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)), wanted));
    return _mm256_movemask_epi8(same) == -1;
  }
};

}  // namespace
}  // namespace puna
