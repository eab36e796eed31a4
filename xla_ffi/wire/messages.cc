#include "xla_ffi/wire/messages.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {

// The fields of every message, in the order in which they travel.

template <typename Codec, typename Message>
void fields(Codec& codec, Message& from)
  requires IsA<Message, Registration>
{
  codec(from.role, from.rank, from.number);
  fields(codec, from.job);
  codec(from.strand_count, from.rail_count, from.version, from.host_name, from.port, from.address);
  codec.list(from.more_addresses, kMaxRails);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& reducer)
  requires IsA<Message, View::Reducer>
{
  codec(reducer.number, reducer.address, reducer.port, reducer.host_name, reducer.colocated_rank);
  codec.list(reducer.more_addresses, kMaxRails);
  codec(reducer.since);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& resume)
  requires IsA<Message, View::Resume>
{
  codec(resume.op, resume.round);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& member)
  requires IsA<Message, View::Member>
{
  codec(member.rank, member.since);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& commit)
  requires IsA<Message, View::Commit>
{
  codec(commit.op, commit.round);
  codec.list(commit.total, kMostTotalBytes);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& endpoint)
  requires IsA<Message, View::Endpoint>
{
  codec(endpoint.address, endpoint.port);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& deal)
  requires IsA<Message, View::Deal>
{
  codec(deal.gate);
  codec.list(deal.ranks, kMaxWorkers);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& count)
  requires IsA<Message, View::Count>
{
  codec(count.op, count.rounds);
  codec.list(count.group, kMaxWorkers);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& view)
  requires IsA<Message, View>
{
  codec(view.job_id, view.number);
  fields(codec, view.job);
  codec(view.strand_count, view.rail_count, view.own_index);
  codec.list(view.worker_hosts, kMaxWorkers);
  codec.list(view.worker_endpoints, kMaxWorkers);
  codec.list(view.reducers, kMaxReducers);
  codec.list(view.resume, kMaxOps * kMaxStrands);
  codec(view.is_settled);
  if (!view.job.is_elastic()) return;
  codec(view.is_candidate);
  codec.list(view.members, kMaxWorkers);
  codec.list(view.commits, kMaxOps * kMaxStrands);
  codec.list(view.joining, kMaxWorkers);
  codec(view.gate, view.is_short);
  codec.list(view.counts, kMaxOps * kMaxStrands);
  codec.list(view.deals, kMaxDeals);
  codec.list(view.states, kMaxControlBytes);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& step)
  requires IsA<Message, StepInputs>
{
  codec(step.version);
  codec.list(step.scalars, kMaxStepScalars);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& part)
  requires IsA<Message, StepTotals::Part>
{
  codec(part.total, part.first, part.level, part.sum);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& totals)
  requires IsA<Message, StepTotals>
{
  codec.list(totals.parts, kMaxTotalParts);
}

