#include "xla_ffi/worker/callback_threads.h"

#include <utility>

namespace jaxhetero {
namespace {
// Beyond this, tasks queue. A program has rarely more than a few dozen rounds in flight.
constexpr size_t kMaxThreads = 64;
}  // namespace

CallbackThreads::~CallbackThreads() {
  // A task may give others, which get threads of their own.
  for (std::vector<std::thread> threads = stop(); !threads.empty(); threads = stop()) {
    for (std::thread& thread : threads) {
      if (thread.get_id() == std::this_thread::get_id()) {
        thread.detach();
      } else {
        thread.join();
      }
    }
  }
}

std::vector<std::thread> CallbackThreads::stop() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    threads.swap(state_->threads);
  }
  state_->changed.notify_all();
  return threads;
}

void CallbackThreads::run(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    if (state_->tasks.size() > state_->idle_count && state_->threads.size() < kMaxThreads) {
      state_->threads.emplace_back([state = state_, cores = cores_] {
        keep_to(cores);
        work(state);
      });
    }
  }
  state_->changed.notify_one();
}

void CallbackThreads::work(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    ++state->idle_count;
    state->changed.wait(lock, [&] { return state->stopping || !state->tasks.empty(); });
    --state->idle_count;
    if (state->tasks.empty()) return;
    {
      const std::function<void()> task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      task();
    }
    lock.lock();
  }
}

}  // namespace jaxhetero
