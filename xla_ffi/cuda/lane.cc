#include "xla_ffi/cuda/lane.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr microseconds kLeastNap{10};
constexpr microseconds kMostNap{200};
constexpr milliseconds kIdle{100};
constexpr milliseconds kWatchInterval{100};
constexpr milliseconds kSettling{500};
constexpr unsigned char kPoison = 0xff;  // bytes that make a NaN of any float type, and -1 of any integer

DevicePointer device_pointer(const iovec& piece) { return reinterpret_cast<DevicePointer>(piece.iov_base); }

std::vector<iovec> pieces_of(const Leaves& bucket, size_t offset, size_t bytes) {
  std::vector<iovec> pieces;
  bucket.slice(offset, bytes, pieces);
  return pieces;
}

}  // namespace

struct CudaLane::Flight {
  // A whole round; the start of one that outlives its program, which is over when the operands are on the host; or the
  // end of one, whose total lies there.
  enum class Part : uint8_t { kWhole, kStart, kDone };
  Part part = Part::kWhole;
  RoundRequest request;  // moved out when the round starts
  Leaves operands;
  Leaves results;
  CudaAside aside;
  CudaEvent operands_written = nullptr;
  Flag flag;             // set to `round_count` when the round is over
  bool sends = true;     // false for a broadcast from another rank
  bool receives = true;  // false where `inputs` have the result: for a broadcast from this rank, or a total

  std::shared_ptr<std::byte> inputs;
  std::shared_ptr<std::byte> outputs;
  std::shared_ptr<std::byte> aside_memory;  // the operands beside the bucket, and behind them the results
  std::atomic<size_t> ready_bytes = 0;      // the bytes of the inputs that are ready

  // Bytes of the outputs that are missing, indexed by slice; the strands' threads count down.
  std::vector<std::atomic<size_t>> missing_bytes;

  // The lane's thread only.
  uint32_t first_copy_count = 0;  // the copy counter reaches it when the operands are written
  size_t out_slice_count = 0;
  bool started = false;
  bool copied_out = false;
  std::optional<Status> outcome;

  // The total of a start belongs to no result of its program.
  [[nodiscard]] size_t output_bytes() const { return part == Part::kStart ? operands.bytes() : results.bytes(); }
};

struct CudaLane::Inbox {
  struct News {  // a new flight; or a slice of its result is here; or its round is over
    FlightPtr flight;
    std::optional<size_t> slice;
    std::optional<Status> outcome;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<News> news;  // guarded by mutex, as is all below
  bool stopping = false;

