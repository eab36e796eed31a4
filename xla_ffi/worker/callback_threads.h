// Threads that run the callbacks of completed rounds, apart from the event loop's thread.
//
// XLA continues a program on the thread that makes a future available (seen on jaxlib 0.10.2, CPU), so a callback may
// compute for seconds. Each runs on an idle thread if there is one, and on a new one if not: no callback waits for the
// computation behind another. They run on the cores of the thread that made this object, whoever gives them tasks.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla_ffi/base/cores.h"

namespace jaxhetero {

class CallbackThreads {
 public:
  CallbackThreads() = default;
  // Runs the tasks that it was given, then joins. If one of the tasks destroys it, that task's thread ends by itself.
  ~CallbackThreads();
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  // Any thread; never blocks on a task.
  void run(std::function<void()> task);

 private:
  // The threads end once they have no task.
  std::vector<std::thread> stop();

  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;  // guarded by mutex, as is all below
    std::vector<std::thread> threads;
    size_t idle_count = 0;
    bool stopping = false;
  };
  static void work(const std::shared_ptr<State>& state);

  const Cores cores_ = own_cores();
  // Shared with the threads: one of them may outlive this object.
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace jaxhetero
