// What a process has one of, and finds without being given it.
#pragma once

#include <pthread.h>

#include <new>

namespace jaxhetero {

// The one T of this process. A forked child begins with a new one and leaves its copy of the parent's as it is: that
// points to objects whose threads only the parent has, and a thread may have held its locks.
template <typename T>
T& of_process() {
  static T instance;
  [[maybe_unused]] static const int handled =
      pthread_atfork(nullptr, nullptr, [] { new (&of_process<T>()) T; });  // NOLINT: no pointer owns it
  return instance;
}

}  // namespace jaxhetero
