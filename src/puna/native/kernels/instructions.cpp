// Compiled once per instruction set, with the compiler's options for it and PUNA_INSTRUCTIONS as the name.
#if defined(PUNA_TILES)
#include "lanes_amx.h"
#include "rounding_avx2.h"
#elif defined(__AVX512F__)
#include "lanes_avx512.h"
#include "rounding_avx2.h"
#elif defined(__AVX2__)
#include "lanes_avx2.h"
#include "rounding_avx2.h"
#elif defined(PUNA_NEON)
#include "lanes_neon.h"
#include "rounding_neon.h"
#else
#include "lanes_portable.h"
#include "rounding_portable.h"
#endif
#include "between.h"
// Attention needs no dot products of bytes, and is compiled once for sets that differ in those alone.
#if defined(__AVX512F__)
#define PUNA_ATTENTION avx512_attention
#elif defined(__AVX2__)
#define PUNA_ATTENTION avx2_attention
#elif defined(PUNA_NEON)
#define PUNA_ATTENTION neon_attention
#else
#define PUNA_ATTENTION portable_attention
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace puna {
namespace {

#if defined(__AVX2__)
// By the processor's own word: bit of a register of leaf 7, and that the system keeps the registers (XCR0).
bool available() {
  unsigned a, b, c, d, a1, b1, c1, d1, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C)) return false;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return false;
  const bool avx2 = (b & bit_AVX2) && (low & 6) == 6;
  [[maybe_unused]] const bool avx512 = avx2 && (low & 0xe6) == 0xe6 && (b & bit_AVX512F) && (b & bit_AVX512BW) && (b & bit_AVX512DQ) && (b & bit_AVX512VL);
#if defined(PUNA_TILES)
  return avx512 && (c & bit_AVX512VNNI) && (a1 & (1u << 5)) && has_tiles();
#elif defined(__AVX512BF16__)
  return avx512 && (c & bit_AVX512VNNI) && (a1 & (1u << 5));
#elif defined(__AVX512VNNI__)
  return avx512 && (c & bit_AVX512VNNI);
#elif defined(__AVX512F__)
  return avx512;
#elif defined(__AVXVNNI__)
  return avx2 && (a1 & (1u << 4));
#else
  return avx2;
#endif
}
#elif defined(PUNA_NEON) && defined(__ARM_FEATURE_DOTPROD)
// By the system's word.
bool available() {
#if defined(__linux__)
  const bool has_dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return has_dot && (getauxval(AT_HWCAP2) & HWCAP2_I8MM);
#else
  return has_dot;
#endif
#else
  return false;
#endif
}
#else
bool available() { return true; }
#endif

#define PUNA_TEXT_OF(name) #name
#define PUNA_TEXT(name) PUNA_TEXT_OF(name)
#define PUNA_JOINED_OF(a, b) a##b
#define PUNA_JOINED(a, b) PUNA_JOINED_OF(a, b)

#if defined(PUNA_TILES)
// Tiles take 16 tokens at a time; a few are better off in registers, where their sums are the same.
constexpr int fewest_tokens_of_tiles = 8;

constexpr auto& without_tiles = avx512_bf16_instructions;

void round_some(Rounding rounding, const float* x, const Activations& a, int64_t t, int64_t begin, int64_t end) {
  without_tiles.round(rounding, x, a, t, begin, end);
}

void multiply_some(const Format& format, const Activations& a, const Work& work) {
  if (format.type == type_bf16) return multiply_bfloats_in_tiles(format, a, work);
  if (is_of_floats(format.rounding) || work.n < fewest_tokens_of_tiles) return without_tiles.multiply(format, a, work);
  multiply_in_tiles(format, a, work);
}

int64_t exercise_all(int64_t times) { return without_tiles.exercise(times); }
#elif defined(__AVX512BF16__)
// Only products of bfloats differ from those of the instruction set below, which computes all others.
void round_some(Rounding rounding, const float* x, const Activations& a, int64_t t, int64_t begin, int64_t end) {
  if (rounding != to_bfloats) return avx512_vnni_instructions.round(rounding, x, a, t, begin, end);
  for (int64_t b = begin / 32; 32 * b < end; b++) {
    const uint32_t present = end - 32 * b < 32 ? (1u << (end - 32 * b)) - 1 : ~0u;  // all others are zeros
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(present), x + 32 * b);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(present >> 16), x + 32 * b + 16);
    _mm512_storeu_si512(a.x + (b * a.n + t) * 32, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

void multiply_some(const Format& format, const Activations& a, const Work& work) {
  if (format.type != type_bf16) return avx512_vnni_instructions.multiply(format, a, work);
  multiply_floats<Lanes, BF16>(a, work, stripe_bytes(format, a.n_in));
}

int64_t exercise_all(int64_t times) { return avx512_vnni_instructions.exercise(times); }
#else
constexpr auto round_some = round_activations<Values>;
constexpr auto multiply_some = multiply<Lanes>;
constexpr auto exercise_all = exercise<Lanes>;
#endif

}  // namespace

extern const Instructions PUNA_JOINED(PUNA_INSTRUCTIONS, _instructions) = {
    PUNA_TEXT(PUNA_INSTRUCTIONS), available,   round_some, multiply_some, add_values, gate_values,
    normalise,                    exercise_all, &PUNA_ATTENTION};

}  // namespace puna
