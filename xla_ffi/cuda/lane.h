// Reduces the buckets of one GPU: its copy engines copy them to pinned host memory and back, the communicator reduces
// them there, and the program's stream waits for a flag in memory. No kernel runs for that.
//
//   the program's stream  ... operands, event, wait until flag >= round .................... results ...
//                                         |                                    ^
//   out stream                            +-> copy slice, count, copy slice .. |
//   lane's thread                                | a slice is here: the communicator may push it
//   communicator                                 +-> push ... total            |
//   back stream                                               +-> copy slice ... copy slice, flag
//
// The FFI handler calls reduce() on the threads that launch programs, which do not wait for the round. A thread of the
// lane's own polls the copies; the communicator's threads report to it through an inbox.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/cuda/driver.h"
#include "xla_ffi/cuda/flags.h"
#include "xla_ffi/cuda/pinned_pool.h"
#include "xla_ffi/worker/communicator.h"

namespace jaxhetero {

struct CudaLaneConfig {
  uint32_t rank = 0;
  size_t pinned_bytes = size_t{1} << 30;  // the memory of both directions together
  size_t slice_bytes = size_t{1} << 20;   // the size of one copy, after which the next stage can start on it
  std::chrono::milliseconds timeout{30000};
};

// Small values of a call beside its bucket, such as the numbers of an optimizer's step, which the host has to know
// before the round, and gives after it. Both functions are called on the lane's thread.
struct CudaAside {
  Leaves operands;  // addresses on the device, as the next one
  Leaves results;
  std::function<void(std::span<const std::byte> operands, RoundRequest& request)> begin;
  std::function<Status(std::span<std::byte> results)> finish;

  [[nodiscard]] size_t bytes() const { return operands.bytes() + results.bytes(); }
};

class CudaLane {
 public:
  // On the device of `context`. Takes its pinned memory, which waits for the GPU: not while a stream waits for a flag.
  static Result<std::unique_ptr<CudaLane>> create(std::shared_ptr<const CudaDriver> driver, CudaContext context,
                                                  std::shared_ptr<Communicator> communicator,
                                                  const CudaLaneConfig& config);
  // Waits for the running rounds for up to the timeout; streams wait for no flag afterwards.
  ~CudaLane();
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  // Any thread; enqueues and returns. The work that `stream` has been given so far writes `operands`, and later work
  // sees `results`; both are addresses on the device. The request's memory and callbacks are filled in here. After a
  // failure the results are NaN, or -1 in an integer.
  Status reduce(CudaStream stream, RoundRequest request, const Leaves& operands, const Leaves& results,
                CudaAside aside = {});

  // Of a round that outlives its program. The stream waits until the operands are in pinned memory, which then holds
  // them and the total; `ticket` gets the name of the round. See pending_rounds.h.
  Status start(CudaStream stream, RoundRequest request, const Leaves& operands, const Leaves& ticket);
  // The stream waits for the total of the round that `ticket` names. `op` stands for the call.
  Status finish(CudaStream stream, uint64_t op, std::string label, const Leaves& ticket, const Leaves& results);

  // Why no round can run any more; ok while rounds can. Any thread.
  [[nodiscard]] Status failure() const;
  // Waits up to `patience` for every round that was started to end, and returns whether all have. Any thread.
  bool drain(std::chrono::milliseconds patience);
  [[nodiscard]] const PinnedPool& pool() const { return *pool_; }

 private:
  struct Flight;  // a round on its way
  struct Inbox;   // messages of other threads for the lane's thread
  using FlightPtr = std::shared_ptr<Flight>;

  CudaLane(std::shared_ptr<const CudaDriver> driver, CudaContext context, std::shared_ptr<Communicator> communicator,
           const CudaLaneConfig& config);
  Status prepare();
  Status begin(CudaStream stream, const FlightPtr& flight);
  Status enqueue(CudaStream stream, CudaEvent event, const FlightPtr& flight);

  void run();
  bool advance();
  bool take_inbox();
  bool issue_copies_out();
  bool take_memory(Flight& flight);
  Status issue_copies_out(Flight& flight);
  bool watch_copies_out();
  void start_round(const FlightPtr& flight);
  void start_pending_round(const FlightPtr& flight);
  void take_pending_round(const FlightPtr& flight);
  void copy_back(Flight& flight, size_t offset, size_t bytes);
  void copy_to_device(const Leaves& to, const std::byte* from, size_t offset, size_t bytes);
  void poison(const Leaves& results);
  bool finish_flights();
  void finish(Flight& flight);
  bool watch_flags();
  void watch_streams();
  void check_driver(CudaResult result, const char* what);
  void fail(const Status& why);
  void give_up(const Status& why);
  void settle();
  void release_all();

  const std::shared_ptr<const CudaDriver> driver_;
  const CudaContext context_;
  const std::shared_ptr<Communicator> communicator_;
  const CudaLaneConfig config_;
  std::shared_ptr<PinnedPool> pool_;
  std::unique_ptr<CudaFlags> flags_;
  CudaStream out_ = nullptr;
  CudaStream back_ = nullptr;
  const std::shared_ptr<Inbox> inbox_;

  // The lane's thread only. A flight is in these one after the other; an ended one may still be in out_flights_.
  std::deque<FlightPtr> queue_;          // waits for pinned memory
  std::deque<FlightPtr> out_flights_;    // flights whose last slice is not on the host
  std::deque<FlightPtr> ended_flights_;  // flights whose round is over, well or badly
  std::deque<FlightPtr> back_flights_;   // flights whose flag is not set
  uint32_t issued_copy_count_ = 0;
  std::unordered_map<size_t, uint32_t> finished_counts_;  // by slot
  bool driver_failed_ = false;
  std::chrono::steady_clock::time_point last_progress_at_;
  std::chrono::steady_clock::time_point next_watch_at_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Status> failure_;  // guarded by mutex_, as are flags_'s next() and set_all(), all_ and idle_events_
  std::vector<FlightPtr> all_;     // all flights that are not over
  std::vector<CudaEvent> idle_events_;
  std::thread thread_;
};

}  // namespace jaxhetero
