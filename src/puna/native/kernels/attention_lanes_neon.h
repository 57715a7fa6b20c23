// 4 floats in a register: NEON as every 64-bit ARM has it.
#pragma once
#include <arm_neon.h>

#include "formats.h"

namespace puna {
namespace {

struct Floats {
  using F = float32x4_t;
  static constexpr int width = 4;
  static constexpr int few_rows = 8;  // that are computed one by one
  static constexpr int tile_rows = 6, tile_vectors = 4;   // of sums that stay in registers
  static constexpr int dot_rows = 2;                      // beside four cells
  static constexpr int score_rows = 4, score_vectors = 2;  // of which three sums stay in registers
  static inline F zero() { return vdupq_n_f32(0); }
  static inline F set(float v) { return vdupq_n_f32(v); }
  static inline F load(const float* p) { return vld1q_f32(p); }
  static inline void store(float* p, F v) { vst1q_f32(p, v); }
  static inline F load_half(const uint8_t* p) {
    uint16_t halves[4];
    __builtin_memcpy(halves, p, 8);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
  }
  static inline F load_i8(const uint8_t* p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes))))));
  }
  static inline F set_half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
  }
  static inline F add(F a, F b) { return vaddq_f32(a, b); }
  static inline F less(F a, F b) { return vsubq_f32(a, b); }
  static inline F times(F a, F b) { return vmulq_f32(a, b); }
  static inline F over(F a, F b) { return vdivq_f32(a, b); }
  static inline F multiply_add(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static inline F larger(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where one is no number
  static inline F if_less(F a, F b, F yes, F no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
  static inline F whole(F v) { return vrndnq_f32(v); }
  // v 2^n, and 0 where x, of which n is the whole part, is too small for that; what is no number stays none.
  static inline F times_power(F v, F n, F x) {
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    const F product = vmulq_f32(v, vreinterpretq_f32_s32(power));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(product), vcltq_f32(x, vdupq_n_f32(-126.0f))));
  }
  static inline float first(F v) { return vgetq_lane_f32(v, 0); }
  static inline float largest(F v) { return vmaxvq_f32(v); }
  // The sums of four registers.
  static inline void store_sums(float* p, F a, F b, F c, F d) { vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))); }
  // What *of* gives for each place of a register, added up as store_sums adds those.
  template <class Of, class Add> static inline __attribute__((always_inline)) auto in_order(const Of& of, const Add& add) {
    return add(add(of(0), of(1)), add(of(2), of(3)));
  }
  // Whether 64 halves are all of these bits.
  static inline bool are_all(const half* p, half bits) {
    uint16x8_t same = vdupq_n_u16(0xffff);
    for (int i = 0; i < 64; i += 8) same = vandq_u16(same, vceqq_u16(vld1q_u16(p + i), vdupq_n_u16(bits)));
    return vminvq_u16(same) == 0xffff;
  }
};

}  // namespace
}  // namespace puna
