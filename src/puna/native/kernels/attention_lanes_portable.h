// 8 floats in a plain array: the reference of the others, and what runs where none of them does.
#pragma once
#include <cmath>

#include "half.h"

namespace puna {
namespace {

struct Floats {
  struct F { float v[8]; };
  static constexpr int width = 8;
  static constexpr int few_rows = 4;  // that are computed one by one
  static constexpr int tile_rows = 2, tile_vectors = 1, dot_rows = 1, score_rows = 1, score_vectors = 1;

  template <class Of> static inline F each(Of of) {
    F to;
    for (int i = 0; i < width; i++) to.v[i] = of(i);
    return to;
  }
  static inline half half_at(const uint8_t* p) {
    half bits;
    memcpy(&bits, p, 2);
    return bits;
  }
  static inline F zero() { return set(0); }
  static inline F set(float v) { return each([&](int) { return v; }); }
  static inline F load(const float* p) { return each([&](int i) { return p[i]; }); }
  static inline void store(float* p, F v) { memcpy(p, v.v, sizeof(v.v)); }
  static inline F load_half(const uint8_t* p) { return each([&](int i) { return from_half(half_at(p + 2 * i)); }); }
  static inline F load_i8(const uint8_t* p) { return each([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); }); }
  static inline F set_half(const uint8_t* p) { return set(from_half(half_at(p))); }
  static inline F add(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
  static inline F less(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
  static inline F times(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
  static inline F over(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
  static inline F multiply_add(F a, F b, F c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
  static inline F larger(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  static inline F if_less(F a, F b, F yes, F no) { return each([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; }); }
  static inline F whole(F v) { return each([&](int i) { return std::nearbyint(v.v[i]); }); }
  static inline F times_power(F v, F n, F) { return each([&](int i) { return n.v[i] == n.v[i] ? std::ldexp(v.v[i], static_cast<int>(n.v[i])) : n.v[i]; }); }
  static inline float sum(F v) {
    float all = 0;
    for (int i = 0; i < width; i++) all += v.v[i];
    return all;
  }
  static inline float first(F v) { return v.v[0]; }
  static inline float largest(F v) {
    float all = v.v[0];
    for (int i = 1; i < width; i++) all = all > v.v[i] ? all : v.v[i];
    return all;
  }
  static inline void store_sums(float* p, F a, F b, F c, F d) {
    p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
  }
  template <class Of, class Add> static inline auto in_order(const Of& of, const Add& add) {
    auto all = of(0);
    for (int i = 1; i < width; i++) all = add(all, of(i));
    return all;
  }
  static inline bool are_all(const half* p, half bits) {
    for (int i = 0; i < 64; i++)
      if (p[i] != bits) return false;
    return true;
  }
};

}  // namespace
}  // namespace puna