// But for the values, which come behind.
template <typename Codec, typename Message>
void fields(Codec& codec, Message& copy)
  requires IsA<Message, StateCopy>
{
  auto has = static_cast<uint8_t>((copy.has_gradient ? 1 : 0) + (copy.has_earlier ? 2 : 0));
  codec(copy.number, copy.count, copy.slot_count, copy.is_backed_up, copy.part.offset, copy.part.count, copy.version,
        copy.op, copy.round, has);
  if constexpr (!std::is_const_v<Message>) {
    copy.has_gradient = (has & 1) != 0;
    copy.has_earlier = (has & 2) != 0;
  }
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& join)
  requires IsA<Message, Join>
{
  codec(join.job_id, join.rank, join.view, join.plan, join.to);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& offer)
  requires IsA<Message, SharedOffer>
{
  codec(offer.process, offer.descriptor);
  codec.raw(offer.key);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& offer)
  requires IsA<Message, FabricOffer>
{
  codec(offer.provider, offer.session, offer.slot_count, offer.slot_bytes);
  codec.list(offer.name, kMaxEndpointNameBytes);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& lost)
  requires IsA<Message, Lost>
{
  codec(lost.view, lost.reducer, lost.why);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& halt)
  requires IsA<Message, Halt>
{
  codec(halt.view, halt.why);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& op)
  requires IsA<Message, Progress::OpProgress>
{
  codec(op.op, op.completed_count, op.group_size);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& progress)
  requires IsA<Message, Progress>
{
  codec(progress.view);
  codec.list(progress.ops, kMaxOps * kMaxStrands);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& link)
  requires IsA<Message, Goodput::Link>
{
  codec(link.reducer, link.planned_rate, link.bytes, link.us);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& goodput)
  requires IsA<Message, Goodput>
{
  codec(goodput.view, goodput.round_count);
  codec.list(goodput.links, kMaxReducers);
  codec(goodput.in_step.bytes, goodput.in_step.us, goodput.in_step.planned_time, goodput.in_step.awaited);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& rate)
  requires IsA<Message, NewRates::Rate>
{
  codec(rate.reducer, rate.rate);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& begin)
  requires IsA<Message, NewRates::Begin>
{
  codec(begin.op, begin.round);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& rates)
  requires IsA<Message, NewRates>
{
  codec(rates.view);
  codec.list(rates.rates, kMaxReducers);
  codec.list(rates.begins, kMaxOps * kMaxStrands);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& late)
  requires IsA<Message, ProcessState::LateWorker>
{
  codec(late.rank, late.waited_ms);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& state)
  requires IsA<Message, ProcessState>
{
  codec(state.view, state.round_count, state.sent_bytes, state.received_bytes, state.round, state.waited_ms);
  codec.list(state.late_workers, kMaxLateWorkers);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& process)
  requires IsA<Message, JobState::Process>
{
  codec(process.role, process.rank, process.number, process.host_name, process.address, process.is_member,
        process.is_candidate, process.has_answered, process.silent_ms, process.rate_percent);
  fields(codec, process.state);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& state)
  requires IsA<Message, JobState>
{
  codec(state.job_id, state.view, state.has_started, state.worker_count, state.most_workers, state.reducer_count,
        state.missing);
  codec.list(state.processes, kMaxWorkers + kMaxReducers);
}

namespace {

template <typename Message>
Bytes write(const Message& message) {
  Writer writer;
  fields(writer, message);
  return writer.take();
}

// Decodes a message that must take up all of `bytes`.
template <typename Message>
Result<Message> read(std::span<const std::byte> bytes, const char* what) {
  Reader reader(bytes);
  Message message;
  fields(reader, message);
  if (!reader.finished()) return malformed(what);
  return message;
}

}  // namespace

Bytes encode(const Registration& registration) { return write(registration); }
Bytes encode(const View& view) { return write(view); }
Bytes encode(const StepInputs& step) { return write(step); }
Bytes encode(const StepTotals& totals) { return write(totals); }

Bytes encode(const StateCopy& copy) {
  Writer writer;
  fields(writer, copy);
  writer.raw(copy.values);
  return writer.take();
}

// The members come last, and not in a fixed job.
Bytes encode(const Join& join) {
  Writer writer;
  fields(writer, join);
  if (!join.members.empty()) writer.list(join.members, kMaxWorkers);
  return writer.take();
}

Bytes encode(const SharedOffer& offer) { return write(offer); }
Bytes encode(const FabricOffer& offer) { return write(offer); }
Bytes encode(const Lost& lost) { return write(lost); }
Bytes encode(const Halt& halt) { return write(halt); }
Bytes encode(const Progress& progress) { return write(progress); }
Bytes encode(const Goodput& goodput) { return write(goodput); }
Bytes encode(const NewRates& rates) { return write(rates); }

Bytes encode(const ProcessState& state) { return write(state); }
Bytes encode(const JobState& state) { return write(state); }

