#include "xla_ffi/worker/communicator.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/shard_plan.h"

namespace jaxhetero {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr milliseconds kWatchInterval{250};
constexpr milliseconds kFeedInterval{20};
constexpr milliseconds kFailureFlush{500};

}  // namespace

// --- Start.

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
  if (Status status = make_context(); !status.ok()) return status;
  if (config_.rank == 0) {
    coordinator_ = std::make_unique<Coordinator>(*context_, config_.job, config_.version, log_);
    if (Status status = coordinator_->bind(*address); !status.ok()) return status;
  }
  member_ = std::make_unique<Member>(*context_, *address, registration(), log_, config_.timeout);
  schedule_ = std::make_unique<Schedule>(context_->lent_memory, counters_);
  StallWatch::Accuse accuse;
  if (config_.job.failover)
    accuse = [this](const ReducerLink& link, const std::string& why) { report_lost(link, why); };
  stall_watch_ = std::make_unique<StallWatch>(StallWatch::Config{own_name(), config_.timeout, config_.start_timeout},
                                              *schedule_, links_, log_, std::move(accuse));
  loop_->post([this] { enrol(); });
  thread_ = std::thread([this] {
    loop_->run();
    refuse_inbox();
  });
  return {};
}

Status Communicator::make_context() {
  Result<std::unique_ptr<EventLoop>> loop = EventLoop::create();
  if (!loop.ok()) return loop.status();
  loop_ = std::move(*loop);
  context_ = std::make_unique<TcpContext>(*loop_, config_.token, config_.job.checksum);
  context_->counters = counters_;
  if (config_.source.empty()) return {};
  Result<TcpAddress> source = resolve(config_.source, 0);
  if (!source.ok()) return source.status();
  context_->source = *source;
  return {};
}

Registration Communicator::registration() const {
  Registration registration;
  registration.role = Role::kWorker;
  registration.rank = static_cast<int32_t>(config_.rank);
  registration.job = config_.job;
  registration.version = config_.version;
  registration.host_name = config_.host_name;
  return registration;
}

void Communicator::enrol() {
  if (coordinator_) {
    const Status status = coordinator_->start(config_.start_timeout, config_.timeout);
    if (!status.ok()) return fail(status);
  }
  member_->start(config_.start_timeout, member_callbacks());
  watch();
  feed_starved();
}

Member::Callbacks Communicator::member_callbacks() {
  return {
      .on_view = [this](const View& view) { join(view); },
      .on_halt = [this](const Halt& word) { halt(word); },
      .on_forget = [this](const Progress& completed) { schedule_->forget(completed); },
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
      .on_ask = [this] { return state(); },
      .on_failure = [this](const Status& why) { fail_as_told(why); },
  };
}

std::optional<Status> Communicator::wait_ready(milliseconds patience) const {
  if (ready_.wait_for(patience) != std::future_status::ready) return std::nullopt;
  return ready_.get();
}

// Runs the rounds of the measurement one by one. The plan follows from the last one, and the program's rounds can run.
void Communicator::probe_rates() {
  if (std::optional<RoundRequest> request = planner_.next_probe()) return enqueue(std::move(*request));
  if (config_.rank == 0 && config_.job.measure_rates) log_.add(Severity::kInfo, planner_.rates_text());
  phase_ = Phase::kRunning;
  ready_promise_.set_value({});
  start_waiting();
}

std::string Communicator::own_name() const {
  return "rank " + std::to_string(config_.rank) + " (host " + config_.host_name + ")";
}

// --- Views.

// The coordinator names the reducers of the next view: at the start, and again after every halt().
void Communicator::join(const View& view) {
  if (has_ended()) return;
  if (view.reducers.empty()) return fail({Code::kInvalidArgument, "this job has no reducer"});
  view_ = view;
  place_.set({view.job_id, config_.rank});
  counters_->live_reducer_count = view.reducers.size();
  planner_.enter(view);
  for (const View::Reducer& reducer : view.reducers) {
    Result<TcpAddress> address = resolve(reducer.address, reducer.port);
    if (!address.ok()) {
      const std::string name = "reducer " + std::to_string(reducer.number) + " (host " + reducer.host_name + ")";
      return fail({Code::kInvalidArgument, name + ": " + address.status().message()});
    }
    links_.emplace_back(reducer, *address, config_.job);
  }
  const milliseconds patience = view.number == 0 ? config_.start_timeout : config_.timeout;
  for (ReducerLink& link : links_) link.connect(*context_, *this, patience);
}

void Communicator::on_open(Connection& connection) {
  ReducerLink& link = links_[reducer_of(connection)];
  link.set_open();
  if (config_.shared_memory) link.offer_memory();
  const Join join{view_.job_id, config_.rank, view_.number, planner_.digest()};
  connection.send(OutFrame::control(FrameType::kJoin, encode(join)));
  if (std::ranges::all_of(links_, &ReducerLink::is_open)) resume();
}

