// Every piece of a node's work is done once, whatever threads come when, time after time. For a build with the compiler's
// sanitizer of threads. Ends with 0 when that is so.
#include <atomic>
#include <cstdio>
#include <initializer_list>
#include <thread>
#include <vector>

#include "shares.h"

int main() {
  static puna::Shares shares;
  for (int n_threads : {1, 2, 3, 5, 70})
    for (int n : {0, 1, 2, 7, 64, 500})
      for (int round = 0; round < 3; round++) {
        std::vector<int> times(static_cast<size_t>(n), 0);  // not atomic: a piece that two threads do is a race
        std::atomic<int> done{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; t++)
          threads.emplace_back([&, t] {
            if (t == 0 && round == 2)  // the others do its share
              while (n_threads > 1 && done < n) std::this_thread::yield();
            shares.each(n, t, n_threads, [&](int i) {
              times[static_cast<size_t>(i)]++;
              done++;
            });
          });
        for (auto& thread : threads) thread.join();
        for (int i = 0; i < n; i++)
          if (times[static_cast<size_t>(i)] != 1) return printf("piece %d of %d, %d threads: %d times\n", i, n, n_threads, times[static_cast<size_t>(i)]), 1;
      }
  return 0;
}
