// Threads that run what must not run on the event loop's thread.
//
// XLA continues a program on whatever thread makes a future available (seen on jaxlib 0.10.2, CPU): whoever completes a
// round may compute for seconds. So completions run here, each on an idle thread if there is one and on a new one if
// not, and no completion waits for the computation behind another.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxhetero {

class CallbackThreads {
 public:
  CallbackThreads() = default;
  // Runs what was given to it, then joins; but if one of the tasks has destroyed it, that task's thread ends by itself.
  ~CallbackThreads();
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  void run(std::function<void()> task);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;  // guarded by mutex, as is all below
    std::vector<std::thread> threads;
    size_t idle_count = 0;
    bool stopping = false;
  };
  static void work(const std::shared_ptr<State>& state);

  // Shared with the threads, for the one that outlives us.
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace jaxhetero