// All reducers of the view are connected. First the rounds run again that are complete here and not on every worker.
void Communicator::resume() {
  halted_ = false;
  if (phase_ != Phase::kStarting) {
    const auto halted_for = duration_cast<milliseconds>(EventLoop::Clock::now() - halted_at_);
    log_.add(Severity::kWarning, "going on with " + std::to_string(links_.size()) + " reducers after " +
                                     std::to_string(halted_for.count()) + " ms");
  }
  for (auto& [op_id, op] : schedule_->ops()) op.enter_view();
  for (const View::Resume& again : view_.resume) replay(again.op, again.round);
  start_waiting();
  if (phase_ == Phase::kStarting && !planner_.has_started_probe()) probe_rates();
  note_idle();
  if (phase_ == Phase::kLeaving) leave();
}

void Communicator::replay(uint64_t op_id, uint64_t number) {
  Op* op = schedule_->find(op_id);
  if (op == nullptr || op->started_count() <= number) return;  // not complete here either
  if (!op->keeps(number)) {
    return fail({Code::kInternal, own_name() + " is asked for " + op->kept_description() + " round " +
                                      std::to_string(number) + ", which it does not keep"});
  }
  run(*op, schedule_->replay_round(*op, number));
}

// The view ends. Its connections close, so that no late frame of it can come in; its running rounds will run anew.
void Communicator::halt(const Halt& halt) {
  if (has_ended()) return;
  log_.add(Severity::kWarning, halt.why);
  ++counters_->view_count;
  if (!halted_) halted_at_ = EventLoop::Clock::now();
  halted_ = true;
  view_.number = halt.view;
  for (ReducerLink& link : links_) link.close();
  links_.clear();
  schedule_->stop_rounds();
  member_->send(OutFrame::control(FrameType::kProgress, encode(Progress{view_.number, schedule_->progress()})));
}

// The coordinator learns which ops the program has left behind, and answers with on_forget once every worker has
// completed the same rounds of them.
void Communicator::report_still(EventLoop::Clock::time_point now) {
  if (!config_.job.failover || phase_ != Phase::kRunning || halted_) return;
  counters_->kept_bytes = schedule_->kept_bytes();
  const Progress still{view_.number, schedule_->take_still(now - config_.timeout)};
  if (!still.ops.empty()) member_->send(OutFrame::control(FrameType::kStill, encode(still)));
}

ProcessState Communicator::state() const {
  ProcessState state = process_state(view_.number, metrics());
  if (const Round* round = schedule_->most_patient_round(); round != nullptr) {
    const auto waited = EventLoop::Clock::now() - round->times.progress_at;
    state.round = round->name();
    state.waited_ms = static_cast<uint32_t>(duration_cast<milliseconds>(waited).count());
  }
  return state;
}

// --- Rounds, from the program's request to its end.

void Communicator::start_round(RoundRequest request) {
  request.requested_at = EventLoop::Clock::now();
  if (const Status closed = inbox_.add(request); !closed.ok()) return complete(std::move(request), closed);
  loop_->post([this] { take_inbox(); });
}

void Communicator::feed() {
  loop_->post([this] {
    for (ReducerLink& link : links_) link.push_chunks();
  });
}

void Communicator::take_inbox() {
  for (RoundRequest& request : inbox_.take_all()) enqueue(std::move(request));
}

void Communicator::enqueue(RoundRequest request) {
  if (phase_ == Phase::kFailed) return complete(std::move(request), failure());
  if (phase_ == Phase::kLeaving || phase_ == Phase::kLeft) {
    return complete(std::move(request), {Code::kNotInitialized, "a round was started during the shutdown"});
  }
  request.stake = stake_of(request.spec, config_.job.worker_count, config_.rank);
  const Result<Op*> op = schedule_->add(request);
  if (!op.ok()) return complete(std::move(request), op.status());
  if (may_start(*op.value())) start_next(*op.value());
}

// The program's rounds need the plan, which the start makes.
bool Communicator::may_start(const Op& op) const {
  return !halted_ && op.running() == nullptr && op.next() != nullptr &&
         (phase_ != Phase::kStarting || op.next()->is_internal);
}

void Communicator::start_waiting() {
  for (auto& [op_id, op] : schedule_->ops()) {
    if (may_start(op)) start_next(op);
  }
}

void Communicator::start_next(Op& op) { run(op, schedule_->start_next_round(op)); }