  void add(News latest) {
    {
      const std::lock_guard lock(mutex);
      news.push_back(std::move(latest));
    }
    changed.notify_one();
  }
};

// --- On the threads that launch programs.

Result<std::unique_ptr<CudaLane>> CudaLane::create(std::shared_ptr<const CudaDriver> driver, CudaContext context,
                                                   std::shared_ptr<Communicator> communicator,
                                                   const CudaLaneConfig& config) {
  std::unique_ptr<CudaLane> lane(new CudaLane(std::move(driver), context, std::move(communicator), config));
  if (Status status = lane->prepare(); !status.ok()) return status;
  return lane;
}

CudaLane::CudaLane(std::shared_ptr<const CudaDriver> driver, CudaContext context,
                   std::shared_ptr<Communicator> communicator, const CudaLaneConfig& config)
    : driver_(std::move(driver)),
      context_(context),
      communicator_(std::move(communicator)),
      config_(config),
      inbox_(std::make_shared<Inbox>()) {}

// Everything of which taking more later could wait for the GPU.
Status CudaLane::prepare() {
  Result<std::shared_ptr<PinnedPool>> pool = PinnedPool::create(driver_, context_, config_.pinned_bytes);
  if (!pool.ok()) return {Code::kInvalidArgument, pool.status().message() + "; JAXHETERO_PINNED_BYTES sets how many"};
  pool_ = std::move(*pool);
  Result<std::unique_ptr<CudaFlags>> flags = CudaFlags::create(driver_, context_);
  if (!flags.ok()) return flags.status();
  flags_ = std::move(*flags);

  const CudaContextScope scope(*driver_, context_);
  // High priority, because such streams have hardware queues of their own. In one queue with a stream that waits for a
  // flag, the copies that lead to the flag would wait behind it.
  int least = 0;
  int greatest = 0;
  driver_->priority_range(&least, &greatest);
  for (CudaStream* stream : {&out_, &back_}) {
    const CudaResult result = driver_->stream_create(stream, kCudaStreamNonBlocking, greatest);
    if (Status status = driver_->check(result, "creating a stream"); !status.ok()) return status;
  }
  last_progress_at_ = next_watch_at_ = steady_clock::now();
  thread_ = std::thread([this] { run(); });
  return {};
}

CudaLane::~CudaLane() {
  if (thread_.joinable()) {
    drain(config_.timeout);
    {
      const std::lock_guard lock(inbox_->mutex);
      inbox_->stopping = true;
    }
    inbox_->changed.notify_one();
    thread_.join();
    release_all();
  }
  const CudaContextScope scope(*driver_, context_);
  for (const CudaEvent event : idle_events_) driver_->event_destroy(event);
  for (const CudaStream stream : {out_, back_}) {
    if (stream != nullptr) driver_->stream_destroy(stream);
  }
}

Status CudaLane::reduce(CudaStream stream, RoundRequest request, const Leaves& operands, const Leaves& results,
                        CudaAside aside) {
  auto flight = std::make_shared<Flight>();
  flight->operands = operands;
  flight->results = results;
  flight->aside = std::move(aside);
  const OpSpec& spec = request.spec;
  flight->sends = operands.bytes() > 0 && (spec.kind != Kind::kBroadcast || spec.root == config_.rank);
  flight->receives = results.bytes() > 0 && (spec.kind != Kind::kBroadcast || spec.root != config_.rank);
  flight->request = std::move(request);
  return begin(stream, flight);
}

Status CudaLane::start(CudaStream stream, RoundRequest request, const Leaves& operands, const Leaves& ticket) {
  auto flight = std::make_shared<Flight>();
  flight->part = Flight::Part::kStart;
  flight->operands = operands;
  flight->sends = flight->receives = operands.bytes() > 0;
  flight->aside.results = ticket;
  flight->request = std::move(request);
  return begin(stream, flight);
}

Status CudaLane::finish(CudaStream stream, uint64_t op, std::string label, const Leaves& ticket,
                        const Leaves& results) {
  auto flight = std::make_shared<Flight>();
  flight->part = Flight::Part::kDone;
  flight->sends = flight->receives = false;
  flight->results = results;
  flight->aside.operands = ticket;
  flight->request.op = op;
  flight->request.description = std::move(label);
  return begin(stream, flight);
}

Status CudaLane::begin(CudaStream stream, const FlightPtr& flight) {
  const auto room_of = [](size_t bytes) { return bytes > 0 ? PinnedPool::rounded(bytes) : 0; };
  const size_t needed_bytes = (flight->sends ? room_of(flight->operands.bytes()) : 0) +
                              (flight->receives ? room_of(flight->output_bytes()) : 0) + room_of(flight->aside.bytes());
  if (needed_bytes > pool_->capacity_bytes()) {
    return {Code::kInvalidArgument, flight->request.description + " needs " + std::to_string(needed_bytes) +
                                        " bytes of pinned memory at once, and this GPU has " +
                                        std::to_string(pool_->capacity_bytes()) +
                                        "; set JAXHETERO_PINNED_BYTES to a few times that"};
  }
  CudaEvent event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.has_value()) return *failure_;
    const Result<Flag> flag = flags_->next(flight->request.op);
    if (!flag.ok()) return flag.status();
    flight->flag = flag.value();
    if (!idle_events_.empty()) {
      event = idle_events_.back();
      idle_events_.pop_back();
    }
  }
  const Status status = enqueue(stream, event, flight);
  if (!status.ok()) {
    // The other workers would wait for this round, and the next ones need a driver that works.
    fail(status);
    communicator_->abort(status);
  }
  return status;
}

