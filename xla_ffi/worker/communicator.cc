#include "xla_ffi/worker/communicator.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFailureFlush{500};
constexpr milliseconds kGoodbyeInterval{1};  // of a look whether it is sent

}  // namespace

// --- Start.

Communicator::Communicator(CommunicatorConfig config)
    : config_(std::move(config)),
      ledger_(*counters_, timeline_, *callback_threads_,
              [this] {
                if (awaits_idle_) loop_->post([this] { note_idle(); });
              }),
      loops_(MemoryNodes(config_.memory_nodes)) {}

Communicator::~Communicator() {
  if (thread_.joinable()) {
    loop_->post([this] { fail({Code::kNotInitialized, "the communicator was destroyed"}); });
    thread_.join();
  }
  callback_threads_.reset();
}

Status Communicator::start() {
  Result<std::vector<TcpAddress>> addresses = resolve_all(config_.coordinator);
  if (!addresses.ok()) return addresses.status();
  Result<std::shared_ptr<const CryptoLibrary>> crypto = CryptoLibrary::open_if(config_.encrypt);
  if (!crypto.ok()) return crypto.status();
  crypto_ = std::move(*crypto);
  choose_fabric();
  for (const std::string& text : config_.sources) {
    Result<TcpAddress> source = resolve(text, 0);
    if (!source.ok()) return source.status();
    sources_.push_back(*source);
  }
  if (Status status = add_strand(); !status.ok()) return status;
  loop_ = &loops_.at(0);
  context_ = make_context(*loop_, 0);
  context_->counters = counters_;
  if (Status status = add_channels(); !status.ok()) return status;
  if (config_.rank == 0 && !config_.job.is_elastic()) {
    coordinator_ = std::make_unique<Coordinator>(*context_, config_.job, config_.version, log_);
    if (Status status = coordinator_->bind(*addresses); !status.ok()) return status;
  }
  member_ = std::make_unique<Member>(*context_, *addresses, registration(), log_, config_.timeout);
  loop_->post([this] { enrol(); });
  thread_ = std::thread([this] {
    loops_.run_first();
    loops_.stop();
    refuse_inbox();
  });
  return {};
}

// Nothing encrypts what goes over a fabric.
void Communicator::choose_fabric() {
  fabric_ = std::make_shared<FabricChoice>(crypto_ ? "off" : config_.fabric, log_);
  if (crypto_ && !providers_of(config_.fabric).empty()) fabric_->tell("only sockets are encrypted");
}

Status Communicator::add_strand() {
  if (Status status = loops_.add(); !status.ok()) return status;
  const size_t index = loops_.size() - 1;
  WorkerStrand::Config config{config_.rank,          own_name(),      config_.job,
                              config_.start_timeout, config_.timeout, config_.compress};
  std::unique_ptr<TcpContext> context = make_context(loops_.at(index), index);
  auto strand = std::make_unique<WorkerStrand>(std::move(config), std::move(context), log_, ledger_,
                                               strand_callbacks(/*is_first=*/index == 0));
  loops_.at(index).post([strand = strand.get()] { strand->start(); });
  const std::lock_guard lock(strands_mutex_);
  strands_.push_back(std::move(strand));
  return {};
}

Status Communicator::add_channels() {
  Channels::Config config{config_.rank, config_.job.worker_count, own_name(),
                          config_.host, config_.start_timeout,    config_.timeout};
  Channels::Callbacks callbacks{
      .on_failure = [this](const Status& why) { fail(why); },
      .on_idle =
          [this] {
            if (awaits_idle_) note_idle();
          },
  };
  auto channels = std::make_unique<Channels>(std::move(config), make_context(*loop_, 0), log_, std::move(callbacks));
  if (Status status = channels->bind(); !status.ok()) return status;
  const std::lock_guard lock(strands_mutex_);
  channels_ = std::move(channels);
  return {};
}

// The interfaces take turns.
std::unique_ptr<TcpContext> Communicator::make_context(EventLoop& loop, size_t strand) const {
  auto context = std::make_unique<TcpContext>(loop, config_.token, config_.job.checksum);
  if (!sources_.empty()) context->source = sources_[strand % sources_.size()];
  context->strand = static_cast<uint16_t>(strand);
  context->shares_memory = config_.shared_memory;
  context->fabric = fabric_;
  context->message_patience = config_.timeout;
  context->crypto = crypto_;
  return context;
}

