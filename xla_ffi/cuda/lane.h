// One GPU's way to the reducers: its buckets are copied to pinned host memory and back by the GPU's copy engines, and
// the stream that asked for it waits on a flag in memory. No kernel runs and no thread that launches a program waits.
//
//   the caller's stream   ... operands, event, wait until flag >= round .................... results ...
//                                         |                                    ^
//   out stream                            +-> copy slice, count, copy slice .. |
//   lane's thread                                | a slice is here: the communicator may push it
//   communicator                                 +-> push ... result           |
//   back stream                                               +-> copy slice ... copy slice, flag
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/cuda/driver.h"
#include "xla_ffi/cuda/pinned_pool.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/worker/communicator.h"

namespace jaxhetero {

struct CudaLaneConfig {
  uint32_t rank = 0;
  size_t pinned_bytes = size_t{1} << 30;  // for both directions together
  size_t slice_bytes = size_t{1} << 20;   // of a copy: the next stage can begin with it
  std::chrono::milliseconds timeout{30000};
};

class CudaLane {
 public:
  // On the device of `context`. Takes its pinned memory, which waits for the GPU: not while a stream waits for a flag.
  static Result<std::unique_ptr<CudaLane>> create(std::shared_ptr<const CudaDriver> driver, CudaContext context,
                                                  std::shared_ptr<Communicator> communicator,
                                                  const CudaLaneConfig& config);
  ~CudaLane();
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  // From any thread; enqueues and returns. What `stream` has been given so far writes `operands`, what it is given from
  // now on sees `results`; both are addresses on the device. The request's memory and callbacks are filled in here.
  // After a failure the results are NaN, or -1 in an integer.
  Status reduce(CudaStream stream, RoundRequest request, const Leaves& operands, const Leaves& results);

  // Why rounds cannot run any more, once something has failed.
  [[nodiscard]] Status failure() const;
  // Whether every round that was started has ended within `patience`.
  bool drain(std::chrono::milliseconds patience);
  [[nodiscard]] const PinnedPool& pool() const { return *pool_; }

 private:
  struct Flight;  // a round on its way
  struct Inbox;   // what others tell the lane's thread
  using FlightPtr = std::shared_ptr<Flight>;
  struct Flag {  // of an op: the number of its rounds that are over, in memory that the GPU sees
    size_t slot = 0;
    uint32_t round_count = 0;
  };

  CudaLane(std::shared_ptr<const CudaDriver> driver, CudaContext context, std::shared_ptr<Communicator> communicator,
           const CudaLaneConfig& config);
  Status prepare();
  Result<Flag> next_flag(uint64_t op);
  Status enqueue(CudaStream stream, CudaEvent event, const FlightPtr& flight);
  [[nodiscard]] std::atomic_ref<uint32_t> slot(size_t index) { return std::atomic_ref(slots_[index]); }
  [[nodiscard]] DevicePointer slot_on_device(size_t index) const { return slots_on_device_ + index * sizeof(uint32_t); }

  void run();
  bool advance();
  bool take_inbox();
  bool issue_copies_out();
  Status issue_copies_out(Flight& flight);
  bool watch_copies_out();
  void begin_round(const FlightPtr& flight);
  void copy_back(Flight& flight, size_t begin, size_t bytes);
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
  std::shared_ptr<PinnedPool> control_;  // where the slots are
  uint32_t* slots_ = nullptr;            // the first counts the copies out, the others are flags
  DevicePointer slots_on_device_ = 0;
  CudaStream out_ = nullptr;
  CudaStream back_ = nullptr;
  const std::shared_ptr<Inbox> inbox_;

  // The lane's thread only, but for what says otherwise. A flight goes through these in order.
  std::deque<FlightPtr> queue_;          // for pinned memory
  std::deque<FlightPtr> out_flights_;    // until their last slice is on the host
  std::deque<FlightPtr> ended_flights_;  // whose round is over, well or badly
  std::deque<FlightPtr> back_flights_;   // until their flag is set
  uint32_t copies_issued_ = 0;
  std::unordered_map<size_t, uint32_t> finished_counts_;  // by slot
  bool driver_failed_ = false;
  std::chrono::steady_clock::time_point last_progress_;
  std::chrono::steady_clock::time_point next_watch_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Status> failure_;             // guarded by mutex_, as is all below
  std::unordered_map<uint64_t, Flag> flags_;  // by op
  std::vector<FlightPtr> all_;                // that have not ended
  std::vector<CudaEvent> idle_events_;
  std::thread thread_;
};

}  // namespace jaxhetero
