// An event loop on a thread of its own.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "xla_ffi/base/event_loop.h"

namespace jaxhetero {

class LoopThread {
 public:
  LoopThread() : loop_(std::move(*EventLoop::create())), thread_([this] { loop_->run(); }) {}
  ~LoopThread() { stop(); }
  LoopThread(const LoopThread&) = delete;
  LoopThread& operator=(const LoopThread&) = delete;

  EventLoop& loop() { return *loop_; }

  // Runs `function` on the loop's thread and returns what it returns.
  template <typename Function>
  auto call(Function function) {
    std::packaged_task<decltype(function())()> task(std::move(function));
    auto result = task.get_future();
    loop_->post([&task] { task(); });
    return result.get();
  }

  // Joins the thread: what it used may be destroyed then.
  void stop() {
    if (!thread_.joinable()) return;
    loop_->stop();
    thread_.join();
  }

 private:
  std::unique_ptr<EventLoop> loop_;
  std::thread thread_;
};

}  // namespace jaxhetero
