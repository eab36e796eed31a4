#include "xla_ffi/worker/communicator.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr milliseconds kWatchInterval{250};
constexpr milliseconds kFailureFlush{500};
constexpr int64_t kLateReportMs = 5000;
constexpr milliseconds kFeedInterval{20};

}  // namespace

Communicator::Communicator(CommunicatorConfig config)
    : config_(std::move(config)), callback_threads_(std::make_unique<CallbackThreads>()) {}

Communicator::~Communicator() {
  if (thread_.joinable()) {
    loop_->post([this] { fail({Code::kNotInitialized, "the communicator was destroyed"}); });
    thread_.join();
  }
  callback_threads_.reset();
}

Status Communicator::start() {
  Result<TcpAddress> address = resolve(config_.coordinator);
  if (!address.ok()) return address.status();
  Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
  if (!loop.ok()) return loop.status();
  loop_ = std::move(*loop);
  context_ = std::make_unique<TcpContext>(*loop_, config_.token, config_.job.checksum);
  context_->counters = counters_;
  if (!config_.source.empty()) {
    Result<TcpAddress> source = resolve(config_.source, 0);
    if (!source.ok()) return source.status();
    context_->source = *source;
  }
  if (config_.rank == 0) {
    coordinator_ = std::make_unique<Coordinator>(*context_, config_.job, config_.version, log_);
    if (Status status = coordinator_->bind(*address); !status.ok()) return status;
  }
  Registration registration;
  registration.role = Role::kWorker;
  registration.rank = static_cast<int32_t>(config_.rank);
  registration.job = config_.job;
  registration.version = config_.version;
  registration.host_name = config_.host_name;
  member_ = std::make_unique<Member>(*context_, *address, std::move(registration), log_, config_.timeout);
  loop_->post([this] {
    if (coordinator_) {
      if (const Status status = coordinator_->start(config_.start_timeout, config_.timeout); !status.ok())
        return fail(status);
    }
    member_->start(config_.start_timeout, {
                                              .on_view = [this](const View& view) { join(view); },
                                              .on_halt = [this](const Halt& word) { halt(word); },
                                              .on_forget = [this](const Progress& all) { forget(all); },
                                              .on_leaving =
                                                  [this] {
                                                    asked_whether_idle_ = true;
                                                    note_idle();
                                                  },
                                              .on_goodbye =
                                                  [this] {
                                                    coordinator_has_left_ = true;
                                                    if (phase_ == Phase::kLeaving) end_in_order();
                                                  },
                                              .on_failure = [this](const Status& why) { fail_as_told(why); },
                                          });
    watch_progress();
    feed_starved();
  });
  thread_ = std::thread([this] {
    loop_->run();
    refuse_inbox();
  });
  return {};
}

std::optional<Status> Communicator::wait_ready(milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [this] { return ready_.has_value(); });
  return ready_;
}

void Communicator::set_ready(Status status) {
  const std::lock_guard lock(mutex_);
  if (!ready_.has_value()) ready_ = std::move(status);
  changed_.notify_all();
}

// The coordinator's word who reduces from now on: at the start, and again after every halt().
void Communicator::join(const View& view) {
  if (has_ended()) return;
  if (view.reducers.empty()) return fail({Code::kInvalidArgument, "this job has no reducer"});
  job_id_ = view.job_id;
  view_number_ = view.number;
  resume_ = view.resume;
  planner_.enter(view);
  for (const View::Reducer& reducer : view.reducers) {
    Result<TcpAddress> address = resolve(reducer.address, reducer.port);
    if (!address.ok()) {
      const std::string name = "reducer " + std::to_string(reducer.number) + " (host " + reducer.host_name + ")";
      return fail({Code::kInvalidArgument, name + ": " + address.status().message()});
    }
    links_.emplace_back(reducer, *address, config_.job, config_.rank);
  }
  const milliseconds patience = view_number_ == 0 ? config_.start_timeout : config_.timeout;
  for (ReducerLink& link : links_) link.connect(*context_, *this, patience);
}

