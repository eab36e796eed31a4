#include "xla_ffi/worker/strand.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/base/cores.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr milliseconds kFeedInterval{20};
// The least time between two words about the round that waits for other workers.
constexpr milliseconds kTellInterval{100};

}  // namespace

WorkerStrand::WorkerStrand(Config config, std::unique_ptr<TcpContext> context, EventLog& log, RoundLedger& ledger,
                           Callbacks callbacks)
    : config_(std::move(config)),
      context_(std::move(context)),
      log_(log),
      ledger_(ledger),
      callbacks_(std::move(callbacks)),
      schedule_(context_->lent_memory),
      stall_watch_({config_.own_name, config_.timeout, config_.start_timeout}, schedule_, links_, log_, accuse(),
                   accuse_workers()) {}

void WorkerStrand::start() {
  watch();
  feed_starved();
}

// --- Views.

void WorkerStrand::join(const View& view, const std::vector<TcpAddress>& addresses, const Plans& plans) {
  if (has_ended_) return;
  if (config_.job.is_elastic()) settle(view);
  if (std::ranges::find(view.joining, config_.rank) != view.joining.end()) schedule_.begin_behind(view.counts);
  view_ = view;
  plans_ = plans;
  earlier_plans_.clear();
  forget_times();
  for (size_t i = 0; i < view.reducers.size(); ++i) links_.emplace_back(view.reducers[i], addresses[i], config_.job);
  const milliseconds patience = view.number == 0 ? config_.start_timeout : config_.timeout;
  set_coding();
  for (ReducerLink& link : links_) link.connect(*context_, *this, patience);
}

void WorkerStrand::on_open(Connection& connection) {
  ReducerLink& link = links_[reducer_of(connection)];
  link.set_open();
  link.offer_carrier();
  const Join join{view_.job_id, config_.rank, view_.number, plans_.digest(), link.number(), view_.ranks()};
  connection.send(OutFrame::control(FrameType::kJoin, encode(join)));
  if (std::ranges::all_of(links_, &ReducerLink::is_open)) resume();
}

// All reducers of the view are connected. First the rounds run again that are complete here and not on every worker.
void WorkerStrand::resume() {
  halted_ = false;
  send_plan();
  for (auto& [op_id, op] : schedule_.ops()) op.enter_view();
  for (const View::Resume& again : view_.resume) replay(again.op, again.round);
  start_waiting();
  callbacks_.on_joined(view_.number);
}

void WorkerStrand::replay(uint64_t op_id, uint64_t number) {
  Op* op = schedule_.find(op_id);
  if (op == nullptr || op->started_count() <= number) return;  // the round is not complete here either
  if (!op->keeps(number)) {
    return callbacks_.on_failure({Code::kInternal, config_.own_name + " is asked for " + op->kept_description() +
                                                       " round " + std::to_string(number) +
                                                       ", which it does not keep"});
  }
  Round& round = schedule_.replay_round(*op, number);
  round.request.whole = ledger_.open_replay();
  run(*op, round);
}

void WorkerStrand::pause() {
  if (!halted_) halted_at_ = EventLoop::Clock::now();
  halted_ = true;
  is_holding_ = false;
  for (ReducerLink& link : links_) link.close();
  links_.clear();
}

// What the view commits is given to the program; all else that runs will run anew.
void WorkerStrand::settle(const View& view) {
  for (const View::Commit& commit : view.commits) {
    Op* const op = schedule_.find(commit.op);
    if (op == nullptr || op->given_count() != commit.round) continue;  // given already, or of another strand
    if (op->running() == nullptr) {
      return callbacks_.on_failure({Code::kInternal, config_.own_name + " is told to complete a round of op " +
                                                         std::to_string(commit.op) + " that it has not begun"});
    }
    if (const Status status = held_rounds_.take(*op, commit); !status.ok()) return callbacks_.on_failure(status);
    finish_round(*op);
  }
  held_rounds_.begin_anew();
}

std::vector<Progress::OpProgress> WorkerStrand::halt() {
  pause();
  for (const auto& replay : schedule_.stop_rounds()) ledger_.give_up_part(*replay->request.whole, {});
  return schedule_.progress();
}

