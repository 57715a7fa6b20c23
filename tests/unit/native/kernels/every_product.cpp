// Every format with every instruction set of this processor in blocks of memory of exactly the size they need, for a build
// with the compiler's sanitizers. Ends with 0 when they found nothing and all instruction sets agree.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "node.h"

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
void* puna_experts_new(int, int, int64_t, int64_t, int64_t, int);
void puna_experts_free(void*);
int64_t puna_ordered_bytes(const void*, int64_t);
void puna_order_node(void*, int, int, void*);
void puna_experts_node(void*, int, int, void*);
void puna_token_experts_node(void*, int, int, void*);
void* puna_linear_new(const int32_t*, const int64_t*, int, int64_t, int, float, int);
void puna_linear_free(void*);
void* puna_normaliser_new(int, float);
void puna_normaliser_free(void*);
void puna_normalise_node(void*, int, int, void*);
void puna_linear_node(void*, int, int, void*);
void puna_column_linear_node(void*, int, int, void*);
void puna_normalise(const float*, const float*, float, float*, int64_t);
void puna_gate(int, const float*, const float*, float*, int64_t);
}

static uint32_t state = 1;
static uint32_t random_bits() { return state = state * 1664525u + 1013904223u; }

template <class T> T* block(int64_t n) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, static_cast<size_t>(n) * sizeof(T) + (n == 0))) abort();
  return static_cast<T*>(memory);
}

struct Format { int type, weights, bytes, scales[2]; };

// Of which the last block of a row need not be whole.
static bool is_of_floats(const Format& f) { return f.type == 0 || f.type == 1 || f.type == 30; }

static uint8_t* random_file(const Format& f, int64_t n_blocks) {
  uint8_t* file = block<uint8_t>(n_blocks * f.bytes);
  for (int64_t i = 0; i < n_blocks * f.bytes; i++) file[i] = static_cast<uint8_t>(random_bits() >> 24);
  for (int64_t b = 0; b < n_blocks; b++) {
    for (int k = 0; f.type == 0 && k < 32; k++) {
      const float value = static_cast<float>(random_bits() >> 8) / (1 << 23) - 1;
      memcpy(file + b * f.bytes + 4 * k, &value, 4);
    }
    if (f.type == 39) file[b * f.bytes] = static_cast<uint8_t>(120 + random_bits() % 8);
    for (int k = 1; f.scales[0] < 0 && f.bytes == 64 && k < 64; k += 2) file[b * f.bytes + k] = 0x3c | (file[b * f.bytes + k] & 0x82);  // about 1
  }
  for (int64_t b = 0; b < n_blocks; b++)
    for (int at : f.scales) {
      if (at < 0) continue;
      file[b * f.bytes + at] = static_cast<uint8_t>(random_bits() >> 24);
      file[b * f.bytes + at + 1] = 0x20 | (random_bits() >> 24 & 0x83);  // of size 2^-7
    }
  return file;
}

static float* random_values(int64_t n) {
  float* x = block<float>(n);
  for (int64_t i = 0; i < n; i++) x[i] = static_cast<float>(static_cast<int32_t>(random_bits())) / 1e9f;
  return x;
}

static double difference(const float* found, const float* expected, int64_t n) {
  double squares = 0, of_all = 1e-12;
  for (int64_t k = 0; k < n; k++) {
    squares += (found[k] - expected[k]) * (found[k] - expected[k]);
    of_all += expected[k] * expected[k];
  }
  return std::sqrt(squares / of_all);
}

static puna::Tensor tensor(void* data, int64_t n0, int64_t n1, int64_t n2) {
  puna::Tensor t;
  memset(&t, 0, sizeof(t));
  t.data = data;
  const int64_t ne[4] = {n0, n1, n2, 1};
  size_t bytes = 4;
  for (int i = 0; i < 4; i++) t.ne[i] = ne[i], t.nb[i] = bytes, bytes *= static_cast<size_t>(ne[i]);
  return t;
}