uint32_t Communicator::reducer_of(const Connection& connection) const {
  const auto link = std::ranges::find_if(links_, [&](const ReducerLink& l) { return l.has(connection); });
  return static_cast<uint32_t>(link - links_.begin());
}

void Communicator::on_open(Connection& connection) {
  ReducerLink& link = links_[reducer_of(connection)];
  link.set_open();
  if (config_.shared_memory) link.offer_memory();
  connection.send(
      OutFrame::control(FrameType::kJoin, encode(Join{job_id_, config_.rank, view_number_, planner_.digest()})));
  if (std::ranges::all_of(links_, &ReducerLink::is_open)) resume();
}

// Every reducer of the view is reached: the rounds go on, first those that are over here and not everywhere.
void Communicator::resume() {
  halted_ = false;
  if (phase_ != Phase::kStarting) {
    const auto stood = duration_cast<milliseconds>(EventLoop::Clock::now() - halted_since_);
    log_.add(Severity::kWarning, "going on with " + std::to_string(links_.size()) + " reducers after " +
                                     std::to_string(stood.count()) + " ms");
  }
  for (auto& [op_id, op] : ops_) op.enter_view();
  for (const View::Resume& again : resume_) replay(again.op, again.round);
  start_waiting();
  if (phase_ == Phase::kStarting && !planner_.has_begun_probe()) probe_rates();
  note_idle();
  if (phase_ == Phase::kLeaving) leave();
}

void Communicator::start_waiting() {
  for (auto& [op_id, op] : ops_) {
    if (may_start(op)) start_next(op_id, op);
  }
}

// The program's rounds need the plan, which the start makes.
bool Communicator::may_start(const Op& op) const {
  return !halted_ && op.running() == nullptr && op.next() != nullptr &&
         (phase_ != Phase::kStarting || op.next()->is_internal);
}

// Runs the rounds of the measurement, one by one. With its answer comes the plan, and the job can begin.
void Communicator::probe_rates() {
  if (std::optional<RoundRequest> request = planner_.next_probe()) return enqueue(std::move(*request));
  if (config_.rank == 0 && config_.job.measure_rates) log_.add(Severity::kInfo, planner_.rates_text());
  phase_ = Phase::kRunning;
  set_ready({});
  start_waiting();
}

void Communicator::replay(uint64_t op_id, uint64_t number) {
  const auto found = ops_.find(op_id);
  if (found == ops_.end() || found->second.begun_count() <= number) return;  // not over here either
  Op& op = found->second;
  if (!op.keeps(number)) {
    return fail({Code::kInternal, own_name() + " is asked for " + op.kept_description() + " round " +
                                      std::to_string(number) + ", which it does not keep"});
  }
  run(op_id, op, op.begin_again(number));
}

// The view has changed. Nothing of the old one is to come in later, so its connections go; what runs begins anew.
void Communicator::halt(const Halt& halt) {
  if (has_ended()) return;
  log_.add(Severity::kWarning, halt.why);
  ++counters_->view_count;
  if (!halted_) halted_since_ = EventLoop::Clock::now();
  halted_ = true;
  view_number_ = halt.view;
  for (ReducerLink& link : links_) link.close();
  links_.clear();
  if (running_round_count_ > 0) note_busy();
  running_round_count_ = 0;
  for (auto& [op_id, op] : ops_) {
    if (op.running() != nullptr && op.stop()) ++waiting_round_count_;
  }
  member_->send(OutFrame::control(FrameType::kProgress, encode(progress())));
}

Progress Communicator::progress() const {
  Progress progress{view_number_, {}};
  for (const auto& [op_id, op] : ops_) progress.ops.push_back({op_id, op.begun_count()});
  return progress;
}

// Of ops that the program has left behind, or that it runs once, the coordinator finds out when nobody can need the
// last round again.
void Communicator::report_still(EventLoop::Clock::time_point now) {
  if (!config_.job.failover || phase_ != Phase::kRunning || halted_) return;
  Progress still{view_number_, {}};
  size_t kept_bytes = 0;
  for (auto& [op_id, op] : ops_) {
    if (op.is_still(now - config_.timeout)) still.ops.push_back({op_id, op.begun_count()});
    kept_bytes += op.kept_bytes();
  }
  counters_->kept_bytes = kept_bytes;
  if (!still.ops.empty()) member_->send(OutFrame::control(FrameType::kStill, encode(still)));
}

