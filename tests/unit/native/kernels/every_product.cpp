// Every format with every instruction set of this processor in blocks of memory of exactly the size they need, for a build
// with the compiler's sanitizers. Ends with 0 when they found nothing and all instruction sets agree.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

extern "C" {
const char* puna_instructions(int);
bool puna_use_instructions(const char*);
int64_t puna_packed_bytes(int, int64_t, int64_t);
void puna_pack(int, const void*, int64_t, int64_t, int64_t, void*);
void puna_unpack(int, const void*, int64_t, int64_t, float*);
int puna_rounding(int);
int64_t puna_rounded_bytes(int, int64_t, int64_t);
void puna_round(int, const float*, int64_t, int64_t, void*);
void* puna_matrix_new(int, int64_t, int64_t);
void puna_matrix_free(void*);
void puna_multiply(void*, const void*, const void*, int64_t, float*);
}

static uint32_t state = 1;
static uint32_t random_bits() { return state = state * 1664525u + 1013904223u; }

template <class T> T* block(int64_t n) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, static_cast<size_t>(n) * sizeof(T) + (n == 0))) abort();
  return static_cast<T*>(memory);
}

int main() {
  struct Format { int type, weights, bytes, scales[2]; };
  const Format formats[] = {{2, 32, 18, {0, 0}},   {3, 32, 20, {0, 2}},     {6, 32, 22, {0, 0}},    {7, 32, 24, {0, 2}},
                            {8, 32, 34, {0, 0}},   {12, 256, 144, {0, 2}},  {13, 256, 176, {0, 2}}, {14, 256, 210, {208, 208}},
                            {20, 32, 18, {0, 0}},  {23, 256, 136, {0, 0}}};
  const int64_t row_counts[] = {1, 15, 16, 17, 50}, token_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 64, 65};
  double worst = 0;
  for (const Format& f : formats)
    for (int64_t blocks : {1, 2, 3, 5})
      for (int64_t rows : row_counts) {
        const int64_t n_in = blocks * f.weights, n_bytes = rows * blocks * f.bytes;
        uint8_t* file = block<uint8_t>(n_bytes);
        for (int64_t i = 0; i < n_bytes; i++) file[i] = static_cast<uint8_t>(random_bits() >> 24);
        for (int64_t b = 0; b < rows * blocks; b++)
          for (int at : f.scales) {
            file[b * f.bytes + at] = static_cast<uint8_t>(random_bits() >> 24);
            file[b * f.bytes + at + 1] = 0x20 | (random_bits() >> 24 & 0x83);  // of size 2^-7
          }
        uint8_t* packed = block<uint8_t>(puna_packed_bytes(f.type, n_in, rows));
        memset(packed, 0, static_cast<size_t>(puna_packed_bytes(f.type, n_in, rows)));
        puna_pack(f.type, file, n_in, 0, rows, packed);
        float* row = block<float>(n_in);
        puna_unpack(f.type, packed, n_in, rows - 1, row);
        void* matrix = puna_matrix_new(f.type, n_in, rows);
        for (int64_t n : token_counts) {
          float *x = block<float>(n * n_in), *expected = block<float>(n * rows), *y = block<float>(n * rows);
          for (int64_t i = 0; i < n * n_in; i++) x[i] = static_cast<float>(static_cast<int32_t>(random_bits())) / 1e9f;
          uint8_t* rounded = block<uint8_t>(puna_rounded_bytes(puna_rounding(f.type), n_in, n));
          puna_use_instructions("portable");
          puna_round(f.type, x, n_in, n, rounded);
          puna_multiply(matrix, packed, rounded, n, expected);
          for (int i = 0; puna_instructions(i); i++) {
            if (!puna_use_instructions(puna_instructions(i))) continue;
            puna_round(f.type, x, n_in, n, rounded);
            puna_multiply(matrix, packed, rounded, n, y);
            double squares = 0, of_all = 1e-12;
            for (int64_t k = 0; k < n * rows; k++) {
              squares += (y[k] - expected[k]) * (y[k] - expected[k]);
              of_all += expected[k] * expected[k];
            }
            worst = std::fmax(worst, std::sqrt(squares / of_all));
          }
          free(x), free(expected), free(y), free(rounded);
        }
        puna_matrix_free(matrix);
        free(file), free(packed), free(row);
      }
  printf("%.3g\n", worst);
  return worst < 1e-5 ? 0 : 1;
}