// Takes no lock around calls of the driver: where a stream's queue is full, they wait for the GPU, which may be waiting
// for the lane.
Status CudaLane::enqueue(CudaStream stream, CudaEvent event, const FlightPtr& flight) {
  const CudaContextScope scope(*driver_, context_);
  Status status;
  if (event == nullptr) status = driver_->check(driver_->event_create(&event, kCudaEventDisableTiming), "an event");
  if (status.ok()) status = driver_->check(driver_->event_record(event, stream), "recording an event");
  if (!status.ok()) return status;
  flight->operands_written = event;
  {
    const std::lock_guard lock(mutex_);
    all_.push_back(flight);
  }
  inbox_->add({flight, std::nullopt, std::nullopt});
  return driver_->check(flags_->wait(stream, flight->flag), "waiting for a flag");
}

Status CudaLane::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_.value_or(Status());
}

bool CudaLane::drain(milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [this] { return all_.empty(); });
}

// --- On the lane's thread.

void CudaLane::run() {
  const CudaContextScope scope(*driver_, context_);
  microseconds nap = kLeastNap;
  while (true) {
    nap = advance() ? kLeastNap : std::min(2 * nap, kMostNap);
    const bool polls = !queue_.empty() || !out_flights_.empty() || !back_flights_.empty();
    std::unique_lock lock(inbox_->mutex);
    inbox_->changed.wait_for(lock, polls ? nap : microseconds(kIdle),
                             [this] { return inbox_->stopping || !inbox_->news.empty(); });
    if (inbox_->stopping) return;
  }
}

// Moves every flight as far as it can go, and returns whether any moved.
bool CudaLane::advance() {
  bool moved = take_inbox();
  moved |= issue_copies_out();
  moved |= watch_copies_out();
  moved |= finish_flights();
  moved |= watch_flags();
  const steady_clock::time_point now = steady_clock::now();
  if (moved) last_progress_at_ = now;
  if (now >= next_watch_at_) {
    next_watch_at_ = now + kWatchInterval;
    watch_streams();
  }
  if (driver_failed_) release_all();
  return moved;
}

bool CudaLane::take_inbox() {
  std::vector<Inbox::News> news;
  {
    const std::lock_guard lock(inbox_->mutex);
    news.swap(inbox_->news);
  }
  for (Inbox::News& each : news) {
    if (each.slice.has_value()) {
      Flight& flight = *each.flight;
      const size_t offset = *each.slice * config_.slice_bytes;
      copy_back(flight, offset, std::min(config_.slice_bytes, flight.results.bytes() - offset));
    } else if (each.outcome.has_value()) {
      each.flight->outcome = std::move(each.outcome);
      ended_flights_.push_back(std::move(each.flight));
    } else {
      queue_.push_back(std::move(each.flight));
    }
  }
  return !news.empty();
}

// In the order of the launches: the out stream is one queue, in which an earlier copy must not wait for a later one.
bool CudaLane::issue_copies_out() {
  bool moved = false;
  while (!queue_.empty() && !driver_failed_) {
    Flight& flight = *queue_.front();
    // After a failure it carries no data, and only has to end in its turn.
    if (failure().ok() && !take_memory(flight)) return moved;
    if (const Status status = issue_copies_out(flight); !status.ok()) {
      give_up(status);
      return true;
    }
    out_flights_.push_back(std::move(queue_.front()));
    queue_.pop_front();
    moved = true;
  }
  return moved;
}

// Takes all blocks or none: one that is taken alone could fill the room that another one needs.
bool CudaLane::take_memory(Flight& flight) {
  const size_t bytes = flight.operands.bytes();
  const bool has_aside = flight.aside.bytes() > 0;
  std::shared_ptr<std::byte> inputs = flight.sends ? pool_->allocate(bytes) : nullptr;
  std::shared_ptr<std::byte> outputs = flight.receives ? pool_->allocate(flight.output_bytes()) : nullptr;
  std::shared_ptr<std::byte> aside_memory = has_aside ? pool_->allocate(flight.aside.bytes()) : nullptr;
  const bool lacks_some = (flight.sends && inputs == nullptr) || (flight.receives && outputs == nullptr) ||
                          (has_aside && aside_memory == nullptr);
  if (lacks_some) return false;
  flight.inputs = std::move(inputs);
  flight.outputs = std::move(outputs);
  flight.aside_memory = std::move(aside_memory);
  if (flight.sends) flight.out_slice_count = (bytes + config_.slice_bytes - 1) / config_.slice_bytes;
  return true;
}