void Communicator::forget(const Progress& completed) {
  for (const Progress::OpProgress& op : completed.ops) {
    if (const auto found = ops_.find(op.op); found != ops_.end()) found->second.forget(op.completed_count);
  }
}

void Communicator::start_round(RoundRequest request) {
  request.requested = EventLoop::Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.has_value()) {
      inbox_.push_back(std::move(request));
      loop_->post([this] { take_inbox(); });
      return;
    }
  }
  complete(std::move(request), failure());
}

void Communicator::feed() {
  loop_->post([this] {
    for (ReducerLink& link : links_) link.push_chunks();
  });
}

void Communicator::abort(Status why) {
  loop_->post([this, why = std::move(why)] { fail(why); });
}

Status Communicator::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_.value_or(Status());
}

void Communicator::take_inbox() {
  std::vector<RoundRequest> requests;
  {
    const std::lock_guard lock(mutex_);
    requests.swap(inbox_);
  }
  for (RoundRequest& request : requests) enqueue(std::move(request));
}

// The loop has ended: from here on start_round() answers by itself, and what it left for the loop is answered here.
void Communicator::refuse_inbox() {
  std::vector<RoundRequest> requests;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.has_value()) failure_ = Status(Code::kNotInitialized, "jaxhetero was shut down");
    requests.swap(inbox_);
  }
  for (RoundRequest& request : requests) complete(std::move(request), failure());
}

void Communicator::complete(RoundRequest request, const Status& status) {
  if (!request.done) return;  // a replay: nobody waits for it here
  callback_threads_->run([done = std::move(request.done), status] { done(status); });
}

void Communicator::enqueue(RoundRequest request) {
  if (phase_ == Phase::kLeaving) {
    return complete(std::move(request), {Code::kNotInitialized, "a round was started during the shutdown"});
  }
  if (has_ended()) return complete(std::move(request), failure());
  const uint64_t op_id = request.op;
  Op& op = ops_.try_emplace(op_id, context_->lent_memory).first->second;
  if (!op.agrees(request.spec)) {
    const std::string what = describe(request.spec) + " is not what " + request.description + " was before";
    return complete(std::move(request), {Code::kInternal, what});
  }
  op.add(std::move(request));
  ++waiting_round_count_;
  if (may_start(op)) start_next(op_id, op);
}

void Communicator::start_next(uint64_t op_id, Op& op) {
  --waiting_round_count_;
  run(op_id, op, op.begin());
}

void Communicator::run(uint64_t op_id, Op& op, Round& round) {
  round.begin = round.progress = EventLoop::Clock::now();
  if (running_round_count_++ == 0) busy_since_ = round.progress;

  const OpSpec& spec = round.request.spec;
  const ShardPlan& plan = planner_.plan_of(round.request);
  const size_t item = item_bytes(spec.dtype);
  round.least_window_bytes = plan.least_window_bytes(spec.total_count, item);
  const uint64_t chunk_count = plan.chunk_count(spec.total_count, item, spec.call_bytes);
  for (const Shard& shard : plan.cut(op_id, spec.total_count, item)) round.segments.emplace_back(shard, chunk_count);
  round.open_segment_count = round.segments.size();
  if (spec.kind == Kind::kBroadcast && spec.root == config_.rank && !round.is_replay) {
    copy(round.request.inputs, round.request.outputs);
  }
  for (Segment& segment : round.segments) {
    describe_op(op_id, op, segment.shard.reducer);
    links_[segment.shard.reducer].begin(round, segment);
  }
}

void Communicator::describe_op(uint64_t op_id, Op& op, uint32_t reducer) {
  if (!op.is_new_to(reducer)) return;
  const Round& round = *op.running();
  FrameHeader header;
  header.op = op_id;
  header.round = round.number;
  const OpDescription description{round.request.spec, round.request.description};
  links_[reducer].send(OutFrame::control(FrameType::kDescribe, encode(description), header));
}