std::vector<Progress::OpProgress> WorkerStrand::take_still() {
  context_->counters->kept_bytes = schedule_.kept_bytes();
  return schedule_.take_still(EventLoop::Clock::now() - config_.timeout);
}

ProcessState WorkerStrand::state() const {
  ProcessState state;
  if (const Round* round = schedule_.most_patient_round(); round != nullptr) {
    const auto waited = EventLoop::Clock::now() - round->times.progress_at;
    state.round = round->name();
    state.waited_ms = static_cast<uint32_t>(duration_cast<milliseconds>(waited).count());
  }
  return state;
}

// --- Rounds, from the program's request to its end.

void WorkerStrand::open_to_program(const Plans& plans) {
  is_open_to_program_ = true;
  plans_ = plans;
  set_coding();
}

std::vector<Progress::OpProgress> WorkerStrand::hold() {
  is_holding_ = true;
  return schedule_.progress();
}

// Every worker holds, so that nobody has begun any of these rounds, nor any op that is not named.
void WorkerStrand::follow(const Plans& plans, const std::vector<NewRates::Begin>& begins) {
  const auto earlier = std::make_shared<const Plans>(std::exchange(plans_, plans));
  for (const NewRates::Begin& begin : begins) earlier_plans_[begin.op].push_back({begin.round, earlier});
  // What the links carry by the new plans is another matter.
  forget_times();
  for (auto& [op_id, op] : schedule_.ops()) {
    if (Round* const round = op.running(); round != nullptr) round->is_timed = false;
  }
  is_holding_ = false;
  if (!halted_) start_waiting();
}

void WorkerStrand::set_coding() {
  const bool codes = config_.compress == Compress::kAlways ||
                     (config_.compress == Compress::kWhereFaster && plans_.is_slower_than_codes);
  for (ReducerLink& link : links_) link.set_coding(codes);
}

void WorkerStrand::use_states() {
  uses_states_ = true;
  send_plan();
}

// To every reducer of each view.
void WorkerStrand::send_plan() {
  if (halted_ || !uses_states_) return;
  for (ReducerLink& link : links_) link.send(OutFrame::control(FrameType::kPlan, encode(*plans_.states)));
}

void WorkerStrand::start_round(RoundRequest part) {
  Op& op = schedule_.add(std::move(part));
  if (may_start(op)) run(op, schedule_.start_next_round(op));
}

void WorkerStrand::feed() {
  for (ReducerLink& link : links_) link.push_chunks();
}

bool WorkerStrand::may_start(const Op& op) const {
  return !halted_ && !is_holding_ && op.running() == nullptr && op.next() != nullptr;
}

void WorkerStrand::start_waiting() {
  for (auto& [op_id, op] : schedule_.ops()) {
    if (may_start(op)) run(op, schedule_.start_next_round(op));
  }
}

void WorkerStrand::run(Op& op, Round& round) {
  ledger_.start_part(*round.request.whole, round.number, round.times.started_at);
  if (round.request.is_internal) round.times.cpu_at_start = thread_cpu_time();
  if (const auto& home = round.request.inputs_home; home && !context_->endpoint.expired()) {
    context_->long_lived.try_emplace(home->bytes.data(), *home);
  }
  const std::shared_ptr<const Plans> earlier = plans_for(op, round);
  if (round.request.step != nullptr) return run_state(op, round);
  const std::shared_ptr<const ShardPlan> plan = (earlier ? *earlier : plans_).plan_of(round.request);
  round.cut(*plan);
  round.is_timed = earlier == nullptr && is_to_be_timed(round, *plan);
  round.is_measured = round.is_timed && plans_.follows == Follows::kLinks;
  round.begin_segments(view_.own_index, view_.job, [&](Segment& segment) {
    describe_op(op, segment.shard.reducer);
    links_[segment.shard.reducer].start_segment(round, segment);
  });
}

// The earlier plans by which this round still runs; null where it runs by the latest.
std::shared_ptr<const Plans> WorkerStrand::plans_for(Op& op, const Round& round) {
  const auto found = earlier_plans_.find(round.request.op);
  if (found == earlier_plans_.end()) return nullptr;
  std::deque<EarlierPlans>& plans = found->second;
  while (!plans.empty() && plans.front().end <= round.number) {
    plans.pop_front();
    if (round.request.step == nullptr) op.describe_anew();
  }
  if (!plans.empty()) return plans.front().plans;
  earlier_plans_.erase(found);
  return nullptr;
}

