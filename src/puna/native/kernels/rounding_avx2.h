#pragma once
#include <immintrin.h>

#include "rounding.h"

namespace puna {
namespace {

struct Values {
  // As whole numbers, in the order of which what is no number comes last: it must not be lost.
  static inline float largest(const float* x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), *from = reinterpret_cast<const __m256i*>(x);
    __m256i m = _mm256_and_si256(_mm256_loadu_si256(from), magnitude);
    for (int i = 1; i < 4; i++) m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_loadu_si256(from + i), magnitude));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(h));
  }
  // sums: of the first 16 and of the last 16.
  static inline void round(const float* x, float factor, int8_t* q, int* sums) {
    const __m256 f = _mm256_set1_ps(factor);
    __m256i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), f));
    // Packing interleaves the halves of registers; the last step puts the groups of four back in order.
    const __m256i words[2] = {_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3])};
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    const __m256i s = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m128i a = _mm256_castsi256_si128(s), b = _mm256_extracti128_si256(s, 1);
    sums[0] = _mm_cvtsi128_si32(a) + _mm_extract_epi32(a, 2) - 2048;
    sums[1] = _mm_cvtsi128_si32(b) + _mm_extract_epi32(b, 2) - 2048;
  }
};

}  // namespace
}  // namespace puna