// What a strand says is heard on the communicator's thread.
WorkerStrand::Callbacks Communicator::strand_callbacks(bool is_first) {
  const auto hear = [this, is_first](EventLoop::Task task) { is_first ? task() : loop_->post(std::move(task)); };
  return {
      .on_joined = [this, hear](uint32_t view) { hear([this, view] { note_joined(view); }); },
      .on_lost =
          [this, hear](const Lost& lost) {
            hear([this, lost] { member_->send(OutFrame::control(FrameType::kLost, encode(lost))); });
          },
      .on_failure = [this, hear](const Status& why) { hear([this, why] { fail(why); }); },
      .on_waiting =
          [this, hear](const std::string& round) {
            hear([this, round] { on_strands([round](WorkerStrand& strand) { strand.tell_waiting(round); }); });
          },
      .on_safe =
          [this, hear](const std::shared_ptr<WholeRound>& whole) {
            hear([this, whole] { on_strands([whole](WorkerStrand& strand) { strand.give(*whole); }); });
          },
      .on_stuck =
          [this, hear](const Accusation& stuck) {
            hear([this, stuck] { member_->send(OutFrame::control(FrameType::kAccuse, encode(stuck))); });
          },
  };
}

Registration Communicator::registration() const {
  Registration registration;
  registration.role = Role::kWorker;
  registration.rank = static_cast<int32_t>(config_.rank);
  registration.job = config_.job;
  registration.strand_count = config_.most_strands;
  registration.rail_count = static_cast<uint32_t>(std::max<size_t>(config_.sources.size(), 1));
  registration.version = config_.version;
  registration.host_name = config_.host_name;
  registration.address = channels_->endpoint().address;
  registration.port = channels_->endpoint().port;
  return registration;
}

void Communicator::enrol() {
  if (coordinator_) {
    const Status status = coordinator_->start(config_.start_timeout, config_.timeout);
    if (!status.ok()) return fail(status);
  }
  member_->start(config_.start_timeout, member_callbacks());
  watch();
}

Member::Callbacks Communicator::member_callbacks() {
  return {
      .on_view = [this](const View& view) { join(view); },
      .on_halt = [this](const Halt& word) { halt(word); },
      .on_forget =
          [this](const Progress& completed) {
            on_strands([completed](WorkerStrand& strand) { strand.forget(completed); });
          },
      .on_hold = [this](const Hold& word) { hold(word); },
      .on_new_rates = [this](const NewRates& rates) { follow(rates); },
      .on_leaving =
          [this] {
            asked_whether_idle_ = true;
            note_idle();
          },
      .on_goodbye =
          [this] {
            coordinator_has_left_ = true;
            gate_.end({});
            if (phase_ == Phase::kLeaving) end_in_order();
          },
      .on_meet =
          [this](const Meeting& meeting) {
            if (phase_ == Phase::kLeaving) return;  // it passes no gate any more, and has said goodbye, or will
            const std::optional<Meeting> answer = gate_.meet(meeting);
            if (answer) member_->send(OutFrame::control(FrameType::kMeet, {}, header_of(*answer)));
          },
      .on_go = [this](const Presence& presence) { gate_.go(presence); },
      .on_ask = [this] { answer_state(); },
      .on_lost = [this](const Lost& lost) { note_lost(lost); },
      .on_coordinator =
          [this](bool is_there) {
            lacks_coordinator_ = !is_there;
            gate_.restart_delay();
            on_strands([is_there](WorkerStrand& strand) { strand.note_coordinator(is_there); });
          },
      .on_failure = [this](const Status& why) { fail(why); },
  };
}

std::optional<Status> Communicator::wait_ready(milliseconds patience) const {
  if (ready_.wait_for(patience) != std::future_status::ready) return std::nullopt;
  return ready_.get();
}

// Runs the rounds of the measurement one by one. The plan follows from the last one, and the program's rounds can run.
void Communicator::probe_rates() {
  if (has_ended()) return;
  std::optional<RoundRequest> request = planner_.next_probe();
  if (!request) return open_to_program();
  request->recorded = [this](const RoundOutcome& round) {
    loop_->post([this, round] {
      planner_.finish_probe(round);
      probe_rates();
    });
  };
  start(std::move(*request));
}

void Communicator::open_to_program() {
  if (config_.rank == 0 && config_.job.measure_rates) log_.add(Severity::kInfo, planner_.rates_text());
  counters_->message_ns = (planner_.costs().message_ps + 500) / 1000;
  counters_->byte_ps = (planner_.costs().byte_fs + 500) / 1000;
  phase_ = Phase::kRunning;
  note_ready({});
  on_strands([plans = planner_.plans()](WorkerStrand& strand) { strand.open_to_program(plans); });
  for (RoundRequest& request : std::exchange(early_, {})) start(std::move(request));
}

