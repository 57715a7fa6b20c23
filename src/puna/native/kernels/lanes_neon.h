// 4 rows in registers of 16 bytes: NEON as every 64-bit ARM has it, with dot products of bytes, and with those of bytes without
// sign by bytes with one (I8MM).
#pragma once
#include <arm_neon.h>

#include <cstring>

#include "product.h"

namespace puna {
namespace {

struct Lanes {
  using I = int32x4_t;
  using F = float32x4_t;
  static constexpr bool has_bfloats = false;
  static constexpr int most_floats_of_tile = 4, most_floats_of_two_stripes = 2;
  static constexpr int width = 4;
  static constexpr bool two_stripes = false;
  // There are 32 registers: 8 for weights, 4 for the sums of each token and 4 for those of a block.
  static constexpr int most_tokens_of_tile = 2, most_tokens_in_registers = 2;

  static PUNA_INLINE uint8x16_t u8(I v) { return vreinterpretq_u8_s32(v); }
  static PUNA_INLINE int8x16_t s8(I v) { return vreinterpretq_s8_s32(v); }
  static PUNA_INLINE int16x8_t s16(I v) { return vreinterpretq_s16_s32(v); }
  static PUNA_INLINE uint16x8_t u16(I v) { return vreinterpretq_u16_s32(v); }
  static PUNA_INLINE I of(uint8x16_t v) { return vreinterpretq_s32_u8(v); }

#if defined(__ARM_FEATURE_DOTPROD)
  static constexpr bool has_dot4 = true;
  template <int bits> static PUNA_INLINE I dot4(I sum, I weights, I x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum, u8(weights), s8(x));
#else
    if constexpr (bits < 8) return vdotq_s32(sum, s8(weights), s8(x));
    // Weights less 128 have a sign; what that takes is put back.
    const I taken = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), s8(x));
    return vsubq_s32(vdotq_s32(sum, s8(veorq_s32(weights, bytes(0x80))), s8(x)), taken);
#endif
  }
#else
  static constexpr bool has_dot4 = false;
#endif
  // Weights have 7 bits at most.
  static PUNA_INLINE I add_pairs(I weights, I x) {
    const int16x8_t low = vmull_s8(vget_low_s8(s8(weights)), vget_low_s8(s8(x))), high = vmull_high_s8(s8(weights), s8(x));
    return vreinterpretq_s32_s16(vpaddq_s16(low, high));
  }
  static PUNA_INLINE I load(const void* p) { return of(vld1q_u8(static_cast<const uint8_t*>(p))); }
  static PUNA_INLINE uint8x8_t four_bytes(const void* p) {
    uint32_t bytes;
    memcpy(&bytes, p, 4);
    return vreinterpret_u8_u32(vdup_n_u32(bytes));
  }
  static PUNA_INLINE I load_u8(const uint8_t* p) { return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p))))); }
  static PUNA_INLINE I load_i8(const int8_t* p) { return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))); }
  static PUNA_INLINE F load_half(const half* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static PUNA_INLINE I four(const void* p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return vdupq_n_s32(bytes);
  }
  static PUNA_INLINE I low_nibbles(I v) { return of(vandq_u8(u8(v), vdupq_n_u8(15))); }
  static PUNA_INLINE I high_nibbles(I v) { return of(vshrq_n_u8(u8(v), 4)); }
  static PUNA_INLINE I bytes(int v) { return of(vdupq_n_u8(static_cast<uint8_t>(v))); }
  static PUNA_INLINE I words(int v) { return vreinterpretq_s32_s16(vdupq_n_s16(static_cast<int16_t>(v))); }
  static PUNA_INLINE I zero() { return vdupq_n_s32(0); }
  static PUNA_INLINE I both(I a, I b) { return vandq_s32(a, b); }
  static PUNA_INLINE I either(I a, I b) { return vorrq_s32(a, b); }
  template <int n> static PUNA_INLINE I left(I v) { return vreinterpretq_s32_u16(vshlq_n_u16(u16(v), n)); }
  template <int n> static PUNA_INLINE I right(I v) {
    if constexpr (n == 0) return v;
    else return vreinterpretq_s32_u16(vshrq_n_u16(u16(v), n));
  }
  static PUNA_INLINE uint8x16_t table(const uint8_t* values) { return vld1q_u8(values); }
  static PUNA_INLINE I look_up(uint8x16_t table, I v) { return of(vqtbl1q_u8(table, u8(v))); }
  static PUNA_INLINE I pairs(I low, I high) { return vbslq_s32(vdupq_n_u32(0xffffu), low, vshlq_n_s32(high, 16)); }
  static PUNA_INLINE I multiply_pairs(I a, I b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(s16(a)), vget_low_s16(s16(b))), vmull_high_s16(s16(a), s16(b)));
  }
  static PUNA_INLINE I add16(I a, I b) { return vreinterpretq_s32_s16(vaddq_s16(s16(a), s16(b))); }
  static PUNA_INLINE I add(I a, I b) { return vaddq_s32(a, b); }
  static PUNA_INLINE F to_float(I v) { return vcvtq_f32_s32(v); }
  static PUNA_INLINE F as_float(I bits) { return vreinterpretq_f32_s32(bits); }
  template <int n> static PUNA_INLINE I left32(I v) { return vshlq_n_s32(v, n); }
  template <int n> static PUNA_INLINE I right32(I v) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), n)); }
  static PUNA_INLINE I less(I a, I b) { return vsubq_s32(a, b); }
  static PUNA_INLINE I whole(int v) { return vdupq_n_s32(v); }
  static PUNA_INLINE F set(float v) { return vdupq_n_f32(v); }
  static PUNA_INLINE F times(F a, F b) { return vmulq_f32(a, b); }
  static PUNA_INLINE F multiply_add(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static PUNA_INLINE F multiply_less(F a, F b, F c) { return vfmaq_f32(vnegq_f32(c), a, b); }
  static PUNA_INLINE void keep(I& v) { __asm__ volatile("" : "+w"(v)); }
  static PUNA_INLINE void store(float* p, F v) { vst1q_f32(p, v); }
};

}  // namespace
}  // namespace puna
