// 8 rows in registers of 32 bytes: AVX2, FMA and F16C, with and without AVX-VNNI.
#pragma once
#include <immintrin.h>

#include "product.h"

namespace puna {
namespace {

struct Lanes {
  using I = __m256i;
  using F = __m256;
  static constexpr bool has_bfloats = false;
  static constexpr int most_floats_of_tile = 6, most_floats_of_two_stripes = 2;
  static constexpr int width = 8;
  static constexpr bool two_stripes = false;
  // There are 16 registers, and weights take 8: with sums of several tokens they would move in and out.
#ifdef __AVXVNNI__
  static constexpr bool has_dot4 = true;
  static constexpr int most_tokens_of_tile = 2;
  static constexpr int most_tokens_in_registers = 2;
  template <int bits> static PUNA_INLINE I dot4(I sum, I weights, I x) { return _mm256_dpbusd_avx_epi32(sum, weights, x); }
#else
  static constexpr bool has_dot4 = false;
  static constexpr int most_tokens_of_tile = 1;
  static constexpr int most_tokens_in_registers = 1;
#endif
  static PUNA_INLINE I add_pairs(I weights, I x) { return _mm256_maddubs_epi16(weights, x); }
  static PUNA_INLINE I load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
  static PUNA_INLINE I load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static PUNA_INLINE I load_i8(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static PUNA_INLINE F load_half(const half* p) { return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }
  static PUNA_INLINE I four(const void* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return _mm256_set1_epi32(bytes);
  }
  static PUNA_INLINE I low_nibbles(I v) { return _mm256_and_si256(v, bytes(15)); }
  static PUNA_INLINE I high_nibbles(I v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), bytes(15)); }
  static PUNA_INLINE I bytes(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  static PUNA_INLINE I words(int v) { return _mm256_set1_epi16(static_cast<short>(v)); }
  static PUNA_INLINE I zero() { return _mm256_setzero_si256(); }
  static PUNA_INLINE I both(I a, I b) { return _mm256_and_si256(a, b); }
  static PUNA_INLINE I either(I a, I b) { return _mm256_or_si256(a, b); }
  template <int n> static PUNA_INLINE I left(I v) { return _mm256_slli_epi16(v, n); }
  template <int n> static PUNA_INLINE I right(I v) { return _mm256_srli_epi16(v, n); }
  static PUNA_INLINE I table(const uint8_t* values) { return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values))); }
  static PUNA_INLINE I look_up(I table, I v) { return _mm256_shuffle_epi8(table, v); }
  static PUNA_INLINE I pairs(I low, I high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xAA); }
  static PUNA_INLINE I multiply_pairs(I a, I b) { return _mm256_madd_epi16(a, b); }
  static PUNA_INLINE I add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static PUNA_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static PUNA_INLINE F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static PUNA_INLINE F as_float(I bits) { return _mm256_castsi256_ps(bits); }
  template <int n> static PUNA_INLINE I left32(I v) { return _mm256_slli_epi32(v, n); }
  template <int n> static PUNA_INLINE I right32(I v) { return _mm256_srli_epi32(v, n); }
  static PUNA_INLINE I less(I a, I b) { return _mm256_sub_epi32(a, b); }
  static PUNA_INLINE I whole(int v) { return _mm256_set1_epi32(v); }
  static PUNA_INLINE F set(float v) { return _mm256_set1_ps(v); }
  static PUNA_INLINE F times(F a, F b) { return _mm256_mul_ps(a, b); }
  static PUNA_INLINE F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static PUNA_INLINE F multiply_less(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
  static PUNA_INLINE void keep(I& v) { __asm__ volatile("" : "+x"(v)); }
  static PUNA_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }
};

}  // namespace
}  // namespace puna