// How the start went.
void Communicator::note_ready(const Status& status) {
  if (!std::exchange(is_ready_, true)) ready_promise_.set_value(status);
}

std::string Communicator::own_name() const {
  return "rank " + std::to_string(config_.rank) + " (host " + config_.host_name + ")";
}

// --- Strands.

void Communicator::on_strands(const std::function<void(WorkerStrand&)>& task) {
  for (size_t index = 0; index < strands_.size(); ++index) {
    loops_.run_on(index, [task, strand = strands_[index].get()] { task(*strand); });
  }
}

void Communicator::report_progress(FrameType type, uint32_t view, const std::vector<OpCounts>& of_strands) {
  Progress progress{view, {}};
  for (const OpCounts& counts : of_strands) progress.ops.insert(progress.ops.end(), counts.begin(), counts.end());
  if (type == FrameType::kStill && progress.ops.empty()) return;
  member_->send(OutFrame::control(type, encode(progress)));
}

Metrics Communicator::metrics() const {
  Metrics total = snapshot(*counters_);
  const std::lock_guard lock(strands_mutex_);
  for (const auto& strand : strands_) add(total, strand->metrics());
  if (channels_) add(total, channels_->metrics());
  return total;
}

// --- Rounds, on their way from the program to the strands.

void Communicator::start_round(RoundRequest request) {
  request.requested_at = EventLoop::Clock::now();
  if (const Status closed = inbox_.add(request); !closed.ok()) return complete(std::move(request), closed);
  loop_->post([this] { take_inbox(); });
}

void Communicator::feed() {
  loop_->post([this] { on_strands([](WorkerStrand& strand) { strand.feed(); }); });
}

void Communicator::take_inbox() {
  for (RoundRequest& request : inbox_.take_all()) enqueue(std::move(request));
}

void Communicator::enqueue(RoundRequest request) {
  if (phase_ == Phase::kFailed) return complete(std::move(request), failure());
  if (phase_ == Phase::kLeaving || phase_ == Phase::kLeft) {
    return complete(std::move(request), {Code::kNotInitialized, "a round was started during the shutdown"});
  }
  if (is_candidate_) {
    return complete(std::move(request),
                    {Code::kInvalidArgument, own_name() + " comes to a job that runs already; call "
                                                          "jaxhetero.elastic.gate() before any collective"});
  }
  if (phase_ == Phase::kStarting) return early_.push_back(std::move(request));
  start(std::move(request));
}

void Communicator::start(RoundRequest request) {
  if (const Status wrong = launch_order_.note(request); !wrong.ok()) return complete(std::move(request), wrong);
  if (request.exchange) return request.exchange(request.op);
  has_groups_ = has_groups_ || !request.spec.group.empty();
  if (uses_state(request.spec.kind) && !std::exchange(uses_states_, true)) {
    on_strands([](WorkerStrand& strand) { strand.use_states(); });
  }
  const PartPlan& plan = planner_.parts_of(request);
  request.whole = ledger_.open(request, plan.part_count(request.spec));
  for (RoundPart& part : plan.cut(std::move(request))) {
    part.request.stake = stake_of(part.request.spec, config_.job.worker_count, config_.rank);
    loops_.run_on(part.strand, [strand = strands_[part.strand].get(), request = std::move(part.request)]() mutable {
      strand->start_round(std::move(request));
    });
  }
}

void Communicator::complete(RoundRequest request, const Status& status) {
  if (!request.done) return;
  callback_threads_->run([done = std::move(request.done), status] { done(status); });
}

// --- Losses and the end.

void Communicator::abort(Status why) {
  loop_->post([this, why = std::move(why)] { fail(why); });
}

Status Communicator::shutdown(milliseconds patience) {
  if (!thread_.joinable()) return {};
  loop_->post([this, patience] {
    if (has_ended()) return;
    if (is_candidate_) return end_in_order();
    if (config_.job.is_elastic() && coordinator_has_left_) {  // it was let go at a gate
      phase_ = Phase::kLeaving;
      return end_in_order();
    }
    if (phase_ == Phase::kStarting) return fail({Code::kNotInitialized, "shut down before the start was complete"});
    phase_ = Phase::kLeaving;
    channels_->close({Code::kNotInitialized, "a message was posted after the shutdown had begun"});
    channels_->limit_patience(patience);
    on_strands([patience](WorkerStrand& strand) { strand.limit_patience(patience); });
    if (patience.count() == 0) return fail({Code::kNotInitialized, "shut down at once"});
    note_idle();
  });
  thread_.join();
  if (phase_ != Phase::kLeft) return failure();
  const std::string untaken = pending_rounds_.describe_untaken();
  if (untaken.empty()) return {};
  return {Code::kInvalidArgument,
          "rounds were started and never finished: " + untaken + "; finish them before jaxhetero.shutdown()"};
}

