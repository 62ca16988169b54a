// Counters that a waiter can sleep on: 32-bit words in process or shared memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace weft {

// Adds with release order and wakes every sleeper when the sum is a multiple of `wake_every`: only the tile that
// completes a group makes the system call, and all others cost one atomic instruction.
void counter_add(int32_t* counter, int32_t value, int32_t wake_every = 1);

int32_t counter_read(const int32_t* counter);

// Waits until the counter has reached `target` (acquire order): counters go round after 2^32, and one has reached what it
// is less than 2^31 ahead of. Spins briefly, then sleeps in the kernel.
// False when `deadline` (steady-clock nanoseconds) passes first.
bool counter_wait(const int32_t* counter, uint32_t target, int64_t deadline_ns);

// The same; spins and yields for longer, for ranks that meet many times a millisecond and have a core each.
bool counter_reach(const int32_t* counter, uint32_t target, int64_t deadline_ns);

// Waits for `ready`, copies, and then adds 1 to `done`: what a rank does with a chunk that another one published.
// False when the deadline passes first; nothing is copied then.
bool counter_take(const int32_t* ready, uint32_t target, int64_t deadline_ns, const void* from, void* to, size_t bytes,
                  int32_t* done);

int64_t steady_now_ns();
int64_t deadline_after(double seconds);

}  // namespace weft
