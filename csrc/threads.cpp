// Threads come from the OpenMP runtime that torch has loaded, when there is one. A pool of our own would fight with
// torch's: after every torch operator its workers spin for a while, on the very cores that ours would need.
// The runtime is found by name in the process, so that nothing links to torch or to a second OpenMP.
#include "threads.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace weft {

namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// libgomp's workers do not survive a fork, and a child that waits for them waits for ever. A child of a process that
// had only one thread is safe: it never had workers.
std::atomic<bool> parent_had_threads{false};
std::atomic<bool> workers_lost{false};

bool has_other_threads() {
  int tasks = 0;
  if (DIR* dir = opendir("/proc/self/task")) {
    while (const dirent* entry = readdir(dir)) tasks += entry->d_name[0] != '.';
    closedir(dir);
  }
  return tasks != 1;
}

int watch_forks() {
  return pthread_atfork([] { parent_had_threads = has_other_threads(); }, nullptr,
                 [] { workers_lost = workers_lost || parent_had_threads; });
}

// At load, so that the handler is in place before any fork that could follow a parallel region.
const int watching = watch_forks();

// At the first use, when torch has long been loaded.
GompParallel usable_gomp() {
  static const auto found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return watching != 0 || workers_lost.load(std::memory_order_relaxed) ? nullptr : found;
}

}  // namespace

const char* parallel_backend() { return usable_gomp() ? "openmp" : "threads"; }

void parallel(int threads, void (*body)(void*), void* arg) {
  if (threads <= 1) return body(arg);
  if (GompParallel run = usable_gomp()) return run(body, arg, unsigned(threads), 0);
  std::vector<std::thread> workers;
  workers.reserve(threads - 1);
  try {
    for (int i = 1; i < threads; ++i) workers.emplace_back(body, arg);
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, share the work.
  }
  body(arg);
  for (auto& worker : workers) worker.join();
}

}  // namespace weft
