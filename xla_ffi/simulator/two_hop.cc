#include "xla_ffi/simulator/two_hop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "xla_ffi/base/mix.h"
#include "xla_ffi/simulator/plan.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero::simulator {
namespace {

uint32_t frame_bytes(uint64_t count, DType dtype) {
  return static_cast<uint32_t>(kHeaderBytes + count * item_bytes(dtype));
}

// Nothing is to be added, as there is no payload. The chunks of a broadcast are complete when those of a sum are, and
// their totals go to the same workers.
OpSpec without_sums(OpSpec spec) {
  spec.kind = Kind::kBroadcast;
  return spec;
}

}  // namespace

// --- The worker.

SimulatedWorker::SimulatedWorker(TwoHop& job, Processor& processor, uint32_t rank, uint32_t strand)
    : Strand(processor, job.config_.worker_costs), job_(job), rank_(rank), strand_(strand) {}

SimulatedWorker::Link::Link(SimulatedWorker& worker, uint32_t flow)
    : rule(worker.job_.config_.shape), worker_(worker), flow_(flow) {}

void SimulatedWorker::add_link(uint32_t flow) { links_.emplace_back(*this, flow); }

ChunkSender::Sent SimulatedWorker::Link::send_chunk(const Round& round, const FrameHeader& header) {
  const uint32_t bytes = frame_bytes(header.count, round.request.spec.dtype);
  worker_.job_.network_.send(flow_, bytes, header);
  worker_.charge_send(bytes);
  return {0, worker_.job_.now()};
}

void SimulatedWorker::call(const RoundRequest& part, uint64_t number) {
  auto& running = running_[part.op];
  running = std::make_unique<Running>();
  running->round.request = part;
  running->round.request.stake = stake_of(part.spec, job_.config_.shape.worker_count, rank_);
  running->round.number = number;
  FrameHeader header;
  header.op = part.op;
  on_call(header);
}

void SimulatedWorker::handle(const Message& message) {
  Running& running = *running_[message.header.op];
  message.flow == kCall ? start_round(running) : finish_result(running, message);
}

// As WorkerStrand::run() does.
void SimulatedWorker::start_round(Running& running) {
  Round& round = running.round;
  round.times.started_at = round.times.progress_at = job_.now();
  round.cut(*job_.plans_.plan_of(round.request));
  running.segments.resize(links_.size());
  round.begin_segments(rank_, job_.config_.shape, [&](Segment& segment) {
    const uint32_t reducer = segment.shard.reducer;
    running.segments[reducer] = &segment;
    if (round.number == 0) {
      const OpSpec& spec = round.request.spec;
      Status status = job_.reducer(reducer, strand_).describe_op(rank_, round.request.op, spec);
      if (!status.ok()) return job_.fail(status);
    }
    links_[reducer].rule.start_segment(round, segment, links_[reducer]);
  });
}

// As WorkerStrand::finish_result() does.
void SimulatedWorker::finish_result(Running& running, const Message& message) {
  Round& round = running.round;
  Segment& segment = *running.segments[message.sender];
  Link& link = links_[message.sender];
  const double earlier_part = segment.done_part();
  link.rule.finish_result(round, segment, message.header, job_.now(), link);
  if (round.note_slowest(earlier_part)) {
    for (Link& other : links_) other.rule.push_chunks(other);
  }
  if (!segment.done || --round.open_segment_count > 0) return;
  for (Link& other : links_) other.rule.end_round(round);
  const auto ended = running_.extract(message.header.op);
  job_.end_part(rank_, ended.mapped()->round.request);
}

// --- The reducer.

SimulatedReducer::SimulatedReducer(TwoHop& job, Processor& processor, uint32_t number)
    : Strand(processor, job.config_.reducer_costs),
      job_(job),
      machine_(ReducerStateMachine::Job{
          std::vector<std::string>(job.config_.shape.worker_count), job.config_.shape, {}, number}) {}

Status SimulatedReducer::describe_op(uint32_t rank, uint64_t op, const OpSpec& spec) {
  FrameHeader header;
  header.op = op;
  return machine_.describe_op(rank, header, {without_sums(spec), {}}, outgoing_);
}

