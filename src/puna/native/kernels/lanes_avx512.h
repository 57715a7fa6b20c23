// 16 rows in registers of 64 bytes: AVX-512 F, BW, DQ and VL, with and without VNNI.
#pragma once
#include <immintrin.h>

#include "product.h"

namespace puna {
namespace {

struct Lanes {
  using I = __m512i;
  using F = __m512;
#ifdef __AVX512BF16__
  static constexpr bool has_bfloats = true;
  static PUNA_INLINE F dot_bfloats(F sum, I w, I x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
#else
  static constexpr bool has_bfloats = false;
#endif
  static constexpr int most_floats_of_tile = 12, most_floats_of_two_stripes = 12;
  static constexpr int width = 16;
#ifdef __AVX512VNNI__
  static constexpr bool has_dot4 = true;
  static constexpr int most_tokens_of_tile = 16;
  static constexpr bool two_stripes = false;
  static constexpr int most_tokens_in_registers = tokens_at_once;
  template <int bits> static PUNA_INLINE I dot4(I sum, I weights, I x) { return _mm512_dpbusd_epi32(sum, weights, x); }
#else
  static constexpr bool has_dot4 = false;
  static constexpr int most_tokens_of_tile = 8;
  static constexpr bool two_stripes = true;
  static constexpr int most_tokens_in_registers = 31;
  static PUNA_INLINE I add_pairs(I weights, I x) { return _mm512_maddubs_epi16(weights, x); }
#endif
  static PUNA_INLINE I load(const void* p) { return _mm512_load_si512(p); }
  static PUNA_INLINE I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }
  static PUNA_INLINE I load_i8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); }
  static PUNA_INLINE F load_half(const half* p) { return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))); }
  static PUNA_INLINE I four(const void* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
  }
  static PUNA_INLINE I low_nibbles(I v) { return _mm512_and_si512(v, bytes(15)); }
  static PUNA_INLINE I high_nibbles(I v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), bytes(15)); }
  static PUNA_INLINE I bytes(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
  static PUNA_INLINE I words(int v) { return _mm512_set1_epi16(static_cast<short>(v)); }
  static PUNA_INLINE I zero() { return _mm512_setzero_si512(); }
  static PUNA_INLINE I both(I a, I b) { return _mm512_and_si512(a, b); }
  static PUNA_INLINE I either(I a, I b) { return _mm512_or_si512(a, b); }
  template <int n> static PUNA_INLINE I left(I v) { return _mm512_slli_epi16(v, n); }
  template <int n> static PUNA_INLINE I right(I v) { return _mm512_srli_epi16(v, n); }
  static PUNA_INLINE I table(const uint8_t* values) { return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values))); }
  static PUNA_INLINE I look_up(I table, I v) { return _mm512_shuffle_epi8(table, v); }
  static PUNA_INLINE I pairs(I low, I high) { return _mm512_mask_blend_epi16(0xAAAAAAAAu, low, _mm512_slli_epi32(high, 16)); }
  static PUNA_INLINE I multiply_pairs(I a, I b) { return _mm512_madd_epi16(a, b); }
  static PUNA_INLINE I add16(I a, I b) { return _mm512_add_epi16(a, b); }
  static PUNA_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static PUNA_INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static PUNA_INLINE F as_float(I bits) { return _mm512_castsi512_ps(bits); }
  template <int n> static PUNA_INLINE I left32(I v) { return _mm512_slli_epi32(v, n); }
  template <int n> static PUNA_INLINE I right32(I v) { return _mm512_srli_epi32(v, n); }
  static PUNA_INLINE I less(I a, I b) { return _mm512_sub_epi32(a, b); }
  static PUNA_INLINE I whole(int v) { return _mm512_set1_epi32(v); }
  static PUNA_INLINE F set(float v) { return _mm512_set1_ps(v); }
  static PUNA_INLINE F times(F a, F b) { return _mm512_mul_ps(a, b); }
  static PUNA_INLINE F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static PUNA_INLINE F multiply_less(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
  static PUNA_INLINE void keep(I& v) { __asm__ volatile("" : "+v"(v)); }
  static PUNA_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }
};

}  // namespace
}  // namespace puna