// Called when a view has started, when no round or no transfer is open any more, and when somebody wants to leave.
void Communicator::note_idle() {
  awaits_idle_ = asked_whether_idle_ || phase_ == Phase::kLeaving;
  if (has_ended() || !is_idle()) return;
  if (std::exchange(asked_whether_idle_, false)) {
    member_->send(OutFrame::control(FrameType::kIdle, {}, header_of(Idle{has_groups_})));
  }
  if (phase_ == Phase::kLeaving) leave();
}

// Says goodbye once no round and no transfer runs or waits. The coordinator answers when every worker is idle: until
// then a reducer may be lost, and other workers may need what this one keeps.
void Communicator::leave() {
  if (coordinator_has_left_) return end_in_order();
  if (std::exchange(has_said_goodbye_, true)) return;
  if (config_.job.is_elastic()) {  // its reducers may hear of a later view
    return member_->send(OutFrame::control(FrameType::kGoodbye, {}, header_of(Idle{has_groups_})));
  }
  on_strands([](WorkerStrand& strand) { strand.say_goodbye(); });
  follow_goodbyes(view_.number, EventLoop::Clock::now() + config_.timeout);
}

// First the reducers: the coordinator's answer closes their connections, and with that a fabric drops what is under
// way.
void Communicator::follow_goodbyes(uint64_t view, EventLoop::Clock::time_point deadline) {
  const auto is_sent = [this](size_t index) { return strands_[index]->has_sent_all(); };
  loops_.ask<bool>(is_sent, [this, view, deadline](const std::vector<bool>& all) {
    if (has_ended() || halted_ || view != view_.number) return;
    if (std::ranges::find(all, false) == all.end() || EventLoop::Clock::now() > deadline) {
      return member_->send(OutFrame::control(FrameType::kGoodbye, {}, header_of(Idle{has_groups_})));
    }
    loop_->after(kGoodbyeInterval, [this, view, deadline] { follow_goodbyes(view, deadline); });
  });
}

void Communicator::end_in_order() {
  if (has_ended()) return;
  phase_ = Phase::kLeft;
  on_strands([](WorkerStrand& strand) { strand.end_in_order(); });
  channels_->end_in_order();
  member_->stop();
  if (!coordinator_) return loop_->stop();
  coordinator_->end([this] { loop_->stop(); });
}

// Found here, or told by the coordinator, a reducer or another worker. The program hears what a loss has interrupted
// here; the others are told the cause alone, and each adds its own rounds.
void Communicator::fail(const Status& cause) {
  if (has_ended()) return;
  const bool lost = cause.code() == Code::kWorkerLost || cause.code() == Code::kReducerLost;
  const bool interrupts = lost && phase_ != Phase::kStarting;
  const Status why(cause.code(), cause.message() + (interrupts ? ledger_.circumstances() : ""));
  note_ready(why);
  gate_.end(why);
  phase_ = Phase::kFailed;
  inbox_.close(why);
  // A clean local shutdown still looks like a lost worker to our peers, so they are told WorkerLost.
  const bool ours = cause.code() == Code::kNotInitialized;
  const Status word = ours ? Status(Code::kWorkerLost, own_name() + " was lost: " + cause.message()) : cause;
  // First the coordinator: a reducer that has the word leaves, and could be taken for the cause.
  member_->stop(word);
  const Status to_peers = config_.job.is_elastic() ? Status() : word;
  on_strands([why, to_peers](WorkerStrand& strand) { strand.fail(why, to_peers); });
  channels_->fail(why, to_peers);
  for (RoundRequest& request : std::exchange(early_, {})) complete(std::move(request), why);
  // Time for that last word to be sent, and on rank 0 for the coordinator's.
  loop_->after_running(kFailureFlush, [this] { loop_->stop(); });
}

// The loop has ended: start_round() refuses from now on, and what it left for the loop is refused here.
void Communicator::refuse_inbox() {
  inbox_.close({Code::kNotInitialized, "jaxhetero was shut down"});
  for (RoundRequest& request : inbox_.take_all()) complete(std::move(request), failure());
  channels_->close(failure());
  channels_->refuse_inbox();
}

}  // namespace jaxhetero