void SimulatedReducer::handle(const Message& message) {
  FrameHeader header = message.header;
  const uint32_t rank = message.sender;
  header.payload_bytes = rank == 0 ? message.bytes - static_cast<uint32_t>(kHeaderBytes) : 0;
  const auto memory = machine_.start_push(rank, header, 0, outgoing_);
  if (!memory.ok()) return job_.fail(memory.status());
  if (Status status = machine_.finish_push(rank, header, 0, outgoing_); !status.ok()) return job_.fail(status);
  for (const Outgoing& frame : outgoing_) {
    // The last piece to come is of the same chunk as the total.
    job_.network_.send(flows_[frame.rank], message.bytes, frame.header);
    charge_send(message.bytes);
  }
  outgoing_.clear();
}

// --- The job.

TwoHop::TwoHop(const Cluster& cluster, const JobConfig& config)
    : cluster_(cluster), config_(config), network_(events_, cluster_.network) {
  for (const ProcessorConfig& processor : cluster_.processors) {
    processors_.push_back(std::make_unique<Processor>(events_, processor.core_count, processor.memory_bytes_per_s));
  }
  for (uint32_t host = 0; host < cluster_.hosts.size(); ++host) {
    const std::vector<double>& rates = cluster_.hosts[host].interfaces;
    for (size_t i = 0; i < rates.size(); ++i) {
      const uint32_t number = network_.add_interface(host, rates[i]);
      if (i == 0) first_interface_.push_back(number);
    }
  }
  connect();
  cut_buckets();
  plan_moments();
  train_loops_.resize(config_.shape.worker_count, {0, 0, std::vector<size_t>(config_.buckets.size()), false});
  step_ends_s_.resize(size_t{config_.step_count} * config_.shape.worker_count);
  for (uint32_t rank = 0; rank < config_.shape.worker_count; ++rank) start_step(rank);
}

TwoHop::~TwoHop() = default;

uint32_t TwoHop::interface_of(uint32_t host, uint32_t strand) const {
  return first_interface_[host] + strand % static_cast<uint32_t>(cluster_.hosts[host].interfaces.size());
}

void TwoHop::connect() {
  std::vector<uint32_t> reducer_hosts = config_.reducer_hosts;
  for (uint32_t rank = 0; rank < config_.shape.colocated_count; ++rank) {
    reducer_hosts.push_back(config_.worker_hosts[rank]);
  }
  const auto processor_of = [&](uint32_t host) -> Processor& { return *processors_[cluster_.hosts[host].processor]; };
  for (uint32_t number = 0; number < reducer_hosts.size(); ++number) {
    Processor& processor = processor_of(reducer_hosts[number]);
    for (uint32_t strand = 0; strand < config_.strand_count; ++strand) {
      reducers_.push_back(std::make_unique<SimulatedReducer>(*this, processor, number));
    }
  }
  for (uint32_t rank = 0; rank < config_.shape.worker_count; ++rank) {
    const uint32_t host = config_.worker_hosts[rank];
    for (uint32_t strand = 0; strand < config_.strand_count; ++strand) {
      workers_.push_back(std::make_unique<SimulatedWorker>(*this, processor_of(host), rank, strand));
      for (uint32_t number = 0; number < reducer_hosts.size(); ++number) {
        const uint32_t here = interface_of(host, strand);
        const uint32_t there = interface_of(reducer_hosts[number], strand);
        worker(rank, strand).add_link(network_.add_flow(here, there, reducer(number, strand), rank));
        reducer(number, strand).add_link(network_.add_flow(there, here, worker(rank, strand), number));
      }
    }
  }
}

void TwoHop::cut_buckets() {
  Planner planner(config_.shape);
  prepare(planner, view_of(cluster_, config_), cluster_, config_);
  plans_ = planner.plans();
  if (config_.shape.measure_rates) rates_text_ = planner.rates_text();
  for (size_t i = 0; i < config_.buckets.size(); ++i) {
    const BucketConfig& bucket = config_.buckets[i];
    RoundRequest request;
    request.op = mix(config_.seed + i + 1);
    request.priority = bucket.priority;
    request.sequence = i;
    request.spec = {Kind::kSum, bucket.dtype, 0, 1, bucket.count, 0, config_.call_bytes};
    parts_.push_back(planner.parts_of(request).cut(request));
  }
}

Round::Time TwoHop::now() const {
  // Not at the clock's zero, which stands for "never".
  return Round::Time(
      std::chrono::duration_cast<Round::Time::duration>(std::chrono::duration<double>(1 + events_.now_s())));
}