void Communicator::run(Op& op, Round& round) {
  const OpSpec& spec = round.request.spec;
  const ShardPlan& plan = planner_.plan_of(round.request);
  const size_t item = item_bytes(spec.dtype);
  round.least_window_bytes = plan.least_window_bytes(spec.total_count, item);
  const uint64_t items_per_chunk = plan.items_per_chunk(spec.total_count, item, spec.call_bytes);
  for (const Shard& shard : plan.cut(round.request.op, spec.total_count, item, has_rows(spec.kind))) {
    round.segments.emplace_back(shard, items_per_chunk);
  }
  round.open_segment_count = round.segments.size();
  for (Segment& segment : round.segments) {
    describe_op(op, segment.shard.reducer);
    links_[segment.shard.reducer].start_segment(round, segment);
  }
}

void Communicator::describe_op(Op& op, uint32_t reducer) {
  if (!op.is_new_to(reducer)) return;
  const Round& round = *op.running();
  FrameHeader header;
  header.op = round.request.op;
  header.round = round.number;
  const OpDescription description{round.request.spec, round.request.description};
  links_[reducer].send(OutFrame::control(FrameType::kDescribe, encode(description), header));
}

void Communicator::feed_starved() {
  for (ReducerLink& link : links_) link.feed_starved(EventLoop::Clock::now());
  if (!has_ended()) loop_->after(kFeedInterval, [this] { feed_starved(); });
}

void Communicator::finish_round(Op& op) {
  const std::unique_ptr<Round> round = schedule_->finish_round(op);
  if (!round->is_replay) {
    if (round->request.is_internal) {
      planner_.finish_probe();
      probe_rates();
    } else {
      record(*round);
      complete(std::move(round->request), {});
    }
  }
  if (may_start(op)) start_next(op);
  note_idle();
  if (phase_ == Phase::kLeaving) leave();
}

void Communicator::record(const Round& round) {
  const RoundRequest& request = round.request;
  const size_t item = item_bytes(request.spec.dtype);
  RoundRecord record{request.description,    round.number,           request.spec.total_count * item,
                     request.requested_at,   round.times.started_at, round.times.first_result_at,
                     round.times.progress_at};
  parts_.clear();
  for (const Segment& segment : round.segments) {
    parts_.push_back({links_[segment.shard.reducer].number(), segment.shard.count * item, segment.done_at});
  }
  counters_->bucket_bytes += record.bytes;
  timeline_.add(std::move(record), parts_);
}

void Communicator::complete(RoundRequest request, const Status& status) {
  if (!request.done) return;  // a replay: no caller waits for it here
  callback_threads_->run([done = std::move(request.done), status] { done(status); });
}

// --- Frames of reducers.

uint32_t Communicator::reducer_of(const Connection& connection) const {
  const auto link = std::ranges::find_if(links_, [&](const ReducerLink& l) { return l.has(connection); });
  return static_cast<uint32_t>(link - links_.begin());
}

Status Communicator::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  const uint32_t reducer = reducer_of(connection);
  switch (header.type) {
    case FrameType::kResult:
      return place_result(header, reducer, into);
    case FrameType::kLate:
    case FrameType::kFault:
      into = links_[reducer].take_control(header.payload_bytes);
      return {};
    default:
      return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
  }
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

// The open segment whose next chunk this result is; a reducer that sends anything else is refused.
Result<Segment*> Communicator::segment_of(const FrameHeader& header, uint32_t reducer) {
  Round* round = schedule_->running_round(header.op, header.round);
  if (round == nullptr) return Status(Code::kProtocol, "it sent a result of a round that does not run");
  Segment* segment = round->segment_at(reducer);
  if (segment == nullptr || segment->done) {
    return Status(Code::kProtocol, "it sent a result of a shard that it does not have or has finished");
  }
  return segment;
}

Status Communicator::place_result(const FrameHeader& header, uint32_t reducer, std::vector<iovec>& into) {
  Result<Segment*> found = segment_of(header, reducer);
  if (!found.ok()) return found.status();
  Op& op = *schedule_->find(header.op);
  Round& round = *op.running();
  if (Status status = links_[reducer].check_result(round, *found.value(), header); !status.ok()) return status;
  if (!std::exchange(round.is_answered, true) && config_.job.failover && !round.is_replay) {
    op.keep_running_round();
  }
  if (round.is_replay) {  // the result is here already
    into = links_[reducer].take_control(header.payload_bytes);
  } else {
    round.place(round.answered({header.offset, header.count}), into);
  }
  return {};
}

