// A file descriptor that closes itself, and that a forked child does not keep.
//
// A child has a copy of every descriptor. While it holds that of a connection, the peer does not see that this process
// has died. So all Fds of a process are on a list, and in the child of a fork() each of them is closed and empty.
#pragma once

#include <functional>
#include <utility>

namespace jaxhetero {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : Fd([fd] { return fd; }) {}
  // Owns the descriptor that `open` returns; or nothing, if that is -1. No fork() comes in between, so `open` must not
  // block. It may neither open nor close another Fd.
  explicit Fd(const std::function<int()>& open);
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept { take(other); }
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }
  void reset();
  // Ends a connection, or a listener, even where others have copies of the descriptor; then closes it.
  void shut_down();

 private:
  struct List;
  static List& all();
  void take(Fd& other);
  void enlist();
  void unlist();

  int fd_ = -1;
  Fd* previous_ = nullptr;  // a neighbour in the list of all valid descriptors
  Fd* next_ = nullptr;
};

}  // namespace jaxhetero
