// 16 rows in plain arrays: the reference of the others, and what runs where none of them does.
#pragma once
#include "half.h"
#define PUNA_PLAIN_LOOPS
#include "product.h"

namespace puna {
namespace {

struct Lanes {
  static constexpr bool has_bfloats = false;
  static constexpr int most_floats_of_tile = 1, most_floats_of_two_stripes = 0;
  static constexpr int width = 16;
  static constexpr bool two_stripes = false;
  static constexpr int most_tokens_in_registers = 0, most_tokens_of_tile = 1;
  static constexpr bool has_dot4 = true;
  struct I { int32_t v[width]; };
  struct F { float v[width]; };

  template <class To, class Of> static PUNA_INLINE To each(Of of) {
    To to;
    for (int i = 0; i < width; i++) to.v[i] = of(i);
    return to;
  }
  // Of each of the four bytes, or both of the 16-bit words, of a lane.
  template <class Of> static PUNA_INLINE int32_t each_byte(int32_t v, Of of) {
    uint32_t all = 0;
    for (int i = 0; i < 32; i += 8) all |= static_cast<uint32_t>(of(static_cast<uint32_t>(v) >> i & 255) & 255) << i;
    return static_cast<int32_t>(all);
  }

  template <int bits> static PUNA_INLINE I dot4(I sum, I weights, I x) {
    return each<I>([&](int i) {
      int32_t s = sum.v[i];
      for (int k = 0; k < 32; k += 8)
        s += static_cast<int32_t>(static_cast<uint32_t>(weights.v[i]) >> k & 255) * static_cast<int8_t>(static_cast<uint32_t>(x.v[i]) >> k & 255);
      return s;
    });
  }
  static PUNA_INLINE I load(const void* p) {
    I to;
    __builtin_memcpy(to.v, p, sizeof(to.v));
    return to;
  }
  static PUNA_INLINE I load_u8(const uint8_t* p) { return each<I>([&](int i) { return p[i]; }); }
  static PUNA_INLINE I load_i8(const int8_t* p) { return each<I>([&](int i) { return p[i]; }); }
  static PUNA_INLINE F load_half(const half* p) { return each<F>([&](int i) { return from_half(p[i]); }); }
  static PUNA_INLINE I four(const void* p) {
    int32_t bytes;
    __builtin_memcpy(&bytes, p, 4);
    return each<I>([&](int) { return bytes; });
  }
  static PUNA_INLINE I low_nibbles(I v) { return both(v, bytes(15)); }
  static PUNA_INLINE I high_nibbles(I v) { return both(right<4>(v), bytes(15)); }
  static PUNA_INLINE I bytes(int v) { return each<I>([&](int) { return static_cast<int32_t>(0x01010101u * static_cast<uint32_t>(v & 255)); }); }
  static PUNA_INLINE I zero() { return each<I>([](int) { return 0; }); }
  static PUNA_INLINE I both(I a, I b) { return each<I>([&](int i) { return a.v[i] & b.v[i]; }); }
  static PUNA_INLINE I either(I a, I b) { return each<I>([&](int i) { return a.v[i] | b.v[i]; }); }
  // Of 16-bit words.
  template <int n> static PUNA_INLINE I left(I v) {
    constexpr uint32_t kept = (0xffffu << n & 0xffffu) * 0x10001u;
    return each<I>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(v.v[i]) << n & kept); });
  }
  template <int n> static PUNA_INLINE I right(I v) {
    constexpr uint32_t kept = (0xffffu >> n) * 0x10001u;
    return each<I>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(v.v[i]) >> n & kept); });
  }
  static PUNA_INLINE const uint8_t* table(const uint8_t* values) { return values; }
  static PUNA_INLINE I look_up(const uint8_t* table, I v) {
    return each<I>([&](int i) { return each_byte(v.v[i], [&](uint32_t byte) { return table[byte & 15]; }); });
  }
  static PUNA_INLINE I pairs(I low, I high) {
    return each<I>([&](int i) { return static_cast<int32_t>((static_cast<uint32_t>(low.v[i]) & 0xffffu) | static_cast<uint32_t>(high.v[i]) << 16); });
  }
  static PUNA_INLINE I multiply_pairs(I a, I b) {
    return each<I>([&](int i) {
      const auto low = [](int32_t v) { return static_cast<int32_t>(static_cast<int16_t>(v & 0xffff)); };
      return low(a.v[i]) * low(b.v[i]) + (a.v[i] >> 16) * (b.v[i] >> 16);
    });
  }
  static PUNA_INLINE I add(I a, I b) { return each<I>([&](int i) { return a.v[i] + b.v[i]; }); }
  static PUNA_INLINE F to_float(I v) { return each<F>([&](int i) { return static_cast<float>(v.v[i]); }); }
  static PUNA_INLINE F as_float(I bits) { return each<F>([&](int i) { return float_of_bits(static_cast<uint32_t>(bits.v[i])); }); }
  template <int n> static PUNA_INLINE I left32(I v) { return each<I>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(v.v[i]) << n); }); }
  template <int n> static PUNA_INLINE I right32(I v) { return each<I>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(v.v[i]) >> n); }); }
  static PUNA_INLINE I less(I a, I b) { return each<I>([&](int i) { return a.v[i] - b.v[i]; }); }
  static PUNA_INLINE I whole(int v) { return each<I>([&](int) { return v; }); }
  static PUNA_INLINE F set(float v) { return each<F>([&](int) { return v; }); }
  static PUNA_INLINE F times(F a, F b) { return each<F>([&](int i) { return a.v[i] * b.v[i]; }); }
  static PUNA_INLINE F multiply_add(F a, F b, F c) { return each<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
  static PUNA_INLINE F multiply_less(F a, F b, F c) { return each<F>([&](int i) { return a.v[i] * b.v[i] - c.v[i]; }); }
  static PUNA_INLINE void keep(I& v) { __asm__ volatile("" : "+m"(v)); }
  static PUNA_INLINE void store(float* p, F v) { __builtin_memcpy(p, v.v, sizeof(v.v)); }
};

}  // namespace
}  // namespace puna