void WorkerStrand::forget_times() {
  link_times_ = step_times_ = {};
  step_ops_.clear();
}

void WorkerStrand::LinkTimes::add(const LinkTimes& more) {
  round_count += more.round_count;
  for (const auto& [reducer, link] : more.links) {
    links[reducer].bytes += link.bytes;
    links[reducer].us += link.us;
  }
  for (const auto& [reducer, count] : more.awaited_counts) awaited_counts[reducer] += count;
  bytes += more.bytes;
  us += more.us;
}

// Those that are large enough; the same ones on every worker. Every second one only, where it is not as fast as others.
bool WorkerStrand::is_to_be_timed(const Round& round, const ShardPlan& plan) const {
  constexpr uint64_t kLeastChunks = 16;
  const OpSpec& spec = round.request.spec;
  if (plans_.follows == Follows::kNothing || round.request.is_internal) return false;
  if (plans_.follows == Follows::kLinks && round.number % 2 == 0) return false;
  for (size_t i = 0; i < links_.size(); ++i) {  // memory of a host tells of its cores
    const bool is_own = view_.reducers[i].colocated_rank == static_cast<int32_t>(config_.rank);
    if (links_[i].shares_memory() && !is_own) return false;
  }
  if (spec.kind != Kind::kSum || !spec.group.empty() || round.segments.size() < plan.owner_count()) return false;
  return std::ranges::all_of(round.segments, [](const Segment& s) { return s.chunk_count() >= kLeastChunks; });
}

// From the first total on: all workers have come to the round then. Rounds that run at the same time share the link.
void WorkerStrand::time_links(const Round& round) {
  if (!round.is_timed || round.is_replay) return;
  if (!round.is_measured) return time_in_step(round);
  ++link_times_.round_count;
  for (const Segment& segment : round.segments) {
    const auto us = duration_cast<std::chrono::microseconds>(segment.done_at - segment.first_result_at).count();
    Goodput::Link& link = link_times_.links[links_[segment.shard.reducer].number()];
    link.bytes += segment.link_bytes;
    link.us += static_cast<uint64_t>(std::max<int64_t>(us, 1));
  }
}

// Links that keep in step wait for the slowest of them. How fast they are together depends on what else the program
// sends and computes at that moment, so whole steps count: until an op comes again.
void WorkerStrand::time_in_step(const Round& round) {
  if (!step_ops_.insert(round.request.op).second) {
    link_times_.add(std::exchange(step_times_, {}));
    step_ops_ = {round.request.op};
  }
  ++step_times_.round_count;
  for (const Segment& segment : round.segments) {
    step_times_.awaited_counts[links_[segment.shard.reducer].number()] += segment.awaited_count;
    step_times_.bytes += segment.link_bytes;
  }
  const auto us =
      duration_cast<std::chrono::microseconds>(round.times.progress_at - round.times.first_result_at).count();
  step_times_.us += static_cast<uint64_t>(std::max<int64_t>(us, 1));
}

// Of an op that uses a state: its shares are where the state is.
void WorkerStrand::run_state(Op& op, Round& round) {
  const OpSpec& spec = round.request.spec;
  const std::vector<StateShare> shares = plans_.states->cut(spec.state.number, spec.total_count);
  std::vector<Shard> shards;
  for (const StateShare& share : shares)
    shards.push_back({place_of(share.reducer), share.part.offset, share.part.count});
  round.cut(*plans_.program, shards);
  round.begin_segments(view_.own_index, view_.job, [&](Segment& segment) {
    const Shard& shard = segment.shard;
    describe_op(op, shard.reducer, {shard.offset, shard.count});
    send_step(round, shard.reducer);
    links_[shard.reducer].start_segment(round, segment);
  });
}

// In the view. Every reducer of the plan of states is in it.
uint32_t WorkerStrand::place_of(uint32_t reducer) const {
  return static_cast<uint32_t>(std::ranges::find(view_.reducers, reducer, &View::Reducer::number) -
                               view_.reducers.begin());
}