void TwoHop::plan_moments() {
  for (uint32_t bucket = 0; bucket < config_.buckets.size(); ++bucket) {
    const BucketConfig& config = config_.buckets[bucket];
    moments_.push_back({config.ready_s, Moment::Kind::kIsReady, bucket});
    if (config.needed_s >= 0) moments_.push_back({config.needed_s, Moment::Kind::kNeedsTotal, bucket});
  }
  const auto order = [](const Moment& moment) { return std::pair(moment.time_s, moment.kind); };
  std::ranges::stable_sort(moments_, {}, order);
  const double last_s = moments_.empty() ? 0 : moments_.back().time_s;
  moments_.push_back({std::max(config_.step_s, last_s), Moment::Kind::kEnds, 0});
}

void TwoHop::on_event(uint64_t what) { proceed(static_cast<uint32_t>(what)); }

double TwoHop::slowdown(uint32_t rank) const {
  if (config_.slowdowns.empty()) return 1;
  return config_.slowdowns[size_t{train_loops_[rank].step} * config_.shape.worker_count + rank];
}

void TwoHop::start_step(uint32_t rank) {
  train_loops_[rank].moment = 0;
  events_.at(events_.now_s() + slowdown(rank) * moments_[0].time_s, *this, rank);
}

// A bucket whose total the next step takes is waited for there; but a second round of it begins only behind the first.
bool TwoHop::waits(const TrainLoop& loop, const Moment& moment) const {
  if (moment.kind != Moment::Kind::kEnds) return loop.open_parts[moment.bucket] > 0;
  for (uint32_t bucket = 0; bucket < parts_.size(); ++bucket) {
    if (config_.buckets[bucket].needed_s < 0 && loop.open_parts[bucket] > 0) return true;
  }
  return false;
}

void TwoHop::proceed(uint32_t rank) {
  TrainLoop& loop = train_loops_[rank];
  while (true) {
    const Moment& moment = moments_[loop.moment];
    loop.is_waiting = waits(loop, moment);
    if (loop.is_waiting) return;
    if (moment.kind == Moment::Kind::kEnds) break;
    if (moment.kind == Moment::Kind::kIsReady) {
      loop.open_parts[moment.bucket] = parts_[moment.bucket].size();
      for (const RoundPart& part : parts_[moment.bucket]) worker(rank, part.strand).call(part.request, loop.step);
    }
    const double left_s = moments_[++loop.moment].time_s - moment.time_s;
    if (left_s > 0) return events_.at(events_.now_s() + slowdown(rank) * left_s, *this, rank);
  }
  step_ends_s_[size_t{loop.step} * config_.shape.worker_count + rank] = events_.now_s();
  ++ended_count_;
  if (++loop.step < config_.step_count) start_step(rank);
}

void TwoHop::end_part(uint32_t rank, const RoundRequest& part) {
  TrainLoop& loop = train_loops_[rank];
  --loop.open_parts[part.sequence];
  if (loop.is_waiting) proceed(rank);
}

Result<bool> TwoHop::run(uint64_t most_events) {
  for (uint64_t i = 0; i < most_events && failure_.ok(); ++i) {
    if (events_.step()) continue;
    if (ended_count_ == step_ends_s_.size()) return true;
    fail({Code::kInternal, "the simulated job stands still after " + std::to_string(ended_count_) + " of " +
                               std::to_string(step_ends_s_.size()) + " steps of its workers"});
  }
  if (!failure_.ok()) return failure_;
  return false;
}

std::vector<double> TwoHop::sent_bytes() const {
  std::vector<double> bytes;
  for (uint32_t i = 0; i < network_.interface_count(); ++i) bytes.push_back(network_.sent_bytes(i));
  return bytes;
}

std::vector<double> TwoHop::received_bytes() const {
  std::vector<double> bytes;
  for (uint32_t i = 0; i < network_.interface_count(); ++i) bytes.push_back(network_.received_bytes(i));
  return bytes;
}

std::vector<double> TwoHop::busy_s() const {
  std::vector<double> busy(config_.shape.worker_count + total_reducer_count(config_.shape));
  for (size_t i = 0; i < workers_.size(); ++i) busy[i / config_.strand_count] += workers_[i]->busy_s();
  for (size_t i = 0; i < reducers_.size(); ++i) {
    busy[config_.shape.worker_count + i / config_.strand_count] += reducers_[i]->busy_s();
  }
  return busy;
}

}  // namespace jaxhetero::simulator