Bytes encode(const OpDescription& description) {
  Writer writer;
  fields(writer, description.spec);
  writer(description.shard.offset, description.shard.count);
  writer(static_cast<uint32_t>(description.update.size()));
  writer.raw(description.update);
  writer.raw(encode(description.text));
  return writer.take();
}

Bytes encode(const Status& fault) {
  Writer writer;
  writer(fault.code());
  writer.raw(encode(fault.message()));
  return writer.take();
}

Bytes encode(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text.substr(0, kMaxTextBytes)));
  return {bytes.begin(), bytes.end()};
}

Result<Registration> decode_registration(std::span<const std::byte> bytes) {
  Result<Registration> registration = read<Registration>(bytes, "registration");
  if (!registration.ok()) return registration;
  const bool is_reducer = registration->role == Role::kReducer;
  if (!is_reducer && registration->role != Role::kWorker) return malformed("registration");
  if (registration->strand_count < 1 || registration->strand_count > kMaxStrands) return malformed("registration");
  if (registration->rail_count < 1 || registration->rail_count > kMaxRails) return malformed("registration");
  const bool may_ask = is_reducer && registration->rank < 0;
  if (registration->number < -1 || (registration->number >= 0 && !may_ask)) return malformed("registration");
  return registration;
}

Result<View> decode_view(std::span<const std::byte> bytes) {
  Result<View> view = read<View>(bytes, "view");
  if (!view.ok()) return view;
  const JobShape& job = view->job;
  const bool is_sane = !view->worker_hosts.empty() && view->worker_hosts.size() == job.worker_count &&
                       view->worker_endpoints.size() == job.worker_count && view->strand_count >= 1 &&
                       view->strand_count <= kMaxStrands && view->rail_count >= 1 && view->rail_count <= kMaxRails &&
                       job.chunk_bytes <= kMaxChunkBytes && job.chunk_bytes % 64 == 0;
  const auto has_ranks = [](const View::Deal& deal) { return are_ranks(deal.ranks); };
  if (!is_sane || !are_ranks(view->ranks()) || !are_ranks(view->joining)) return malformed("view");
  if (!std::ranges::all_of(view->deals, has_ranks)) return malformed("view");
  if (!view->states.empty() && !decode_state_plan(view->states).ok()) return malformed("view");
  return view;
}

Result<OpDescription> decode_op_description(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  OpDescription description;
  uint32_t update_bytes = 0;
  fields(reader, description.spec);
  reader(description.shard.offset, description.shard.count);
  reader(update_bytes);
  if (!reader.ok() || update_bytes > reader.rest().size()) return malformed("description of an op");
  if (Status status = check(description.spec); !status.ok()) return status;
  description.update.resize(update_bytes);
  reader.raw(description.update);
  description.text = decode_text(reader.rest());
  return description;
}

Result<StepInputs> decode_step_inputs(std::span<const std::byte> bytes) {
  return read<StepInputs>(bytes, "inputs of a step");
}

Result<StepTotals> decode_step_totals(std::span<const std::byte> bytes) {
  return read<StepTotals>(bytes, "totals of a step");
}

Result<StateCopy> decode_state_copy(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  StateCopy copy;
  fields(reader, copy);
  const bool is_sane = reader.ok() && copy.slot_count >= 1 && copy.slot_count <= kMaxStateSlots &&
                       copy.part.count > 0 && overlap(copy.part, {0, copy.count}) == copy.part &&
                       copy.part.count <= kMaxControlBytes / sizeof(float) &&
                       reader.rest().size() == copy.array_count() * copy.part.count * sizeof(float);
  if (!is_sane) return malformed("copy of a state");
  copy.values.assign(reader.rest().begin(), reader.rest().end());
  return copy;
}

Result<Join> decode_join(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Join join;
  fields(reader, join);
  if (!reader.rest().empty()) reader.list(join.members, kMaxWorkers);
  if (!reader.finished() || !are_ranks(join.members)) return malformed("join");
  return join;
}