void WorkerStrand::describe_op(Op& op, uint32_t reducer, const Range& share) {
  if (!op.is_new_to(reducer)) return;
  const Round& round = *op.running();
  FrameHeader header;
  header.op = round.request.op;
  header.round = round.number;
  OpDescription description{round.request.spec, round.request.description, share, {}};
  if (const auto& step = round.request.step; step != nullptr && step->update != nullptr) {
    description.update = *step->update;
  }
  links_[reducer].send(OutFrame::control(FrameType::kDescribe, encode(description), header));
}

void WorkerStrand::send_step(const Round& round, uint32_t reducer) {
  if (round.request.step == nullptr) return;
  FrameHeader header;
  header.op = round.request.op;
  header.round = round.number;
  links_[reducer].send(OutFrame::control(FrameType::kStep, encode(round.request.step->inputs), header));
}

void WorkerStrand::feed_starved() {
  if (has_ended_) return;
  for (ReducerLink& link : links_) link.feed_starved(EventLoop::Clock::now());
  context_->loop.after(kFeedInterval, [this] { feed_starved(); });
}

// All totals of the running round's part are here.
void WorkerStrand::end_totals(Op& op) {
  if (!config_.job.is_elastic() || held_rounds_.hold(op)) return finish_round(op);
  const Round& round = *op.running();
  FrameHeader header;
  header.op = round.request.op;
  header.round = round.number;
  // Any reducer that all members choose, and that knows the op.
  links_[round.segments.front().shard.reducer].send(OutFrame::control(FrameType::kHeld, {}, header));
}

Status WorkerStrand::take_safe(const FrameHeader& header, uint32_t reducer) {
  Round* const round = schedule_.running_round(header.op, header.round);
  if (round == nullptr || !round->is_held || round->is_safe || round->segments.front().shard.reducer != reducer) {
    return {Code::kProtocol, "it calls a round safe that is not held"};
  }
  if (!held_rounds_.secure(*round)) return {};
  const std::shared_ptr<WholeRound> whole = round->request.whole;
  if (ledger_.has_one_part(*whole)) {
    finish_round(*schedule_.find(header.op));
  } else {
    callbacks_.on_safe(whole);
  }
  return {};
}

void WorkerStrand::give(const WholeRound& whole) {
  if (Op* const op = held_rounds_.find(whole); op != nullptr) finish_round(*op);
}

void WorkerStrand::finish_round(Op& op) {
  const std::unique_ptr<Round> round = schedule_.finish_round(op);
  // Not as they come: a round that is halted runs anew, and gives all of them again.
  const bool gives_totals = round->request.spec.kind == Kind::kMeasure && !round->is_replay;
  if (gives_totals) round->request.step->totals(round->totals);
  record(*round);
  time_links(*round);
  if (may_start(op)) run(op, schedule_.start_next_round(op));
}

void WorkerStrand::record(const Round& round) {
  const size_t item = item_bytes(round.request.spec.dtype);
  parts_.clear();
  StrandPart part{context_->strand, round.times.progress_at, {}, 0};
  for (const Segment& segment : round.segments) {
    parts_.push_back({view_.reducers[segment.shard.reducer].number, segment.shard.count * item, segment.done_at});
    part.message_count += 2 * segment.chunk_count();
  }
  if (round.request.is_internal) part.cpu = thread_cpu_time() - round.times.cpu_at_start;
  ledger_.finish_part(*round.request.whole, part, round.times.first_result_at, parts_);
}

// --- Frames of reducers.

uint32_t WorkerStrand::reducer_of(const Connection& connection) const {
  const auto link = std::ranges::find_if(links_, [&](const ReducerLink& l) { return l.has(connection); });
  return static_cast<uint32_t>(link - links_.begin());
}

Status WorkerStrand::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  const uint32_t reducer = reducer_of(connection);
  switch (header.type) {
    case FrameType::kResult:
      return place_result(header, reducer, into);
    case FrameType::kSafe:
    case FrameType::kAbsent:
    case FrameType::kLate:
    case FrameType::kTotals:
    case FrameType::kFault:
      into = links_[reducer].take_control(header.payload_bytes);
      return {};
    default:
      return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
  }
}

