#include "xla_ffi/wire/elastic_messages.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {

template <typename Codec, typename Message>
void fields(Codec& codec, Message& op)
  requires IsA<Message, Report::Op>
{
  codec(op.op, op.given_count, op.holds, op.is_small);
  codec.list(op.group, kMaxWorkers);
  codec.list(op.total, kMostTotalBytes);
  codec(op.name);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& report)
  requires IsA<Message, Report>
{
  codec(report.view, report.gate, report.has_state);
  codec.list(report.ops, kMaxOps * kMaxStrands);
  codec(report.planned_view);
  codec.list(report.states, kMaxControlBytes);
}

template <typename Codec, typename Message>
void fields(Codec& codec, Message& accusation)
  requires IsA<Message, Accusation>
{
  codec(accusation.view, accusation.why);
  codec.list(accusation.ranks, kMaxWorkers);
}

FrameHeader header_of(const Meeting& meeting) {
  FrameHeader header;
  header.op = meeting.number;
  header.round = meeting.gate;
  header.last = meeting.is_set;
  return header;
}

FrameHeader header_of(const Presence& presence) {
  FrameHeader header;
  header.round = presence.view;
  return header;
}

Meeting decode_meeting(const FrameHeader& header) { return {header.op, header.round, header.last}; }

Result<Presence> decode_presence(const FrameHeader& header) {
  if (header.round > std::numeric_limits<uint32_t>::max()) return malformed("presence");
  return Presence{static_cast<uint32_t>(header.round)};
}

Bytes encode(const Absent& absent) {
  Writer writer;
  writer.list(absent.ranks, kMaxWorkers);
  return writer.take();
}

Bytes encode(const Report& report) {
  Writer writer;
  fields(writer, report);
  return writer.take();
}

Bytes encode(const Return& back) {
  const Bytes registration = encode(back.registration);
  Writer writer;
  writer(back.heard_view, static_cast<uint32_t>(registration.size()));
  writer.raw(registration);
  writer.raw(encode(back.view));
  return writer.take();
}

Bytes encode(const Accusation& accusation) {
  Writer writer;
  fields(writer, accusation);
  return writer.take();
}

Result<Absent> decode_absent(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Absent absent;
  reader.list(absent.ranks, kMaxWorkers);
  if (!reader.finished() || !are_ranks(absent.ranks)) return malformed("list of late workers");
  return absent;
}

Result<Report> decode_report(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Report report;
  fields(reader, report);
  const auto has_ranks = [](const Report::Op& op) { return are_ranks(op.group); };
  const bool has_plan = report.states.empty() || decode_state_plan(report.states).ok();
  if (!reader.finished() || !std::ranges::all_of(report.ops, has_ranks) || !has_plan) return malformed("report");
  return report;
}

Result<Return> decode_return(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Return back;
  uint32_t registration_bytes = 0;
  reader(back.heard_view, registration_bytes);
  if (!reader.ok() || registration_bytes > reader.rest().size()) return malformed("return");
  Result<Registration> registration = decode_registration(reader.rest().first(registration_bytes));
  if (!registration.ok()) return registration.status();
  Result<View> view = decode_view(reader.rest().subspan(registration_bytes));
  if (!view.ok()) return view.status();
  if (!view->job.is_elastic()) return malformed("return");
  back.registration = std::move(*registration);
  back.view = std::move(*view);
  return back;
}

Result<Accusation> decode_accusation(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Accusation accusation;
  fields(reader, accusation);
  if (!reader.finished() || !are_ranks(accusation.ranks)) return malformed("accusation");
  return accusation;
}

}  // namespace jaxhetero
