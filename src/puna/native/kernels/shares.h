// Pieces of a node's work, shared out among its threads.
//
// Each thread has pieces that follow one another, so that what is fetched ahead from memory is what it needs next; it takes
// them from the front. One that has none left takes them from the back of another's share: a thread that loses its core
// for a moment does not hold up the others with all that it was to do.
#pragma once
#include <atomic>
#include <cstdint>

namespace puna {
namespace {

struct Shares {
  static constexpr int most = 64;  // threads beyond these share a share
  static constexpr uint64_t front = 1, back = uint64_t{1} << 32;

  struct alignas(64) Share { std::atomic<uint64_t> taken{0}; };  // from the front, and from the back above that
  Share shares[most];
  std::atomic<int> left{0};

  static int begin_of(int n, int share, int n_shares) { return static_cast<int>(int64_t{n} * share / n_shares); }

  // The last thread to leave makes everything ready for the next time.
  template <class Do> void each(int n, int thread, int n_threads, Do work) {
    const int n_shares = n_threads < most ? n_threads : most;
    for (int k = 0; k < n_shares; k++) {
      const int share = (thread + k) % n_shares, begin = begin_of(n, share, n_shares), end = begin_of(n, share + 1, n_shares);
      for (;;) {
        const uint64_t taken = shares[share].taken.fetch_add(k ? back : front, std::memory_order_relaxed);
        const int of_front = static_cast<int>(taken & (back - 1)), of_back = static_cast<int>(taken >> 32);
        if (of_front + of_back >= end - begin) break;
        work(k ? end - 1 - of_back : begin + of_front);
      }
    }
    if (left.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
      for (int share = 0; share < n_shares; share++) shares[share].taken.store(0, std::memory_order_relaxed);
      left.store(0, std::memory_order_relaxed);
    }
  }
};

}  // namespace
}  // namespace puna
