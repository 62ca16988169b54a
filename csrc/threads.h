#pragma once

namespace weft {

// Runs body(arg) once on each of up to `threads` threads, this one included, and returns when all are done.
// Fewer may run (inside another parallel region), so a body must take its work from a shared counter.
void parallel(int threads, void (*body)(void* arg), void* arg);

// "openmp" when torch's own pool is used, "threads" otherwise.
const char* parallel_backend();

}  // namespace weft
