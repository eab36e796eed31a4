// Memory for whole buckets, which is taken and given back once a step. Any thread.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

namespace jaxhetero {

// Keeps what is given back for those who take as many bytes again: new memory would cost page faults in every step. It
// never keeps more than was in use at once. Its blocks may outlive it.
class BlockPool {
 public:
  // Aligned to a cache line; uninitialised.
  std::shared_ptr<std::byte> allocate(size_t bytes);

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  using Block = std::unique_ptr<std::byte, Free>;
  struct Kept {
    size_t bytes = 0;
    Block memory;
  };
  struct State {
    std::mutex mutex;
    // Guarded by mutex.
    std::deque<Kept> kept;  // the oldest first
    size_t kept_bytes = 0;
    size_t used_bytes = 0;
    size_t most_used_bytes = 0;
  };

  static Block take(State& state, size_t bytes);
  static void give_back(State& state, Kept block);

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace jaxhetero
