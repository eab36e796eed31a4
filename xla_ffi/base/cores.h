// The cores on which a thread may run, and its time on them.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <ctime>
#include <vector>

namespace jaxhetero {

using Cores = std::vector<uint32_t>;

// Of the calling thread; none if the host has more than a cpu_set_t can name.
inline Cores own_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return {};
  Cores cores;
  for (uint32_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

// From now on the calling thread, and each that it starts, runs on these alone. Changes nothing if there are none, or
// if the system refuses.
inline void keep_to(const Cores& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const uint32_t core : cores) {
    if (core < CPU_SETSIZE) CPU_SET(core, &set);
  }
  if (CPU_COUNT(&set) > 0) sched_setaffinity(0, sizeof(set), &set);
}

// How long the calling thread has been on a core.
inline std::chrono::nanoseconds thread_cpu_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace jaxhetero