void Communicator::feed_starved() {
  for (ReducerLink& link : links_) link.feed_starved(EventLoop::Clock::now());
  if (!has_ended()) loop_->after(kFeedInterval, [this] { feed_starved(); });
}

Status Communicator::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  const uint32_t reducer = reducer_of(connection);
  switch (header.type) {
    case FrameType::kResult:
      return begin_result(header, reducer, into);
    case FrameType::kLate:
    case FrameType::kFault:
      into = links_[reducer].take_control(header.payload_bytes);
      return {};
    default:
      return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
  }
}

// The open segment whose next chunk this result is; a reducer that sends anything else is refused.
Result<Segment*> Communicator::segment_of(const FrameHeader& header, uint32_t reducer) {
  const auto op = ops_.find(header.op);
  Round* round = op == ops_.end() ? nullptr : op->second.running();
  if (round == nullptr || round->number != header.round) {
    return Status(Code::kProtocol, "it sent a result of a round that does not run");
  }
  Segment* segment = round->segment_at(reducer);
  if (segment == nullptr || segment->done) {
    return Status(Code::kProtocol, "it sent a result that nobody asked for");
  }
  return segment;
}

Status Communicator::begin_result(const FrameHeader& header, uint32_t reducer, std::vector<iovec>& into) {
  Result<Segment*> found = segment_of(header, reducer);
  if (!found.ok()) return found.status();
  Op& op = ops_.at(header.op);
  Round& round = *op.running();
  const OpSpec& spec = round.request.spec;
  if (Status status = links_[reducer].check_result(spec, *found.value(), header); !status.ok()) return status;
  if (!std::exchange(round.is_answered, true) && config_.job.failover && !round.is_replay) {
    op.keep(contributes(spec, config_.rank));
  }
  if (round.is_replay) {  // the result is here already
    into = links_[reducer].take_control(header.payload_bytes);
  } else {
    round.place(header.offset * item_bytes(spec.dtype), header.payload_bytes, into);
  }
  return {};
}

Status Communicator::on_frame(Connection& connection, const FrameHeader& header) {
  const uint32_t reducer = reducer_of(connection);
  switch (header.type) {
    case FrameType::kResult:
      finish_result(header, reducer);
      return {};
    case FrameType::kLate:
      note_late(header, links_[reducer].control());
      return {};
    default:
      fail_as_told(decode_fault(links_[reducer].control()));
      return {};
  }
}

void Communicator::finish_result(const FrameHeader& header, uint32_t reducer) {
  Op& op = ops_.at(header.op);
  Round& round = *op.running();
  Segment& segment = *segment_of(header, reducer).value();
  const size_t begin = header.offset * item_bytes(round.request.spec.dtype);
  if (round.request.widens && !round.is_replay) round.widen(begin, header.payload_bytes, pieces_);
  if (round.request.received != nullptr && header.payload_bytes > 0) {
    round.request.reported.add(begin, begin + header.payload_bytes, round.request.received);
  }
  round.progress = EventLoop::Clock::now();
  if (round.first_result == EventLoop::Clock::time_point()) round.first_result = round.progress;
  links_[reducer].finish_result(round, segment, header, round.progress);
  if (round.note_slowest()) {
    for (ReducerLink& link : links_) link.push_chunks();
  }
  if (!segment.done) return;
  if (--round.open_segment_count == 0) finish_round(header.op, op);
}

void Communicator::finish_round(uint64_t op_id, Op& op) {
  const std::unique_ptr<Round> round = op.finish();
  if (--running_round_count_ == 0) note_busy();
  if (round->request.is_internal) {
    if (!round->is_replay) {
      planner_.finish_probe();
      probe_rates();
    }
  } else if (!round->is_replay) {
    last_completed_ = round->name();
    ++counters_->round_count;
    record(*round);
    complete(std::move(round->request), {});
  }
  if (may_start(op)) start_next(op_id, op);
  note_idle();
  if (phase_ == Phase::kLeaving) leave();
}

void Communicator::note_busy() {
  counters_->busy_us +=
      static_cast<uint64_t>(duration_cast<microseconds>(EventLoop::Clock::now() - busy_since_).count());
}