void Communicator::finish_result(const FrameHeader& header, uint32_t reducer) {
  Op& op = *schedule_->find(header.op);
  Round& round = *op.running();
  Segment& segment = *segment_of(header, reducer).value();
  const ByteRange part = round.settle({header.offset, header.count}, pieces_);
  SlicedTransfer& sliced = round.request.sliced;
  if (sliced.received != nullptr && part.bytes > 0) sliced.reported.add(part.offset, part.end(), sliced.received);
  round.times.progress_at = EventLoop::Clock::now();
  if (round.times.first_result_at == Round::Time()) round.times.first_result_at = round.times.progress_at;
  links_[reducer].finish_result(round, segment, header, round.times.progress_at);
  if (round.note_slowest()) {
    for (ReducerLink& link : links_) link.push_chunks();
  }
  if (!segment.done) return;
  segment.done_at = round.times.progress_at;
  if (--round.open_segment_count == 0) finish_round(op);
}

void Communicator::note_late(const FrameHeader& header, const Bytes& late_workers) {
  Round* round = schedule_->running_round(header.op, header.round);
  if (round != nullptr) stall_watch_->note_late(*round, decode_text(late_workers), header.count);
}

// --- Stalls, losses and the end.

void Communicator::watch() {
  if (has_ended()) return;
  const EventLoop::Clock::time_point now = EventLoop::Clock::now();
  const bool has_no_view = halted_ && phase_ != Phase::kStarting;
  const Status stall = has_no_view ? stall_watch_->check_halt(now, halted_at_) : stall_watch_->check_rounds(now);
  if (!stall.ok()) return fail(stall);
  report_still(now);
  loop_->after(kWatchInterval, [this] { watch(); });
}

void Communicator::report_lost(const ReducerLink& link, const std::string& why) {
  const Lost lost{view_.number, link.number(), own_name() + ": " + why};
  member_->send(OutFrame::control(FrameType::kLost, encode(lost)));
}

void Communicator::on_close(Connection& connection, const Status& why) {
  if (has_ended()) return;
  const uint32_t reducer = reducer_of(connection);
  if (reducer >= links_.size()) return;
  const ReducerLink& link = links_[reducer];
  if (!config_.job.failover && phase_ == Phase::kLeaving && is_idle()) return;
  const bool refused = why.code() == Code::kUnauthenticated || why.code() == Code::kVersionMismatch;
  // The coordinator knows whether this reducer was lost, or ended because of a failure that is still on its way to us.
  // With failover it halts every worker and makes a new view.
  if (!refused && (config_.job.failover || phase_ != Phase::kStarting)) return report_lost(link, why.message());
  std::string text = link.name() + " was lost: " + why.message();
  if (phase_ == Phase::kStarting) text += ", in the stage connect";
  fail({refused ? why.code() : Code::kReducerLost, text + schedule_->circumstances()});
}

// The coordinator or a reducer says that the job has failed.
void Communicator::fail_as_told(const Status& why) {
  const bool lost = why.code() == Code::kWorkerLost || why.code() == Code::kReducerLost;
  const bool told = why.message().find("last completed") != std::string::npos;  // a worker has added them already
  const bool adds = lost && !told && phase_ != Phase::kStarting;
  fail({why.code(), why.message() + (adds ? schedule_->circumstances() : "")});
}

void Communicator::abort(Status why) {
  loop_->post([this, why = std::move(why)] { fail(why); });
}

Status Communicator::shutdown(milliseconds patience) {
  if (!thread_.joinable()) return {};
  loop_->post([this, patience] {
    if (has_ended()) return;
    if (phase_ == Phase::kStarting) return fail({Code::kNotInitialized, "shut down before the start was complete"});
    phase_ = Phase::kLeaving;
    stall_watch_->limit_patience(patience);
    if (patience.count() == 0) return fail({Code::kNotInitialized, "shut down at once"});
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

// Says goodbye once no round runs or waits. The coordinator answers when every worker is idle: until then a reducer may
// be lost, and other workers may need what this one keeps.
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
  if (phase_ == Phase::kStarting) ready_promise_.set_value(why);
  phase_ = Phase::kFailed;
  inbox_.close(why);
  context_->lent_memory->end();
  // A clean local shutdown still looks like a lost worker to our peers, so they are told WorkerLost.
  const bool ours = why.code() == Code::kNotInitialized;
  const Status word = ours ? Status(Code::kWorkerLost, own_name() + " was lost: " + why.message()) : why;
  // First the network lets go of XLA's buffers, then the program gets them back.
  for (ReducerLink& link : links_) link.close_with(word);
  for (RoundRequest& request : schedule_->give_up()) complete(std::move(request), why);
  member_->stop(word);
  // Time for that last word to be sent, and on rank 0 for the coordinator's.
  loop_->after(kFailureFlush, [this] { loop_->stop(); });
}

// The loop has ended: start_round() refuses from now on, and what it left for the loop is refused here.
void Communicator::refuse_inbox() {
  inbox_.close({Code::kNotInitialized, "jaxhetero was shut down"});
  for (RoundRequest& request : inbox_.take_all()) complete(std::move(request), failure());
}

}  // namespace jaxhetero