Status CudaLane::issue_copies_out(Flight& flight) {
  Status status = driver_->check(driver_->stream_wait_event(out_, flight.operands_written, 0), "waiting for an event");
  {
    // The stream waits for what the event stands for now, so the event may be recorded anew.
    const std::lock_guard lock(mutex_);
    idle_events_.push_back(flight.operands_written);
  }
  // What is aside comes first: the round cannot begin without it.
  if (std::byte* to = flight.aside_memory.get(); to != nullptr) {
    for (const iovec& piece : pieces_of(flight.aside.operands, 0, flight.aside.operands.bytes())) {
      if (!status.ok()) return status;
      const CudaResult result = driver_->copy_to_host(to, device_pointer(piece), piece.iov_len, out_);
      status = driver_->check(result, "copying to the host");
      to += piece.iov_len;
    }
  }
  const auto count = [this, &status] {
    if (!status.ok()) return;
    const CudaResult result = flags_->write(out_, CudaFlags::kCopyCounter, ++issued_copy_count_);
    status = driver_->check(result, "counting a copy");
  };
  count();
  flight.first_copy_count = issued_copy_count_;
  for (size_t slice = 0; slice < flight.out_slice_count; ++slice) {
    const size_t offset = slice * config_.slice_bytes;
    std::byte* to = flight.inputs.get() + offset;
    const size_t bytes = std::min(config_.slice_bytes, flight.operands.bytes() - offset);
    for (const iovec& piece : pieces_of(flight.operands, offset, bytes)) {
      if (!status.ok()) return status;
      const CudaResult result = driver_->copy_to_host(to, device_pointer(piece), piece.iov_len, out_);
      status = driver_->check(result, "copying to the host");
      to += piece.iov_len;
    }
    count();
  }
  return status;
}

bool CudaLane::watch_copies_out() {
  const uint32_t counter = flags_->load(CudaFlags::kCopyCounter);
  bool moved = false;
  while (!out_flights_.empty() && CudaFlags::has_reached(counter, out_flights_.front()->first_copy_count)) {
    const FlightPtr& flight = out_flights_.front();
    if (!flight->started) {
      start_round(flight);
      moved = true;
    }
    const size_t slices = std::min<size_t>(counter - flight->first_copy_count, flight->out_slice_count);
    const size_t bytes = std::min(slices * config_.slice_bytes, flight->operands.bytes());
    if (bytes > flight->ready_bytes.load(std::memory_order_relaxed)) {
      flight->ready_bytes.store(bytes, std::memory_order_release);
      communicator_->feed();
      moved = true;
    }
    if (slices < flight->out_slice_count) return moved;
    flight->copied_out = true;
    if (flight->part == Flight::Part::kStart && !flight->outcome.has_value()) {
      flight->outcome = Status();
      ended_flights_.push_back(flight);
    }
    out_flights_.pop_front();
    moved = true;
  }
  return moved;
}

