#pragma once
#include <arm_neon.h>

#include "rounding.h"

namespace puna {
namespace {

struct Values {
  // As whole numbers, in the order of which what is no number comes last: it must not be lost.
  static inline float largest(const float* x) {
    uint32x4_t m = vdupq_n_u32(0);
    for (int i = 0; i < 32; i += 4) m = vmaxq_u32(m, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffffu)));
    return float_of_bits(vmaxvq_u32(m));
  }
  // sums: of the first 16 and of the last 16.
  static inline void round(const float* x, float factor, int8_t* q, int* sums) {
    for (int half = 0; half < 2; half++) {
      int32x4_t v[4];
      for (int i = 0; i < 4; i++) v[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 16 * half + 4 * i), factor));
      const int16x8_t low = vcombine_s16(vqmovn_s32(v[0]), vqmovn_s32(v[1])), high = vcombine_s16(vqmovn_s32(v[2]), vqmovn_s32(v[3]));
      const int8x16_t bytes = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
      vst1q_s8(q + 16 * half, bytes);
      sums[half] = vaddlvq_s8(bytes);
    }
  }
};

}  // namespace
}  // namespace puna