// The nodes of experts by two threads that come one after the other, against each column's own product; or gated, up being the
// matrix of the expert after.
static double experts(const Format& f, int64_t n_inputs, int64_t n, int gate) {
  const int64_t n_in = 3 * f.weights - (is_of_floats(f) ? 7 : 0), n_rows = 37, n_experts = 5, n_used = 2, bytes = puna_packed_bytes(f.type, n_in, n_rows);
  uint8_t *file = random_file(f, 3 * n_rows * n_experts), *packed = block<uint8_t>(bytes * (n_experts + 1));
  memset(packed, 0, static_cast<size_t>(bytes * (n_experts + 1)));
  for (int64_t e = 0; e < n_experts; e++) puna_pack(f.type, file + e * n_in * n_rows * f.bytes / f.weights, n_in, 0, n_rows, packed + e * bytes);
  memcpy(packed + n_experts * bytes, packed, static_cast<size_t>(bytes));
  float up[37];
  float *x = random_values(n_in * n_inputs * n), *y = block<float>(n_rows * n_used * n), *expected = block<float>(n_rows * n_used * n);
  int32_t* ids = block<int32_t>(n_used * n);
  void *all = puna_experts_new(f.type, f.type, n_in, n_rows, n_experts, gate), *one = puna_matrix_new(f.type, n_in, n_rows);
  uint8_t *ordered = block<uint8_t>(puna_ordered_bytes(all, n_used * n)), *rounded = block<uint8_t>(puna_rounded_bytes(puna_rounding(f.type), n_in, 1));
  for (int64_t i = 0; i < n_used * n; i++) {
    ids[i] = static_cast<int32_t>((i + i / 7) % n_experts);
    puna_round(f.type, x + (n_inputs == 1 ? i / n_used : i) * n_in, n_in, 1, rounded);
    puna_multiply(one, packed + ids[i] * bytes, rounded, 1, expected + i * n_rows);
    if (!gate) continue;
    puna_multiply(one, packed + (ids[i] + 1) * bytes, rounded, 1, up);
    puna_gate(gate, expected + i * n_rows, up, expected + i * n_rows, n_rows);
  }
  puna::Tensor tu = tensor(packed + bytes, bytes, 1, 1);
  puna::Tensor tx = tensor(x, n_in, n_inputs, n), ti = tensor(ids, n_used, n, 1), tw = tensor(packed, bytes, 1, 1);
  puna::Tensor to = tensor(ordered, 1, 1, 1), ty = tensor(y, n_rows, n_used, n);
  if (n == 1) {
    ty.src[0] = &tx, ty.src[1] = &ti, ty.src[2] = &tw, ty.src[3] = &tu;
    for (int thread = 0; thread < 2; thread++) puna_token_experts_node(&ty, thread, 2, all);
  } else {
    to.src[0] = &tx, to.src[1] = &ti;
    for (int thread = 0; thread < 2; thread++) puna_order_node(&to, thread, 2, all);
    ty.src[0] = &to, ty.src[1] = &tw, ty.src[2] = &tu;
    for (int thread = 0; thread < 2; thread++) puna_experts_node(&ty, thread, 2, all);
  }
  const double found = difference(y, expected, n_rows * n_used * n);
  puna_experts_free(all), puna_matrix_free(one);
  free(file), free(packed), free(x), free(y), free(expected), free(ids), free(ordered), free(rounded);
  return found;
}

