// Several event loops, each on a thread of its own. The first one's thread is the owner's: it may ask the others.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/base/event_loop.h"
#include "xla_ffi/base/memory_nodes.h"
#include "xla_ffi/base/status.h"

namespace jaxhetero {

// On the thread of the first loop, once that runs; but at() of a loop that is there on any thread.
class LoopGroup {
 public:
  explicit LoopGroup(MemoryNodes nodes = {}) : nodes_(std::move(nodes)) {}
  ~LoopGroup() { stop(); }
  LoopGroup(const LoopGroup&) = delete;
  LoopGroup& operator=(const LoopGroup&) = delete;

  // Adds a loop. The first one runs in run_first(), the others from now on.
  Status add() {
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
    if (!loop.ok()) return loop.status();
    loops_.push_back(std::move(*loop));
    if (loops_.size() == 1) return {};
    threads_.emplace_back([this, loop = loops_.back().get(), index = loops_.size() - 1] {
      nodes_.settle(index);
      loop->run();
    });
    return {};
  }

  // Runs the first loop until it is stopped. On the owner's thread.
  void run_first() {
    nodes_.settle(0);
    loops_[0]->run();
  }

  [[nodiscard]] size_t size() const { return loops_.size(); }
  [[nodiscard]] EventLoop& at(size_t index) { return *loops_[index]; }

  // Runs `task` on the thread of a loop: at once if that is the first.
  void run_on(size_t index, EventLoop::Task task) {
    if (index == 0) return task();
    loops_[index]->post(std::move(task));
  }

  // Calls `question(index)` on each loop's thread, and then `then` with all answers on the first one's.
  template <typename Answer>
  void ask(const std::function<Answer(size_t)>& question, std::function<void(std::vector<Answer>)> then) {
    struct Asked {
      std::vector<Answer> answers;
      size_t open_count = 0;
      std::function<void(std::vector<Answer>)> then;

      void take(size_t index, Answer answer) {
        answers[index] = std::move(answer);
        if (--open_count == 0) then(std::move(answers));
      }
    };
    const auto asked = std::make_shared<Asked>(Asked{std::vector<Answer>(size()), size(), std::move(then)});
    for (size_t index = 1; index < size(); ++index) {
      loops_[index]->post([first = loops_[0].get(), asked, question, index] {
        first->post([asked, index, answer = question(index)] { asked->take(index, answer); });
      });
    }
    asked->take(0, question(0));
  }

  // Ends all loops but the first, which has ended, once they have done what they were told; joins their threads.
  void stop() {
    for (size_t index = 1; index < size(); ++index) {
      loops_[index]->post([loop = loops_[index].get()] { loop->stop(); });
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  const MemoryNodes nodes_;
  std::vector<std::unique_ptr<EventLoop>> loops_;
  std::vector<std::thread> threads_;  // the threads of all loops but the first
};

}  // namespace jaxhetero
