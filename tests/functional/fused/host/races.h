// Finds two threads at one place of shared memory, one of them writing, with no barrier between.
//
// The compiler's thread sanitizer puts a call before each access; the calls end here, not in its library. Only barriers
// order accesses: `block_barrier` those of all threads, `warp_barrier` those of the warp's lanes. Loads of matrices,
// products and shuffles wait for all lanes, but no manual says that they order memory. So one run finds what another order
// could do, also where nobody uses the value.
#pragma once
#include "fibers.h"

namespace host {

// The accesses of two bytes since the last barrier of the block; those of a warp's lanes, since its last barrier.
struct Accessed {
  static constexpr int16_t NONE = -1, SEVERAL = -2;

  uint32_t block_phase, warp_phase_of_write, warp_phase_of_read;
  int16_t writer, reading_warp, reading_lane;
};

static Accessed accessed[MOST_SHARED / 2];

__attribute__((noinline, cold)) inline void race(ptrdiff_t byte, const char* now, const char* before, int other) {
  const Site& met = machine.current->warp->met;
  char by[32] = "several warps";
  if (other != Accessed::SEVERAL) snprintf(by, sizeof by, "warp %d", other);
  fail("a race: byte %td of shared memory is %s after %s, and was %s by %s with no barrier between", byte, now,
       met.what ? text(met).characters : "the beginning", before, by);
}

__attribute__((noinline)) inline void note_shared(ptrdiff_t offset, size_t bytes, bool writes) {
  if (machine.current == &inside.scheduler) return;
  const Fiber& self = *machine.current;
  const int own_warp = self.thread / LANES;
  const uint32_t warp_phase = self.warp->phase;
  for (ptrdiff_t i = offset / 2; 2 * i < offset + static_cast<ptrdiff_t>(bytes); ++i) {
    Accessed& last = accessed[i];
    if (last.block_phase != inside.phase) last = {inside.phase, 0, 0, Accessed::NONE, Accessed::NONE, Accessed::NONE};
    if (last.writer != Accessed::NONE && last.writer != self.thread &&
        (last.writer / LANES != own_warp || last.warp_phase_of_write == warp_phase))
      race(2 * i, writes ? "written" : "read", "written", last.writer / LANES);
    const bool read_by_warp = last.reading_warp == own_warp && last.warp_phase_of_read == warp_phase;
    if (writes) {
      const bool read_by_others = last.reading_warp != Accessed::NONE && last.reading_warp != own_warp;
      if (read_by_others || (read_by_warp && last.reading_lane != self.lane))
        race(2 * i, "written", "read", last.reading_warp);
      last.writer = self.thread, last.warp_phase_of_write = warp_phase;
    } else {
      last.reading_lane = read_by_warp && last.reading_lane != self.lane ? Accessed::SEVERAL : self.lane;
      const bool first = last.reading_warp == Accessed::NONE || last.reading_warp == own_warp;
      last.reading_warp = first ? own_warp : Accessed::SEVERAL;
      last.warp_phase_of_read = warp_phase;
    }
  }
}

// An access by the thread that runs now. The intrinsics say themselves what they access.
inline void note(const void* address, size_t bytes, bool writes) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(address) - shared_memory;
  if (offset >= 0 && offset < static_cast<ptrdiff_t>(machine.launch.shared_bytes)) note_shared(offset, bytes, writes);
}

}  // namespace host

// What -fsanitize=thread calls.
#define HOST_ACCESS(bytes)                                                        \
  void __tsan_read##bytes(void* at) { host::note(at, bytes, false); }             \
  void __tsan_write##bytes(void* at) { host::note(at, bytes, true); }             \
  void __tsan_unaligned_read##bytes(void* at) { host::note(at, bytes, false); }   \
  void __tsan_unaligned_write##bytes(void* at) { host::note(at, bytes, true); }

extern "C" {
HOST_ACCESS(1)
HOST_ACCESS(2)
HOST_ACCESS(4)
HOST_ACCESS(8)
HOST_ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) { host::note(at, bytes, false); }
void __tsan_write_range(void* at, size_t bytes) { host::note(at, bytes, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