void Communicator::record(const Round& round) {
  constexpr size_t kMostRecords = 4096;
  const RoundRequest& request = round.request;
  const std::lock_guard lock(mutex_);
  if (timeline_.size() == kMostRecords) timeline_.pop_front();
  timeline_.push_back({request.description, round.number, request.spec.total_count * item_bytes(request.spec.dtype),
                       request.requested, round.begin, round.first_result, round.progress});
}

std::vector<RoundRecord> Communicator::timeline() const {
  const std::lock_guard lock(mutex_);
  return {timeline_.begin(), timeline_.end()};
}

std::string Communicator::own_name() const {
  return "rank " + std::to_string(config_.rank) + " (host " + config_.host_name + ")";
}

void Communicator::note_late(const FrameHeader& header, const Bytes& text) {
  const auto op = ops_.find(header.op);
  if (op == ops_.end() || op->second.running() == nullptr || op->second.running()->number != header.round) return;
  Round& round = *op->second.running();
  round.late = decode_text(text);
  if (header.count > 0) round.others_moved = EventLoop::Clock::now();
  const int64_t now = loop_->now_ms();
  if (now < round.next_late_report_ms) return;
  round.next_late_report_ms = now + kLateReportMs;
  const auto waited = duration_cast<milliseconds>(EventLoop::Clock::now() - round.progress);
  log_.add(Severity::kWarning, "waiting for " + round.late + " since " + std::to_string(waited.count()) + " ms in " +
                                   round.name() + (header.count > 0 ? "; data still moves there, slowly" : ""));
}

void Communicator::watch_progress() {
  if (has_ended()) return;
  const EventLoop::Clock::time_point now = EventLoop::Clock::now();
  const bool is_changing = halted_ && phase_ != Phase::kStarting;
  if (is_changing && now - halted_since_ >= 2 * config_.timeout) {
    return fail({Code::kRoundTimeout,
                 own_name() + ": no word how to go on for " + std::to_string(2 * config_.timeout.count()) + " ms"});
  }
  for (const auto& [op_id, op] : ops_) {
    if (op.running() == nullptr) continue;
    Round& round = *op.running();
    // The first round of an op waits for the slowest compiler of the job as well.
    milliseconds allowed = round.number == 0 ? std::max(config_.timeout, config_.start_timeout) : config_.timeout;
    if (phase_ == Phase::kLeaving) allowed = std::min(allowed, leave_patience_);
    if (now - std::max(round.progress, round.others_moved) < allowed || accuse_silent(round)) continue;
    const std::string where =
        " for " + std::to_string(allowed.count()) + " ms in " + round.name() + "; last completed: " + last_completed_;
    if (!round.late.empty()) {
      return fail({Code::kRoundTimeout, own_name() + ": still waiting for " + round.late + ": no progress" + where});
    }
    return fail({Code::kRoundTimeout, own_name() + ": no word from " + silent_reducers(round) + where});
  }
  report_still(now);
  loop_->after(kWatchInterval, [this] { watch_progress(); });
}

std::string Communicator::silent_reducers(const Round& round) const {
  std::string names;
  for (const Segment& segment : round.segments) {
    if (segment.done) continue;
    if (!names.empty()) names += ", ";
    names += links_[segment.shard.reducer].name();
  }
  return names;
}

// Whether some reducers hold a round up, while others do not: then the job is better off without them. They wait for
// nobody, or they would have said so. Once for a round.
bool Communicator::accuse_silent(Round& round) {
  const auto is_silent = [](const Segment& segment) { return !segment.done; };
  const auto silent_count = static_cast<size_t>(std::ranges::count_if(round.segments, is_silent));
  if (!config_.job.failover || round.has_accused || !round.late.empty() || silent_count == links_.size()) return false;
  for (const Segment& segment : round.segments) {
    if (!segment.done) report_lost(links_[segment.shard.reducer], "it has said nothing in " + round.name());
  }
  round.has_accused = true;
  round.progress = EventLoop::Clock::now();
  return true;
}

