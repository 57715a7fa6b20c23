// The tile instructions in plain C++, as Intel's manual describes them (volume 1, chapter 18, and volume 2: LDTILECFG, TDPBSUD,
// TDPBF16PS, TILELOADD, TILESTORED, TILERELEASE, TILEZERO). What the manual says raises an exception ends the process.
// emulated_fault: 1, products are wrong by one; 2, the first product ends the process.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace puna {

extern int emulated_fault;

namespace {

struct EmulatedTiles {
  bool are_shaped = false;
  int rows[8], row_bytes[8];
  uint8_t bytes[8][16][64];
};
thread_local EmulatedTiles emulated;

inline void must(bool holds) {
  if (!holds) abort();
}

inline bool has_tiles() { return true; }

inline void shape_tiles(const TileShapes& shapes) {
  must(shapes.palette == 1 && shapes.start_row == 0);
  for (uint8_t byte : shapes.reserved) must(byte == 0);
  for (int i = 0; i < 16; i++) {
    must(shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64 && (i < 8 || (shapes.rows[i] == 0 && shapes.row_bytes[i] == 0)));
    must((shapes.rows[i] == 0) == (shapes.row_bytes[i] == 0));
  }
  for (int i = 0; i < 8; i++) emulated.rows[i] = shapes.rows[i], emulated.row_bytes[i] = shapes.row_bytes[i];
  memset(emulated.bytes, 0, sizeof(emulated.bytes));
  emulated.are_shaped = true;
}

inline void release_tiles() { emulated.are_shaped = false; }

inline void use(int tile) { must(emulated.are_shaped && emulated.rows[tile] > 0); }

template <int tile> inline void zero_tile() {
  use(tile);
  memset(emulated.bytes[tile], 0, sizeof(emulated.bytes[tile]));
}

template <int tile> inline void load_tile(const void* from, int64_t stride) {
  use(tile);
  memset(emulated.bytes[tile], 0, sizeof(emulated.bytes[tile]));
  for (int r = 0; r < emulated.rows[tile]; r++)
    memcpy(emulated.bytes[tile][r], static_cast<const char*>(from) + r * stride, static_cast<size_t>(emulated.row_bytes[tile]));
}

template <int tile> inline void store_tile(void* to, int64_t stride) {
  use(tile);
  for (int r = 0; r < emulated.rows[tile]; r++)
    memcpy(static_cast<char*>(to) + r * stride, emulated.bytes[tile][r], static_cast<size_t>(emulated.row_bytes[tile]));
}

template <int sums, int first, int second> inline void use_for_product() {
  use(sums), use(first), use(second);
  must(sums != first && sums != second && first != second);
  must(emulated.rows[sums] == emulated.rows[first] && emulated.row_bytes[sums] == emulated.row_bytes[second]);
  must(emulated.row_bytes[first] == 4 * emulated.rows[second]);
  must(emulated_fault != 2);
}

template <int sums, int first, int second> inline void multiply_bytes() {
  use_for_product<sums, first, second>();
  for (int m = 0; m < emulated.rows[sums]; m++)
    for (int n = 0; n < emulated.row_bytes[sums] / 4; n++) {
      int32_t sum;
      memcpy(&sum, emulated.bytes[sums][m] + 4 * n, 4);
      uint32_t total = static_cast<uint32_t>(sum);
      for (int k = 0; k < emulated.rows[second]; k++)
        for (int i = 0; i < 4; i++)
          total += static_cast<uint32_t>(static_cast<int8_t>(emulated.bytes[first][m][4 * k + i]) * emulated.bytes[second][k][4 * n + i]);
      total += emulated_fault == 1;
      memcpy(emulated.bytes[sums][m] + 4 * n, &total, 4);
    }
}

inline float emulated_bfloat(const uint8_t* bytes) {
  uint16_t half;
  memcpy(&half, bytes, 2);
  if ((half & 0x7f80) == 0) half &= 0x8000;  // what is too small for a normal number is zero
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <int sums, int first, int second> inline void multiply_pairs_of_bfloats() {
  use_for_product<sums, first, second>();
  for (int m = 0; m < emulated.rows[sums]; m++)
    for (int n = 0; n < emulated.row_bytes[sums] / 4; n++) {
      float parts[2] = {0, 0}, sum;
      for (int k = 0; k < emulated.rows[second]; k++)
        for (int i = 0; i < 2; i++)
          parts[i] = __builtin_fmaf(emulated_bfloat(emulated.bytes[first][m] + 4 * k + 2 * i),
                                    emulated_bfloat(emulated.bytes[second][k] + 4 * n + 2 * i), parts[i]);
      memcpy(&sum, emulated.bytes[sums][m] + 4 * n, 4);
      sum += parts[0] + parts[1];
      if (emulated_fault == 1) sum += 1.0f;
      memcpy(emulated.bytes[sums][m] + 4 * n, &sum, 4);
    }
}

}  // namespace
}  // namespace puna