Result<SharedOffer> decode_shared_offer(std::span<const std::byte> bytes) {
  return read<SharedOffer>(bytes, "offer of shared memory");
}

Result<FabricOffer> decode_fabric_offer(std::span<const std::byte> bytes) {
  return read<FabricOffer>(bytes, "offer of a fabric");
}

Result<Lost> decode_lost(std::span<const std::byte> bytes) { return read<Lost>(bytes, "report of a lost reducer"); }

Result<Halt> decode_halt(std::span<const std::byte> bytes) { return read<Halt>(bytes, "halt"); }

Result<Progress> decode_progress(std::span<const std::byte> bytes) { return read<Progress>(bytes, "progress"); }

Result<Goodput> decode_goodput(std::span<const std::byte> bytes) { return read<Goodput>(bytes, "report of goodput"); }

// A rate of 0 would leave a reducer, and perhaps all, without a share.
Result<NewRates> decode_new_rates(std::span<const std::byte> bytes) {
  Result<NewRates> rates = read<NewRates>(bytes, "new rates");
  if (!rates.ok()) return rates;
  const auto is_rate = [](const NewRates::Rate& rate) { return rate.rate > 0 && rate.rate <= NewRates::kMostRate; };
  if (!std::ranges::all_of(rates->rates, is_rate)) return malformed("new rates");
  return rates;
}

Result<ProcessState> decode_process_state(std::span<const std::byte> bytes) {
  return read<ProcessState>(bytes, "state of a process");
}

Result<JobState> decode_job_state(std::span<const std::byte> bytes) {
  Result<JobState> state = read<JobState>(bytes, "state of a job");
  if (!state.ok()) return state;
  for (const JobState::Process& process : state->processes) {
    if (process.role != Role::kWorker && process.role != Role::kReducer) return malformed("state of a job");
  }
  return state;
}

FrameHeader header_of(const Idle& idle) {
  FrameHeader header;
  header.count = idle.has_groups ? 1 : 0;
  return header;
}

FrameHeader header_of(const Settled& settled) {
  FrameHeader header;
  header.round = settled.view;
  header.count = settled.has_states ? 1 : 0;
  header.last = settled.has_candidates;
  return header;
}

FrameHeader header_of(const Late& late) {
  FrameHeader header;
  header.op = late.op;
  header.round = late.round;
  header.count = late.moving_count;
  header.offset = late.disagree ? 1 : 0;
  return header;
}

FrameHeader header_of(const Hold& hold) {
  FrameHeader header;
  header.round = hold.view;
  return header;
}

Result<Hold> decode_hold(const FrameHeader& header) {
  if (header.round > std::numeric_limits<uint32_t>::max()) return malformed("hold");
  return Hold{static_cast<uint32_t>(header.round)};
}

Result<Idle> decode_idle(const FrameHeader& header) {
  if (header.count > 1) return malformed("idle");
  return Idle{header.count == 1};
}

Result<Settled> decode_settled(const FrameHeader& header) {
  if (header.round > std::numeric_limits<uint32_t>::max() || header.count > 1) return malformed("settled");
  return Settled{static_cast<uint32_t>(header.round), header.count == 1, header.last};
}

Result<Late> decode_late(const FrameHeader& header) {
  if (header.count > kMaxWorkers || header.offset > 1) return malformed("report of late workers");
  return Late{header.op, header.round, header.count, header.offset == 1};
}

Status decode_fault(std::span<const std::byte> bytes) {
  if (bytes.empty()) return malformed("fault");
  const auto code = std::to_integer<uint8_t>(bytes[0]);
  if (code == 0 || code >= kCodeCount) return malformed("fault");
  return {static_cast<Code>(code), decode_text(bytes.subspan(1))};
}

}  // namespace jaxhetero
