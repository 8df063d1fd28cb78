// Work for several threads, which are PyTorch's whichever compiler builds the kernels. Those of a second OpenMP would wait
// for work on the same cores and be in PyTorch's way: LLVM's do so for 0.2 s.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

// GOMP_parallel, which GCC's, LLVM's and Intel's OpenMP have: calls `work` in so many threads, or fewer, of which this
// is one, and waits until it has returned in all of them.
typedef void (*Parallel)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);
extern Parallel parallel __attribute__((visibility("hidden")));  // no other library's, whatever it is called there

template <class F>
inline void in_threads(int threads, F&& f) {
    parallel([](void* work) { (*static_cast<F*>(work))(); }, &f, threads, 0);
}

// Calls f with each number below `count` that no other thread has taken from `next`.
template <class F>
inline void for_units(std::atomic<int64_t>& next, int64_t count, F&& f) {
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(unit);
}

// Until others have done so much, which they are at work on.
inline void wait_for(const std::atomic<int>& done, int count) {
    while (done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}
