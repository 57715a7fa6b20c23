// What ggml gives a node to compute, and what its threads share while they do.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "formats.h"
#include "instructions.h"

#define PUNA_EXPORT extern "C" __attribute__((visibility("default")))

namespace puna {

extern const Instructions* chosen;  // what all nodes compute with

namespace {

// A ggml_tensor; puna_tensor_layout tells where this believes its fields to be.
struct Tensor {
  int32_t type;
  void* buffer;
  int64_t ne[4];
  size_t nb[4];
  int32_t op;
  int32_t op_params[16];
  int32_t flags;
  Tensor* src[10];
  Tensor* view_src;
  size_t view_offs;
  void* data;
  char name[64];
  void* extra;
  char padding[8];
};

// Pieces of a node's work that its threads take in turn: one that loses its core for a moment does not hold up the others
// with its whole share. The last to leave makes everything ready for the next time.
struct Pieces {
  std::atomic<int> next{0}, left{0};

  template <class Do> void each(int n, int n_threads, Do work) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
    if (left.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
      left.store(0, std::memory_order_relaxed);
      next.store(0, std::memory_order_relaxed);
    }
  }
};

inline int64_t n_columns(const Tensor* tensor) { return tensor->ne[1] * tensor->ne[2] * tensor->ne[3]; }

// Column i of a tensor whose columns may lie apart.
inline const float* column(const Tensor* tensor, int64_t i) {
  const int64_t i1 = i % tensor->ne[1], i2 = i / tensor->ne[1] % tensor->ne[2], i3 = i / tensor->ne[1] / tensor->ne[2];
  return reinterpret_cast<const float*>(static_cast<const char*>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
                                        i3 * tensor->nb[3]);
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Memory of a thread's own, as large as it ever asked for.
struct Scratch {
  void* memory = nullptr;
  int64_t size = 0;

  void* of(int64_t bytes) {
    if (bytes > size) {
      free(memory);
      if (posix_memalign(&memory, line, static_cast<size_t>(bytes))) abort();
      size = bytes;
    }
    return memory;
  }
  ~Scratch() { free(memory); }
};
thread_local Scratch scratch;

}  // namespace
}  // namespace puna