// Called when the operands are written, and not before: the other workers would take our program's computation for a
// stall.
void CudaLane::start_round(const FlightPtr& flight) {
  flight->started = true;
  if (const Status why = failure(); !why.ok()) {
    flight->outcome = why;
    ended_flights_.push_back(flight);
    return;
  }
  if (flight->part == Flight::Part::kStart) return start_pending_round(flight);
  if (flight->part == Flight::Part::kDone) return take_pending_round(flight);
  RoundRequest request = std::move(flight->request);
  if (flight->aside.begin != nullptr) {
    flight->aside.begin({flight->aside_memory.get(), flight->aside.operands.bytes()}, request);
  }
  if (!flight->sends) flight->ready_bytes.store(std::numeric_limits<size_t>::max(), std::memory_order_release);
  if (flight->sends) request.inputs.append(flight->inputs.get(), flight->operands.bytes());
  if (flight->receives) {
    const size_t bytes = flight->results.bytes();
    request.outputs.append(flight->outputs.get(), bytes);
    flight->missing_bytes = std::vector<std::atomic<size_t>>((bytes + config_.slice_bytes - 1) / config_.slice_bytes);
    for (size_t offset = 0; offset < bytes; offset += config_.slice_bytes) {
      flight->missing_bytes[offset / config_.slice_bytes] = std::min(config_.slice_bytes, bytes - offset);
    }
  }
  request.inputs_owner = flight->inputs;
  request.inputs_home = LongLived{{pool_->memory(), pool_->capacity_bytes()}, pool_};
  request.sliced.ready_bytes = std::shared_ptr<const std::atomic<size_t>>(flight, &flight->ready_bytes);
  request.sliced.received = [flight, inbox = inbox_, slice_bytes = config_.slice_bytes](size_t offset, size_t bytes) {
    for (size_t part = 0; bytes > 0; offset += part, bytes -= part) {
      const size_t slice = offset / slice_bytes;
      part = std::min(bytes, (slice + 1) * slice_bytes - offset);
      if (flight->missing_bytes[slice].fetch_sub(part) == part) inbox->add({flight, slice, std::nullopt});
    }
  };
  request.sliced.revoked = [flight, slice_bytes = config_.slice_bytes](size_t offset, size_t bytes) {
    for (size_t part = 0; bytes > 0; offset += part, bytes -= part) {
      const size_t slice = offset / slice_bytes;
      part = std::min(bytes, (slice + 1) * slice_bytes - offset);
      flight->missing_bytes[slice].fetch_add(part);
    }
  };
  request.done = [flight, inbox = inbox_](const Status& status) { inbox->add({flight, std::nullopt, status}); };
  communicator_->start_round(std::move(request));
}

// Inputs and outputs are ours: to the strands, the round is like any other of this host.
void CudaLane::start_pending_round(const FlightPtr& flight) {
  PendingRounds& pending = communicator_->pending_rounds();
  RoundRequest request = std::move(flight->request);
  const size_t bytes = flight->operands.bytes();
  const Ticket ticket = pending.add(request.description, {flight->outputs, bytes, std::nullopt});
  std::memcpy(flight->aside_memory.get(), &ticket, sizeof ticket);
  request.inputs.append(flight->inputs.get(), bytes);
  request.outputs.append(flight->outputs.get(), bytes);
  request.inputs_owner = flight->inputs;
  request.inputs_home = LongLived{{pool_->memory(), pool_->capacity_bytes()}, pool_};
  request.sliced.ready_bytes = std::shared_ptr<const std::atomic<size_t>>(flight, &flight->ready_bytes);
  request.done = [total = flight->outputs, ticket, &pending](const Status& status) { pending.end(ticket, status); };
  communicator_->start_round(std::move(request));
}

void CudaLane::take_pending_round(const FlightPtr& flight) {
  Ticket ticket;
  std::memcpy(&ticket, flight->aside_memory.get(), sizeof ticket);
  const auto taken = [flight, inbox = inbox_](const Status& status, const PendingTotal& total) {
    flight->inputs = total.memory;
    inbox->add({flight, std::nullopt, status});
  };
  const Status status = communicator_->pending_rounds().take(ticket, flight->results.bytes(), taken);
  if (status.ok()) return;
  flight->outcome = Status(status.code(), flight->request.description + ": " + status.message());
  ended_flights_.push_back(flight);
}

void CudaLane::copy_back(Flight& flight, size_t offset, size_t bytes) {
  const std::byte* from = (flight.receives ? flight.outputs : flight.inputs).get() + offset;
  copy_to_device(flight.results, from, offset, bytes);
}

void CudaLane::copy_to_device(const Leaves& to, const std::byte* from, size_t offset, size_t bytes) {
  for (const iovec& piece : pieces_of(to, offset, bytes)) {
    if (driver_failed_) return;
    check_driver(driver_->copy_to_device(device_pointer(piece), from, piece.iov_len, back_), "copying to the GPU");
    from += piece.iov_len;
  }
}

void CudaLane::poison(const Leaves& results) {
  for (const iovec& piece : pieces_of(results, 0, results.bytes())) {
    if (driver_failed_) return;
    check_driver(driver_->fill(device_pointer(piece), kPoison, piece.iov_len, back_), "marking failed results");
  }
}