void Communicator::report_lost(const ReducerLink& link, const std::string& why) {
  member_->send(
      OutFrame::control(FrameType::kLost, encode(Lost{view_number_, link.number(), own_name() + ": " + why})));
}

void Communicator::on_close(Connection& connection, const Status& why) {
  if (has_ended()) return;
  const uint32_t reducer = reducer_of(connection);
  if (reducer >= links_.size()) return;
  ReducerLink& link = links_[reducer];
  const bool refused = why.code() == Code::kUnauthenticated || why.code() == Code::kVersionMismatch;
  // The coordinator halts everybody and makes a new view.
  if (config_.job.failover && !refused) return report_lost(link, why.message());
  if (phase_ == Phase::kLeaving && is_idle()) return;
  std::string text = link.name() + " was lost: " + why.message();
  if (phase_ == Phase::kStarting) text += ", in the stage connect";
  fail({refused ? why.code() : Code::kReducerLost, text + circumstances()});
}

// By the coordinator, or by a reducer.
void Communicator::fail_as_told(const Status& why) {
  const bool lost = why.code() == Code::kWorkerLost || why.code() == Code::kReducerLost;
  const bool told = why.message().find("last completed") != std::string::npos;  // by a worker who knew
  fail({why.code(), why.message() + (lost && !told && phase_ != Phase::kStarting ? circumstances() : "")});
}

// What the loss of somebody interrupts.
std::string Communicator::circumstances() const {
  std::string text;
  for (const auto& [op_id, op] : ops_) {
    if (op.running() != nullptr) text += "; running: " + op.running()->name();
    if (text.size() > 1000) break;
  }
  return text + "; last completed: " + last_completed_;
}

Status Communicator::shutdown(milliseconds patience) {
  if (!thread_.joinable()) return {};
  loop_->post([this, patience] {
    if (has_ended()) return;
    if (phase_ == Phase::kStarting) return fail({Code::kNotInitialized, "shut down before the start was complete"});
    phase_ = Phase::kLeaving;
    leave_patience_ = patience;
    if (patience.count() == 0) return fail({Code::kNotInitialized, "shut down without ceremony"});
    leave();
  });
  thread_.join();
  return phase_ == Phase::kLeft ? Status() : failure();
}

void Communicator::note_idle() {
  if (!asked_whether_idle_ || !is_idle()) return;
  asked_whether_idle_ = false;
  member_->send(OutFrame::control(FrameType::kIdle, {}));
}

// Says goodbye once nothing runs any more. The coordinator lets us go when the same holds for everybody: a reducer that
// is lost before may make others need what we keep.
void Communicator::leave() {
  if (!is_idle()) return;
  if (coordinator_has_left_) return end_in_order();
  for (ReducerLink& link : links_) link.send(OutFrame::control(FrameType::kGoodbye, {}));
  member_->send(OutFrame::control(FrameType::kGoodbye, {}));
}

void Communicator::end_in_order() {
  if (has_ended()) return;
  phase_ = Phase::kLeft;
  for (ReducerLink& link : links_) link.close();
  member_->stop();
  if (!coordinator_) return loop_->stop();
  coordinator_->end([this] { loop_->stop(); });
}

void Communicator::fail(const Status& why) {
  if (has_ended()) return;
  phase_ = Phase::kFailed;
  {
    const std::lock_guard lock(mutex_);
    failure_ = why;
  }
  set_ready(why);
  context_->lent_memory->end();
  // That we end without having failed is nothing to the others but the loss of us.
  const bool ours = why.code() == Code::kNotInitialized;
  const Status word = ours ? Status(Code::kWorkerLost, own_name() + " was lost: " + why.message()) : why;
  // First no more bytes move between the network and XLA's buffers, then the rounds let go of those buffers.
  for (ReducerLink& link : links_) {
    link.close_with(word);
  }
  for (auto& [op_id, op] : ops_) {
    for (RoundRequest& request : op.give_up()) complete(std::move(request), why);
  }
  member_->stop(word);
  // Time for that last word, and on rank 0 for the coordinator's.
  loop_->after(kFailureFlush, [this] { loop_->stop(); });
}

}  // namespace jaxhetero
