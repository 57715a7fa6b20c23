// The tile registers of AMX: up to 16 rows of up to 64 bytes each. Products of them are added to a third: for each row of the
// first and each four bytes across the second, whose rows hold four bytes for each column.
//
// Written as instructions, since older compilers do not say which memory their own functions for them read and write. What
// PUNA_EMULATED_TILES names has the same functions in plain C++.
#pragma once
#include <cstdint>

#include "formats.h"

namespace puna {
namespace {

// What ldtilecfg reads.
struct alignas(line) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t n_rows, int n_bytes) {
    if (n_rows == 0) return;  // a tile that is not used
    rows[tile] = static_cast<uint8_t>(n_rows);
    row_bytes[tile] = static_cast<uint16_t>(n_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64, "");

}  // namespace
}  // namespace puna

#ifdef PUNA_EMULATED_TILES
#include PUNA_EMULATED_TILES
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace puna {
namespace {

// By the processor's own word, that the system keeps the registers (XCR0), and that it lets this process use them, which it is
// asked for.
inline bool has_tiles() {
  constexpr unsigned features = 1u << 22 | 1u << 24 | 1u << 25, kept = 3u << 17;  // bf16, tile, int8
  constexpr long ask = 0x1023, tile_data = 18;
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & features) != features) return false;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
#ifdef __linux__
  return (low & kept) == kept && syscall(SYS_arch_prctl, ask, tile_data) == 0;
#else
  return false;
#endif
}

inline void shape_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release_tiles() { __asm__ volatile("tilerelease"); }
template <int tile> inline void zero_tile() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile)); }

template <int tile> inline void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile> inline void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// Whole numbers: bytes with sign of the first by bytes without of the second.
template <int sums, int first, int second> inline void multiply_bytes() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(first), "i"(second));
}

template <int sums, int first, int second> inline void multiply_pairs_of_bfloats() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(first), "i"(second));
}

}  // namespace
}  // namespace puna
#endif
