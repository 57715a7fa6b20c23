#include "packing.h"

#include <cstring>

#include "half.h"

namespace puna {
namespace {

constexpr uint32_t nibbles = 0x0f0f0f0f;

uint32_t four(const void* bytes) {
  uint32_t value;
  memcpy(&value, bytes, 4);
  return value;
}

void put(uint8_t* at, uint32_t value) { memcpy(at, &value, 4); }

// The 6-bit factors of Q4_K and Q5_K.
void factors(const uint8_t* s, int j, uint8_t& scale, uint8_t& minimum) {
  if (j < 4) {
    scale = s[j] & 63;
    minimum = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
    minimum = (s[j + 4] >> 4) | (s[j] >> 6 << 4);
  }
}

// 32 fifth bits, of which bit i belongs to weight i, to one bit of each of the row's four bytes per group.
uint32_t fifth_bits(uint32_t bits) {
  uint32_t packed = 0;
  for (int g = 0; g < 8; g++)
    for (int i = 0; i < 4; i++) packed |= (bits >> (4 * g + i) & 1) << (8 * i + g);
  return packed;
}


void put_nibbles(uint8_t (*lines)[line], int r, const uint8_t* q) {
  for (int l = 0; l < 4; l++) put(lines[l] + 4 * r, four(q + 4 * l));
}

// 32 nibbles that are all low or all high ones of 32 bytes.
void put_half_bytes(uint8_t (*lines)[line], int r, const uint8_t* q, int shift) {
  for (int l = 0; l < 4; l++) {
    const uint32_t low = four(q + 4 * l) >> shift & nibbles, high = four(q + 4 * l + 16) >> shift & nibbles;
    put(lines[l] + 4 * r, low | high << 4);
  }
}

void put_block(const FileQ4_0& from, PackedQ4_0& to, int part, int r) {
  put_nibbles(to.q[part], r, from.q);
  to.d[part][r] = from.d;
}

void put_block(const FileQ4_1& from, PackedQ4_1& to, int, int r) {
  put_nibbles(to.q, r, from.q);
  to.d[r] = from.d;
  to.m[r] = from.m;
}

void put_block(const FileQ5_0& from, PackedQ5_0& to, int part, int r) {
  put_nibbles(to.q[part], r, from.q);
  put(to.h[part] + 4 * r, fifth_bits(four(from.h)));
  to.d[part][r] = from.d;
}

void put_block(const FileQ5_1& from, PackedQ5_1& to, int, int r) {
  put_nibbles(to.q, r, from.q);
  put(to.h + 4 * r, fifth_bits(four(from.h)));
  to.d[r] = from.d;
  to.m[r] = from.m;
}

void put_block(const FileQ8_0& from, PackedQ8_0& to, int part, int r) {
  for (int l = 0; l < 8; l++) put(to.q[part][l] + 4 * r, four(from.q + 4 * l) ^ 0x80808080);  // plus 128
  to.d[part][r] = from.d;
}

// Two bits of each of 32 bytes, to two lines: groups 0, 2, 4, 6 and 1, 3, 5, 7.
void put_pairs_of_bits(uint8_t (*lines)[line], int r, const uint8_t* q, int shift) {
  uint32_t bits[2] = {0, 0};
  for (int g = 0; g < 8; g++) bits[g & 1] |= (four(q + 4 * g) >> shift & 0x03030303) << (g & ~1);
  put(lines[0] + 4 * r, bits[0]);
  put(lines[1] + 4 * r, bits[1]);
}

// Bit j of each of 32 bytes, to one bit of each of the row's four bytes per group.
uint32_t bits_of_bytes(const uint8_t* h, int j) {
  uint32_t bits = 0;
  for (int g = 0; g < 8; g++) bits |= (four(h + 4 * g) >> j & 0x01010101) << g;
  return bits;
}

void put_block(const FileQ2_K& from, PackedQ2_K& to, int, int r) {
  for (int j = 0; j < 8; j++) put_pairs_of_bits(to.q[j], r, from.q + j / 4 * 32, j % 4 * 2);
  for (int j = 0; j < 16; j++) to.s[j][r] = from.s[j];
  to.d[r] = from.d;
  to.m[r] = from.m;
}

void put_block(const FileQ3_K& from, PackedQ3_K& to, int, int r) {
  for (int j = 0; j < 8; j++) {
    put_pairs_of_bits(to.q[j], r, from.q + j / 4 * 32, j % 4 * 2);
    put(to.h[j] + 4 * r, bits_of_bytes(from.h, j));
  }
  for (int j = 0; j < 16; j++) {
    const int low = from.s[j % 8] >> (j / 8 * 4) & 15, high = from.s[8 + j % 4] >> (j / 4 * 2) & 3;
    to.s[j][r] = static_cast<int8_t>((low | high << 4) - 32);
  }
  to.d[r] = from.d;
}

void put_block(const FileQ4_K& from, PackedQ4_K& to, int, int r) {
  for (int j = 0; j < 8; j++) {
    put_half_bytes(to.q[j], r, from.q + j / 2 * 32, j % 2 * 4);
    factors(from.s, j, to.s[j][r], to.t[j][r]);
  }
  to.d[r] = from.d;
  to.m[r] = from.m;
}

void put_block(const FileQ5_K& from, PackedQ5_K& to, int, int r) {
  for (int j = 0; j < 8; j++) {
    put_half_bytes(to.q[j], r, from.q + j / 2 * 32, j % 2 * 4);
    factors(from.s, j, to.s[j][r], to.t[j][r]);
    put(to.h[j] + 4 * r, bits_of_bytes(from.h, j));
  }
  to.d[r] = from.d;
  to.m[r] = from.m;
}

void put_block(const FileQ6_K& from, PackedQ6_K& to, int, int r) {
  for (int j = 0; j < 8; j++) {
    const int side = j / 4, c = j % 4;  // 128 weights each; c: which 32 of them
    put_half_bytes(to.q[j], r, from.q + 64 * side + 32 * (c & 1), c / 2 * 4);
    put_pairs_of_bits(to.h[j], r, from.h + 32 * side, 2 * c);
  }
  for (int j = 0; j < 16; j++) to.s[j][r] = from.s[j];
  to.d[r] = from.d;
}

void put_block(const FileIQ4_XS& from, PackedIQ4_XS& to, int, int r) {
  for (int j = 0; j < 8; j++) {
    put_nibbles(to.q[j], r, from.q + 16 * j);
    const int low = from.s[j / 2] >> (j % 2 * 4) & 15, high = from.h >> (2 * j) & 3;
    to.s[j][r] = static_cast<int8_t>((low | high << 4) - 32);
  }
  to.d[r] = from.d;
}

void put_block(const FileMXFP4& from, PackedMXFP4& to, int part, int r) {
  put_nibbles(to.q[part], r, from.q);
  to.e[part][r] = from.e;
}

void put_block(const FileFloats& from, PackedF32& to, int, int r) {
  for (int k = 0; k < 32; k++) to.q[k][r] = from.q[k];
}

void put_block(const FileHalves& from, PackedF16& to, int, int r) {
  for (int k = 0; k < 32; k++) to.q[k][r] = from.q[k];
}

void put_block(const FileHalves& from, PackedBF16& to, int, int r) {
  for (int k = 0; k < 32; k++) to.q[k / 2][r][k % 2] = from.q[k];
}

// *weights* in a block of the file, of which so many *parts* share a block of the stripe. Of floats the last block of a row may
// have fewer; zeros follow them.
template <class File, class Packed, int weights, int parts>
void pack_as(const uint8_t* rows, int64_t n_in, int64_t first, int64_t n_rows, uint8_t* packed) {
  constexpr int64_t bytes = sizeof(File);
  const int64_t n_whole = n_in / weights, row_bytes = n_in * bytes / weights, rest = row_bytes - n_whole * bytes;
  const int64_t n_blocks = n_whole + (rest > 0), n_packed = (n_blocks + parts - 1) / parts;
  Packed* to = reinterpret_cast<Packed*>(packed);
  for (int64_t row = first; row < first + n_rows;) {
    const int64_t end = row / 16 * 16 + 16 < first + n_rows ? row / 16 * 16 + 16 : first + n_rows;
    for (int64_t b = 0; b < n_blocks; b++)
      for (int64_t i = row; i < end; i++) {
        const uint8_t* from = rows + (i - first) * row_bytes + b * bytes;
        Packed& target = to[row / 16 * n_packed + b / parts];
        File last = {};
        if (b == n_whole) memcpy(&last, from, static_cast<size_t>(rest));
        put_block(b == n_whole ? last : *reinterpret_cast<const File*>(from), target, static_cast<int>(b % parts), static_cast<int>(i % 16));
      }
    row = end;
  }
}

// ---- back

int nibble(const uint8_t (*lines)[line], int r, int k) {
  const int g = k / 4;
  return lines[g & 3][4 * r + k % 4] >> (g < 4 ? 0 : 4) & 15;
}

int fifth(const uint8_t* bits, int r, int k) { return (bits[4 * r + k % 4] >> (k / 4) & 1) << 4; }

void get_32(const PackedQ4_0& p, int part, int r, float* y) {
  const float d = from_half(p.d[part][r]);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(nibble(p.q[part], r, k) - 8);
}

void get_32_nonlinear(const PackedQ4_0& p, int part, int r, float* y) {
  const float d = from_half(p.d[part][r]);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(nonlinear[nibble(p.q[part], r, k)]);
}

void get_32(const PackedQ4_1& p, int, int r, float* y) {
  const float d = from_half(p.d[r]), m = from_half(p.m[r]);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(nibble(p.q, r, k)) + m;
}

void get_32(const PackedQ5_0& p, int part, int r, float* y) {
  const float d = from_half(p.d[part][r]);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>((nibble(p.q[part], r, k) | fifth(p.h[part], r, k)) - 16);
}

void get_32(const PackedQ5_1& p, int, int r, float* y) {
  const float d = from_half(p.d[r]), m = from_half(p.m[r]);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(nibble(p.q, r, k) | fifth(p.h, r, k)) + m;
}

void get_32(const PackedQ8_0& p, int part, int r, float* y) {
  const float d = from_half(p.d[part][r]);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(p.q[part][k / 4][4 * r + k % 4] - 128);
}

int pair_of_bits(const uint8_t (*lines)[line], int r, int k) {
  const int g = k / 4;
  return lines[g & 1][4 * r + k % 4] >> (g & ~1) & 3;
}

void get_32(const PackedQ2_K& p, int j, int r, float* y) {
  for (int k = 0; k < 32; k++) {
    const uint8_t s = p.s[2 * j + k / 16][r];
    y[k] = from_half(p.d[r]) * static_cast<float>(s & 15) * static_cast<float>(pair_of_bits(p.q[j], r, k)) -
           from_half(p.m[r]) * static_cast<float>(s >> 4);
  }
}

void get_32(const PackedQ3_K& p, int j, int r, float* y) {
  for (int k = 0; k < 32; k++) {
    const int q = pair_of_bits(p.q[j], r, k) | (p.h[j][4 * r + k % 4] >> (k / 4) & 1) << 2;
    y[k] = from_half(p.d[r]) * static_cast<float>(p.s[2 * j + k / 16][r]) * static_cast<float>(q - 4);
  }
}

void get_32(const PackedQ4_K& p, int j, int r, float* y) {
  const float d = from_half(p.d[r]) * p.s[j][r], m = from_half(p.m[r]) * p.t[j][r];
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(nibble(p.q[j], r, k)) - m;
}

void get_32(const PackedQ5_K& p, int j, int r, float* y) {
  const float d = from_half(p.d[r]) * p.s[j][r], m = from_half(p.m[r]) * p.t[j][r];
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(nibble(p.q[j], r, k) | fifth(p.h[j], r, k)) - m;
}

void get_32(const PackedQ6_K& p, int j, int r, float* y) {
  const float d = from_half(p.d[r]);
  for (int k = 0; k < 32; k++) {
    const int high = pair_of_bits(p.h[j], r, k);
    y[k] = d * static_cast<float>(p.s[2 * j + k / 16][r]) * static_cast<float>((nibble(p.q[j], r, k) | high << 4) - 32);
  }
}

void get_32(const PackedIQ4_XS& p, int j, int r, float* y) {
  const float d = from_half(p.d[r]) * static_cast<float>(p.s[j][r]);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(nonlinear[nibble(p.q[j], r, k)]);
}

void get_32(const PackedMXFP4& p, int part, int r, float* y) {
  const uint32_t e = p.e[part][r];
  const float d = float_of_bits(e < 2 ? 0x200000u << e : (e - 1) << 23);
  for (int k = 0; k < 32; k++) y[k] = d * static_cast<float>(fourbits[nibble(p.q[part], r, k)]);
}

void get_32(const PackedF32& p, int, int r, float* y) {
  for (int k = 0; k < 32; k++) y[k] = p.q[k][r];
}

void get_32(const PackedF16& p, int, int r, float* y) {
  for (int k = 0; k < 32; k++) y[k] = from_half(p.q[k][r]);
}

void get_32(const PackedBF16& p, int, int r, float* y) {
  for (int k = 0; k < 32; k++) y[k] = float_of_bits(static_cast<uint32_t>(p.q[k / 2][r][k % 2]) << 16);
}

template <class Packed, int parts> using Get = void (*)(const Packed&, int, int, float*);

template <class Packed, int parts>
void unpack_as(const uint8_t* packed, int64_t n_in, int64_t row, float* y, Get<Packed, parts> get = get_32) {
  const int64_t n_blocks = n_in / 32, rest = n_in % 32, n_packed = (n_blocks + (rest > 0) + parts - 1) / parts;
  const Packed* from = reinterpret_cast<const Packed*>(packed) + row / 16 * n_packed;
  for (int64_t b = 0; b < n_blocks; b++)
    get(from[b / parts], static_cast<int>(b % parts), static_cast<int>(row % 16), y + 32 * b);
  if (!rest) return;
  float last[32];
  get(from[n_blocks / parts], static_cast<int>(n_blocks % parts), static_cast<int>(row % 16), last);
  memcpy(y + 32 * n_blocks, last, static_cast<size_t>(rest) * sizeof(float));
}

}  // namespace

void pack(const Format& format, const uint8_t* rows, int64_t n_in, int64_t first, int64_t n, uint8_t* packed) {
  switch (format.type) {
    case type_iq4_nl:
    case type_q4_0: return pack_as<FileQ4_0, PackedQ4_0, 32, 2>(rows, n_in, first, n, packed);
    case type_q4_1: return pack_as<FileQ4_1, PackedQ4_1, 32, 1>(rows, n_in, first, n, packed);
    case type_q5_0: return pack_as<FileQ5_0, PackedQ5_0, 32, 2>(rows, n_in, first, n, packed);
    case type_q5_1: return pack_as<FileQ5_1, PackedQ5_1, 32, 1>(rows, n_in, first, n, packed);
    case type_q8_0: return pack_as<FileQ8_0, PackedQ8_0, 32, 2>(rows, n_in, first, n, packed);
    case type_q2_k: return pack_as<FileQ2_K, PackedQ2_K, 256, 1>(rows, n_in, first, n, packed);
    case type_q3_k: return pack_as<FileQ3_K, PackedQ3_K, 256, 1>(rows, n_in, first, n, packed);
    case type_q4_k: return pack_as<FileQ4_K, PackedQ4_K, 256, 1>(rows, n_in, first, n, packed);
    case type_q5_k: return pack_as<FileQ5_K, PackedQ5_K, 256, 1>(rows, n_in, first, n, packed);
    case type_q6_k: return pack_as<FileQ6_K, PackedQ6_K, 256, 1>(rows, n_in, first, n, packed);
    case type_iq4_xs: return pack_as<FileIQ4_XS, PackedIQ4_XS, 256, 1>(rows, n_in, first, n, packed);
    case type_mxfp4: return pack_as<FileMXFP4, PackedMXFP4, 32, 4>(rows, n_in, first, n, packed);
    case type_f32: return pack_as<FileFloats, PackedF32, 32, 1>(rows, n_in, first, n, packed);
    case type_f16: return pack_as<FileHalves, PackedF16, 32, 1>(rows, n_in, first, n, packed);
    case type_bf16: return pack_as<FileHalves, PackedBF16, 32, 1>(rows, n_in, first, n, packed);
  }
}

void unpack_row(const Format& format, const uint8_t* packed, int64_t n_in, int64_t row, float* y) {
  switch (format.type) {
    case type_q4_0: return unpack_as<PackedQ4_0, 2>(packed, n_in, row, y);
    case type_iq4_nl: return unpack_as<PackedQ4_0, 2>(packed, n_in, row, y, get_32_nonlinear);
    case type_q4_1: return unpack_as<PackedQ4_1, 1>(packed, n_in, row, y);
    case type_q5_0: return unpack_as<PackedQ5_0, 2>(packed, n_in, row, y);
    case type_q5_1: return unpack_as<PackedQ5_1, 1>(packed, n_in, row, y);
    case type_q8_0: return unpack_as<PackedQ8_0, 2>(packed, n_in, row, y);
    case type_q2_k: return unpack_as<PackedQ2_K, 8>(packed, n_in, row, y);
    case type_q3_k: return unpack_as<PackedQ3_K, 8>(packed, n_in, row, y);
    case type_q4_k: return unpack_as<PackedQ4_K, 8>(packed, n_in, row, y);
    case type_q5_k: return unpack_as<PackedQ5_K, 8>(packed, n_in, row, y);
    case type_q6_k: return unpack_as<PackedQ6_K, 8>(packed, n_in, row, y);
    case type_iq4_xs: return unpack_as<PackedIQ4_XS, 8>(packed, n_in, row, y);
    case type_mxfp4: return unpack_as<PackedMXFP4, 4>(packed, n_in, row, y);
    case type_f32: return unpack_as<PackedF32, 1>(packed, n_in, row, y);
    case type_f16: return unpack_as<PackedF16, 1>(packed, n_in, row, y);
    case type_bf16: return unpack_as<PackedBF16, 1>(packed, n_in, row, y);
  }
}

}  // namespace puna