Status WorkerStrand::on_frame(Connection& connection, const FrameHeader& header) {
  const uint32_t reducer = reducer_of(connection);
  switch (header.type) {
    case FrameType::kResult:
      return finish_result(header, reducer);
    case FrameType::kSafe:
      return take_safe(header, reducer);
    case FrameType::kAbsent:
      return note_absent(header, links_[reducer].control());
    case FrameType::kLate:
      return note_late(header, links_[reducer].control());
    case FrameType::kTotals:
      return take_totals(header, links_[reducer].control());
    default:
      callbacks_.on_failure(decode_fault(links_[reducer].control()));
      return {};
  }
}

// The open segment whose next chunk this result is; a reducer that sends anything else is refused.
Result<Segment*> WorkerStrand::segment_of(const FrameHeader& header, uint32_t reducer) {
  Round* round = schedule_.running_round(header.op, header.round);
  if (round == nullptr) return Status(Code::kProtocol, "it sent a result of a round that does not run");
  Segment* segment = round->segment_at(reducer);
  if (segment == nullptr || segment->done) {
    return Status(Code::kProtocol, "it sent a result of a shard that it does not have or has finished");
  }
  return segment;
}

Status WorkerStrand::place_result(const FrameHeader& header, uint32_t reducer, std::vector<iovec>& into) {
  Result<Segment*> found = segment_of(header, reducer);
  if (!found.ok()) return found.status();
  Op& op = *schedule_.find(header.op);
  Round& round = *op.running();
  if (Status status = links_[reducer].check_result(round, *found.value(), header); !status.ok()) return status;
  if (!std::exchange(round.is_answered, true) && config_.job.failover && !round.is_replay) {
    op.keep_running_round();
  }
  // The result is here already, or nobody wants it, or it is to be decoded.
  if (round.is_replay || round.request.outputs.bytes() == 0 || header.is_coded) {
    into = links_[reducer].take_control(header.payload_bytes);
  } else {
    round.place(round.answered({header.offset, header.count}), into);
  }
  return {};
}

Status WorkerStrand::finish_result(const FrameHeader& header, uint32_t reducer) {
  Op& op = *schedule_.find(header.op);
  Round& round = *op.running();
  Segment& segment = *segment_of(header, reducer).value();
  if (header.is_coded && header.payload_bytes > 0 && !round.is_replay && round.request.outputs.bytes() > 0) {
    if (Status status = links_[reducer].decode_result(round, header); !status.ok()) return status;
  }
  const ByteRange part = round.settle({header.offset, header.count}, pieces_);
  round.request.sliced.report(part.offset, part.bytes);
  round.times.progress_at = EventLoop::Clock::now();
  if (round.times.first_result_at == Round::Time()) round.times.first_result_at = round.times.progress_at;
  ReducerLink& link = links_[reducer];
  const double earlier_part = segment.done_part();
  link.finish_result(round, segment, header, round.times.progress_at);
  if (segment.first_link_bytes == 0) {
    segment.first_link_bytes = link.total_bytes();
    segment.first_result_at = round.times.progress_at;
  }
  if (round.note_slowest(earlier_part)) {
    ++segment.awaited_count;
    for (ReducerLink& link : links_) link.push_chunks();
  }
  if (!segment.done) return {};
  segment.done_at = round.times.progress_at;
  segment.link_bytes = link.total_bytes() - segment.first_link_bytes;
  if (--round.open_segment_count > 0) return {};
  for (ReducerLink& link : links_) link.end_round(round);
  end_totals(op);
  return {};
}

Status WorkerStrand::take_totals(const FrameHeader& header, const Bytes& payload) {
  Result<StepTotals> totals = decode_step_totals(payload);
  if (!totals.ok()) return totals.status();
  Round* const round = schedule_.running_round(header.op, header.round);
  if (round == nullptr || round->request.spec.kind != Kind::kMeasure) {
    return {Code::kProtocol, "it sent totals of a round that has none"};
  }
  round->totals.parts.insert(round->totals.parts.end(), totals->parts.begin(), totals->parts.end());
  return {};
}

Status WorkerStrand::note_absent(const FrameHeader& header, const Bytes& ranks) {
  Result<Absent> absent = decode_absent(ranks);
  if (!absent.ok()) return absent.status();
  Round* const round = schedule_.running_round(header.op, header.round);
  if (round != nullptr) round->delay.absent = std::move(absent->ranks);
  return {};
}

