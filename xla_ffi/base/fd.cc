#include "xla_ffi/base/fd.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>

namespace jaxhetero {

// The mutex is held over a fork(), so that the child finds every descriptor on the list. It is never held while memory
// is allocated: an allocator may hold locks of its own over a fork().
struct Fd::List {
  std::mutex mutex;
  Fd* first = nullptr;  // guarded by mutex

  // Runs in the child, whose only thread holds the mutex.
  void close_all() {
    for (Fd* each = first; each != nullptr; each = std::exchange(each->next_, nullptr)) {
      ::close(std::exchange(each->fd_, -1));
      each->previous_ = nullptr;
    }
    first = nullptr;
  }
};

// Global, because fork() asks nobody: the process may be forked by any library, from any thread.
Fd::List& Fd::all() {
  static List list;
  [[maybe_unused]] static const int handled = pthread_atfork([] { all().mutex.lock(); },    // before the fork
                                                             [] { all().mutex.unlock(); },  // after it, in the parent
                                                             [] {
                                                               all().close_all();
                                                               all().mutex.unlock();
                                                             });
  return list;
}

Fd::Fd(const std::function<int()>& open) {
  const std::lock_guard lock(all().mutex);
  fd_ = open();
  enlist();
}

void Fd::reset() {
  if (!valid()) return;
  const std::lock_guard lock(all().mutex);
  unlist();
  ::close(std::exchange(fd_, -1));
}

void Fd::shut_down() {
  if (valid()) ::shutdown(fd_, SHUT_RDWR);
  reset();
}

void Fd::take(Fd& other) {
  if (!other.valid()) return;
  const std::lock_guard lock(all().mutex);
  other.unlist();
  fd_ = std::exchange(other.fd_, -1);
  enlist();
}

// The caller holds the mutex.
void Fd::enlist() {
  if (!valid()) return;
  next_ = all().first;
  if (next_ != nullptr) next_->previous_ = this;
  all().first = this;
}

// The caller holds the mutex.
void Fd::unlist() {
  (previous_ != nullptr ? previous_->next_ : all().first) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  previous_ = next_ = nullptr;
}

}  // namespace jaxhetero