// Nodes of two matrices with a norm before them, by two threads that come one after the other: their rows and what is added,
// or gated, against each matrix's own product of the same normalised values.
static double linears(const Format& f, int64_t n_rows, int64_t n, int gate) {
  const int64_t n_in = 2 * f.weights - (is_of_floats(f) ? 5 : 0), bytes = puna_packed_bytes(f.type, n_in, n_rows), width = gate ? n_rows : 2 * n_rows;
  const int rounding = puna_rounding(f.type);
  const float eps = 1e-5f;
  uint8_t *packed[2], *rounded = block<uint8_t>(puna_rounded_bytes(rounding, n_in, n));
  float *x = random_values(n_in * n), *weight = random_values(n_in), *normal = block<float>(n_in * n);
  float *y = block<float>(width * n), *expected = block<float>(width * n), *added = random_values(width * n), *parts[2];
  for (int64_t t = 0; t < n; t++) puna_normalise(x + t * n_in, weight, eps, normal + t * n_in, n_in);
  puna_round(f.type, normal, n_in, n, rounded);
  void* one = puna_matrix_new(f.type, n_in, n_rows);
  for (int i = 0; i < 2; i++) {
    uint8_t* file = random_file(f, 2 * n_rows);
    packed[i] = block<uint8_t>(bytes);
    parts[i] = block<float>(n_rows * n);
    memset(packed[i], 0, static_cast<size_t>(bytes));
    puna_pack(f.type, file, n_in, 0, n_rows, packed[i]);
    puna_multiply(one, packed[i], rounded, n, parts[i]);
    free(file);
  }
  if (gate) puna_gate(gate, parts[0], parts[1], expected, n_rows * n);
  for (int64_t t = 0; t < n && !gate; t++)
    for (int i = 0; i < 2; i++) memcpy(expected + t * width + i * n_rows, parts[i] + t * n_rows, static_cast<size_t>(n_rows) * 4);
  for (int64_t i = 0; i < width * n; i++) expected[i] += added[i];
  const int32_t types[2] = {f.type, f.type};
  const int64_t rows[2] = {n_rows, n_rows};
  void *linear = puna_linear_new(types, rows, 2, n_in, gate, n == 1 ? eps : -1.0f, -1), *normaliser = puna_normaliser_new(rounding, eps);
  puna::Tensor tx = tensor(x, n_in, n, 1), tn = tensor(weight, n_in, 1, 1), tr = tensor(rounded, 1, 1, 1), ty = tensor(y, width, n, 1);
  puna::Tensor tw[2] = {tensor(packed[0], bytes, 1, 1), tensor(packed[1], bytes, 1, 1)}, ta = tensor(added, width, n, 1);
  if (n == 1) {
    puna::Tensor* operands[] = {&tx, &tn, &tw[0], &tw[1], &ta};
    memcpy(ty.src, operands, sizeof(operands));
    for (int thread = 0; thread < 2; thread++) puna_column_linear_node(&ty, thread, 2, linear);
  } else {
    tr.src[0] = &tx, tr.src[1] = &tn;
    for (int thread = 0; thread < 2; thread++) puna_normalise_node(&tr, thread, 2, normaliser);
    puna::Tensor* operands[] = {&tr, &tw[0], &tw[1], &ta};
    memcpy(ty.src, operands, sizeof(operands));
    for (int thread = 0; thread < 2; thread++) puna_linear_node(&ty, thread, 2, linear);
  }
  const double found = difference(y, expected, width * n);
  puna_linear_free(linear), puna_normaliser_free(normaliser), puna_matrix_free(one);
  for (int i = 0; i < 2; i++) free(packed[i]), free(parts[i]);
  free(rounded), free(x), free(weight), free(normal), free(y), free(expected), free(added);
  return found;
}

// What is gated and rounded in one node, against the rounding of what is gated.
static double rounded(const Format& f, const Format& next, int64_t n) {
  const int64_t n_in = f.weights, n_rows = 2 * next.weights - (is_of_floats(next) ? 9 : 0), bytes = puna_packed_bytes(f.type, n_in, n_rows);
  const int rounding = puna_rounding(f.type), output = puna_rounding(next.type);
  const int64_t out_bytes = puna_rounded_bytes(output, n_rows, n), width = (out_bytes + n - 1) / n;
  float *x = random_values(n_in * n), *y = block<float>(n_rows * n), *sums[2] = {block<float>(n * 5), block<float>(n * 5)};
  uint8_t *activations = block<uint8_t>(puna_rounded_bytes(rounding, n_in, n)), *packed[2], *results[2];
  puna_round(f.type, x, n_in, n, activations);
  for (int i = 0; i < 2; i++) {
    uint8_t* file = random_file(f, n_rows);
    packed[i] = block<uint8_t>(bytes);
    results[i] = block<uint8_t>(width * n);
    puna_pack(f.type, file, n_in, 0, n_rows, packed[i]);
    free(file);
  }
  const int32_t types[2] = {f.type, f.type};
  const int64_t rows[2] = {n_rows, n_rows};
  puna::Tensor ta = tensor(activations, 1, 1, 1), ty = tensor(y, n_rows, n, 1), tr = tensor(results[1], width, n, 1);
  puna::Tensor tw[2] = {tensor(packed[0], bytes, 1, 1), tensor(packed[1], bytes, 1, 1)};
  puna::Tensor* operands[] = {&ta, &tw[0], &tw[1]};
  memcpy(ty.src, operands, sizeof(operands));
  memcpy(tr.src, operands, sizeof(operands));
  void *plain = puna_linear_new(types, rows, 2, n_in, 1, -1.0f, -1), *both = puna_linear_new(types, rows, 2, n_in, 1, -1.0f, output);
  for (int thread = 0; thread < 2; thread++) {
    puna_linear_node(&ty, thread, 2, plain);
    puna_linear_node(&tr, thread, 2, both);
  }
  puna_round(next.type, y, n_rows, n, results[0]);
  uint8_t *file = random_file(next, 2 * 5), *last = block<uint8_t>(puna_packed_bytes(next.type, n_rows, 5));
  memset(last, 0, static_cast<size_t>(puna_packed_bytes(next.type, n_rows, 5)));
  puna_pack(next.type, file, n_rows, 0, 5, last);
  void* down = puna_matrix_new(next.type, n_rows, 5);
  for (int i = 0; i < 2; i++) puna_multiply(down, last, results[i], n, sums[i]);
  const double found = difference(sums[1], sums[0], n * 5);
  puna_linear_free(plain), puna_linear_free(both), puna_matrix_free(down);
  for (int i = 0; i < 2; i++) free(packed[i]), free(results[i]), free(sums[i]);
  free(x), free(y), free(activations), free(file), free(last);
  return found;
}