Status WorkerStrand::note_late(const FrameHeader& header, const Bytes& late_workers) {
  Result<Late> late = decode_late(header);
  if (!late.ok()) return late.status();
  Round* round = schedule_.running_round(late->op, late->round);
  if (round == nullptr) return {};
  stall_watch_.note_late(*round, decode_text(late_workers), late->moving_count, late->disagree);
  const EventLoop::Clock::time_point now = EventLoop::Clock::now();
  if (now - told_at_ < kTellInterval) return {};
  told_at_ = now;
  callbacks_.on_waiting(schedule_.most_patient_round()->name());
  return {};
}

void WorkerStrand::tell_waiting(const std::string& round) {
  if (halted_) return;
  for (ReducerLink& link : links_) link.send(OutFrame::control(FrameType::kWaits, encode(round)));
}

// --- Stalls, losses and the end.

void WorkerStrand::watch() {
  if (has_ended_) return;
  if (const Status stall = find_stall(); !stall.ok()) callbacks_.on_failure(stall);
  context_->loop.after(kStrandWatchInterval, [this] { watch(); });
}

Status WorkerStrand::find_stall() {
  const EventLoop::Clock::time_point now = EventLoop::Clock::now();
  // The coordinator of an elastic job may be away for a while: see Member.
  if (halted_ && config_.job.is_elastic()) return {};
  if (lacks_coordinator_ && !stall_watch_.has_limit()) return {};
  if (halted_ && is_open_to_program_) return stall_watch_.check_halt(now, halted_at_);
  Status stall = stall_watch_.check_rounds(now);
  if (stall.ok()) return stall;
  return {stall.code(), stall.message() + "; last completed: " + ledger_.last_completed()};
}

void WorkerStrand::note_coordinator(bool is_there) {
  lacks_coordinator_ = !is_there;
  if (is_there) stall_watch_.begin_anew();
}

StallWatch::Accuse WorkerStrand::accuse() {
  if (!config_.job.failover) return nullptr;
  return [this](const ReducerLink& link, const std::string& why) { report_lost(link, why); };
}

StallWatch::AccuseWorkers WorkerStrand::accuse_workers() {
  if (!config_.job.is_elastic()) return nullptr;
  return [this](const std::vector<uint32_t>& ranks, const std::string& why) {
    callbacks_.on_stuck({view_.number, ranks, config_.own_name + ": " + why});
  };
}

void WorkerStrand::report_lost(const ReducerLink& link, const std::string& why) {
  callbacks_.on_lost({view_.number, link.number(), config_.own_name + ": " + why});
}

void WorkerStrand::on_close(Connection& connection, const Status& why) {
  if (has_ended_) return;
  const uint32_t reducer = reducer_of(connection);
  if (reducer >= links_.size()) return;
  const ReducerLink& link = links_[reducer];
  if (!config_.job.failover && is_leaving_ && !halted_ && schedule_.is_empty()) return;
  const bool refused = why.code() == Code::kUnauthenticated || why.code() == Code::kVersionMismatch;
  // The coordinator knows whether this reducer was lost, or ended because of a failure that is still on its way to us.
  // With failover it halts every worker and makes a new view.
  if (!refused && (config_.job.failover || is_open_to_program_)) return report_lost(link, why.message());
  std::string text = link.name() + " was lost: " + why.message();
  if (!is_open_to_program_) text += ", in the stage connect";
  callbacks_.on_failure({refused ? why.code() : Code::kReducerLost, text});
}

void WorkerStrand::say_goodbye() {
  is_leaving_ = true;
  for (ReducerLink& link : links_) link.send(OutFrame::control(FrameType::kGoodbye, {}));
}

void WorkerStrand::end_in_order() {
  has_ended_ = true;
  for (ReducerLink& link : links_) link.close();
}

// First the network lets go of XLA's buffers, then the program gets them back.
void WorkerStrand::fail(const Status& why, const Status& word) {
  has_ended_ = true;
  context_->lent_memory->end();
  for (ReducerLink& link : links_) link.close_with(word);
  for (const RoundRequest& request : schedule_.give_up()) ledger_.give_up_part(*request.whole, why);
}

}  // namespace jaxhetero
