// 16 floats in a register: AVX-512 F, BW, DQ and VL.
#pragma once
#include <immintrin.h>

#include "formats.h"

namespace puna {
namespace {

struct Floats {
  using F = __m512;
  static constexpr int width = 16;
  static constexpr int few_rows = 8;  // that are computed one by one
  static constexpr int tile_rows = 6, tile_vectors = 4;  // of sums that stay in registers
  static constexpr int dot_rows = 4;                     // beside four cells
  static constexpr int score_rows = 4, score_vectors = 2;                   // of which three sums stay in registers
  static inline F zero() { return _mm512_setzero_ps(); }
  static inline F set(float v) { return _mm512_set1_ps(v); }
  static inline F load(const float* p) { return _mm512_loadu_ps(p); }
  static inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static inline F load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static inline F load_i8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
  static inline F set_half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
  }
  static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
  static inline F less(F a, F b) { return _mm512_sub_ps(a, b); }
  static inline F times(F a, F b) { return _mm512_mul_ps(a, b); }
  static inline F over(F a, F b) { return _mm512_div_ps(a, b); }
  static inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static inline F larger(F a, F b) { return _mm512_max_ps(a, b); }  // b where one is no number
  static inline F if_less(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
  static inline F whole(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static inline F times_power(F v, F n, F) { return _mm512_scalef_ps(v, n); }  // v 2^n
  static inline float first(F v) { return _mm512_cvtss_f32(v); }
  static inline float largest(F v) { return _mm512_reduce_max_ps(v); }
  // The sums of four registers.
  static inline void store_sums(float* p, F a, F b, F c, F d) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  // What *of* gives for each place of a register, added up as store_sums adds those.
  template <class Of, class Add> static inline __attribute__((always_inline)) auto in_order(const Of& of, const Add& add) {
    const auto four = [&](int i) __attribute__((always_inline)) { return add(add(of(i), of(i + 2)), add(of(i + 1), of(i + 3))); };
    return add(add(four(0), four(8)), add(four(4), four(12)));
  }
  // Whether 64 halves are all of these bits.
  static inline bool are_all(const half* p, half bits) {
    const __m512i wanted = _mm512_set1_epi16(static_cast<short>(bits));
    return (_mm512_cmpneq_epi16_mask(_mm512_loadu_si512(p), wanted) | _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(p + 32), wanted)) == 0;
  }
};

}  // namespace
}  // namespace puna