int main() {
  const Format formats[] = {{2, 32, 18, {0, 0}},   {3, 32, 20, {0, 2}},     {6, 32, 22, {0, 0}},    {7, 32, 24, {0, 2}},
                            {8, 32, 34, {0, 0}},   {10, 256, 84, {80, 82}}, {11, 256, 110, {108, 108}}, {12, 256, 144, {0, 2}},  {13, 256, 176, {0, 2}}, {14, 256, 210, {208, 208}},
                            {20, 32, 18, {0, 0}},  {23, 256, 136, {0, 0}},  {39, 32, 17, {-1, -1}}, {1, 32, 64, {-1, -1}},  {0, 32, 128, {-1, -1}},
                            {30, 32, 64, {-1, -1}}};
  const int64_t row_counts[] = {1, 15, 16, 17, 50}, token_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 64, 65}, most_tokens = 65;
  double worst = 0;
  for (const Format& f : formats)
    for (int64_t blocks : {1, 2, 3, 5})
      for (int64_t rows : row_counts)
       for (int64_t missing : {0, 3, 29}) {
        if (missing && !is_of_floats(f)) continue;
        const int64_t n_in = blocks * f.weights - missing;
        uint8_t* file = random_file(f, rows * blocks);
        uint8_t* packed = block<uint8_t>(puna_packed_bytes(f.type, n_in, rows));
        memset(packed, 0, static_cast<size_t>(puna_packed_bytes(f.type, n_in, rows)));
        puna_pack(f.type, file, n_in, 0, rows, packed);
        float* row = block<float>(n_in);
        puna_unpack(f.type, packed, n_in, rows - 1, row);
        void* matrix = puna_matrix_new(f.type, n_in, rows);
        // What each token gets is the same in any company: those of the largest batch judge all others.
        float *tokens = random_values(most_tokens * n_in), *expected = block<float>(most_tokens * rows);
        uint8_t* of_all = block<uint8_t>(puna_rounded_bytes(puna_rounding(f.type), n_in, most_tokens));
        puna_use_instructions("portable");
        puna_round(f.type, tokens, n_in, most_tokens, of_all);
        puna_multiply(matrix, packed, of_all, most_tokens, expected);
        for (int64_t n : token_counts) {
          float *x = block<float>(n * n_in), *y = block<float>(n * rows);
          memcpy(x, tokens, static_cast<size_t>(n * n_in) * sizeof(float));
          uint8_t* rounded = block<uint8_t>(puna_rounded_bytes(puna_rounding(f.type), n_in, n));
          for (int i = 0; puna_instructions(i); i++) {
            if (!puna_use_instructions(puna_instructions(i))) continue;
            puna_round(f.type, x, n_in, n, rounded);
            puna_multiply(matrix, packed, rounded, n, y);
            worst = std::fmax(worst, difference(y, expected, n * rows));
          }
          free(x), free(y), free(rounded);
        }
        free(tokens), free(expected), free(of_all);
        puna_matrix_free(matrix);
        free(file), free(packed), free(row);
      }
  for (int i = 0; puna_instructions(i); i++) {
    if (!puna_use_instructions(puna_instructions(i))) continue;
    printf("%s ", puna_instructions(i));
    for (const Format& f : formats)
      for (int64_t n : {1, 2, 9, 40})
        for (int64_t n_inputs : {1, 2})
          for (int gate : {0, 1}) worst = std::fmax(worst, experts(f, n_inputs, n, gate));
    for (const Format& f : formats)
      for (int64_t n : {1, 3, 70})
        for (int gate : {0, 1, 2})
          for (int64_t n_rows : {1, 37, 160}) worst = std::fmax(worst, linears(f, n_rows, n, gate));
    for (const Format& f : formats)
      for (const Format& next : formats) {
        bool is_another = true;  // of the next format only how it rounds takes part
        for (const Format* other = formats; other != &next; other++) is_another &= puna_rounding(other->type) != puna_rounding(next.type);
        for (int64_t n : {2, 70})
          if (is_another) worst = std::fmax(worst, rounded(f, next, n));
      }
  }
  printf("%.3g\n", worst);
  return worst < 1e-5 ? 0 : 1;
}