// Sets the flags of an op in the order of its rounds, even where their ends are reported in another order.
bool CudaLane::finish_flights() {
  bool moved = false;
  // A driver that fails here ends all flights.
  for (auto it = ended_flights_.begin(); !driver_failed_ && it != ended_flights_.end();) {
    const FlightPtr flight = *it;
    uint32_t& finished = finished_counts_[flight->flag.slot];
    if (!flight->copied_out || finished + 1 != flight->flag.round_count) {
      ++it;
      continue;
    }
    finished = flight->flag.round_count;
    back_flights_.push_back(flight);
    it = ended_flights_.erase(it);
    finish(*flight);
    moved = true;
  }
  return moved;
}

void CudaLane::finish(Flight& flight) {
  const CudaAside& aside = flight.aside;
  std::byte* const aside_results = flight.aside_memory.get() + aside.operands.bytes();
  Status end = *flight.outcome;
  if (end.ok() && aside.finish != nullptr) end = aside.finish({aside_results, aside.results.bytes()});
  if (end.ok()) {
    if (!flight.receives) copy_back(flight, 0, flight.results.bytes());
    copy_to_device(aside.results, aside_results, 0, aside.results.bytes());
  } else {
    fail(end);
    poison(flight.results);
    poison(aside.results);
  }
  if (driver_failed_) return;
  check_driver(flags_->write(back_, flight.flag.slot, flight.flag.round_count), "setting a flag");
}

bool CudaLane::watch_flags() {
  bool moved = false;
  while (!back_flights_.empty()) {
    const FlightPtr flight = back_flights_.front();
    if (!flags_->is_set(flight->flag)) break;
    back_flights_.pop_front();
    flight->inputs.reset();
    flight->outputs.reset();
    flight->aside_memory.reset();
    const std::lock_guard lock(mutex_);
    std::erase(all_, flight);
    changed_.notify_all();
    moved = true;
  }
  return moved;
}

void CudaLane::watch_streams() {
  if (driver_failed_) return;
  for (const CudaStream stream : {out_, back_}) {
    const CudaResult result = driver_->stream_query(stream);
    if (result != kCudaNotReady) check_driver(result, "copying");
  }
  if (steady_clock::now() - last_progress_at_ < config_.timeout) return;
  if (!back_flights_.empty()) give_up({Code::kRoundTimeout, "the GPU does not copy results back"});
  const std::lock_guard lock(mutex_);
  if (queue_.empty() || all_.size() > queue_.size() || failure_.has_value()) return;
  failure_ =
      Status(Code::kInvalidArgument, queue_.front()->request.description +
                                         " waits for pinned memory: " + std::to_string(pool_->used_bytes()) + " of " +
                                         std::to_string(pool_->capacity_bytes()) +
                                         " bytes are kept for rounds that are over, in case a reducer is lost; set " +
                                         "JAXHETERO_PINNED_BYTES to more than the program reduces in a step");
}

void CudaLane::check_driver(CudaResult result, const char* what) {
  if (const Status status = driver_->check(result, what); !status.ok()) give_up(status);
}

void CudaLane::fail(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (!failure_.has_value()) failure_ = why;
}

// The driver fails, so it cannot set flags either: the lane sets them itself. From then on the program may free its
// memory, so nothing more is asked of the driver's streams.
void CudaLane::give_up(const Status& why) {
  if (driver_failed_) return;
  driver_failed_ = true;
  fail(why);
  communicator_->abort(why);
  settle();
  release_all();
}

// Waits a moment for the copies that are under way: once the flags are set, their memory is the program's again.
void CudaLane::settle() {
  const steady_clock::time_point deadline = steady_clock::now() + kSettling;
  for (const CudaStream stream : {out_, back_}) {
    while (driver_->stream_query(stream) == kCudaNotReady && steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kMostNap);
    }
  }
}

// Sets all flags, so that no stream waits any more, and ends all flights.
void CudaLane::release_all() {
  const std::lock_guard lock(mutex_);
  if (!failure_.has_value() && !all_.empty()) failure_ = Status(Code::kNotInitialized, "jaxhetero was shut down");
  flags_->set_all();
  for (const FlightPtr& flight : queue_) idle_events_.push_back(flight->operands_written);
  for (auto* flights : {&queue_, &out_flights_, &ended_flights_, &back_flights_}) flights->clear();
  all_.clear();
  changed_.notify_all();
}

}  // namespace jaxhetero
