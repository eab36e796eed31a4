#include "xla_ffi/worker/reducer_link.h"

namespace jaxhetero {

ReducerLink::ReducerLink(const View::Reducer& reducer, const TcpAddress& address, const JobShape& job)
    : number_(reducer.number),
      name_("reducer " + std::to_string(reducer.number) + " (host " + reducer.host_name + ", " + address.text() + ")"),
      address_(address),
      rule_(job) {}

void ReducerLink::connect(TcpContext& context, ConnectionOwner& owner, std::chrono::milliseconds patience) {
  counters_ = context.counters;
  connection_ = TcpConnection::connect(context, address_, owner, patience);
}

void ReducerLink::close() {
  if (connection_) connection_->close();
}

void ReducerLink::close_with(const Status& why) {
  if (why.ok()) {
    close();
  } else if (connection_) {
    connection_->close_with(OutFrame::control(FrameType::kFault, encode(why)));
  }
  rule_.clear();
}

std::vector<iovec> ReducerLink::take_control(size_t bytes) {
  control_.resize(bytes);
  return as_pieces(control_);
}

ChunkSender::Sent ReducerLink::send_chunk(const Round& round, const FrameHeader& header) {
  const ByteRange part = round.pushed({header.offset, header.count});
  const bool lends = connection_->lends();
  round.keep(part, lends);
  const Leaves& inputs = round.wire_inputs(lends);
  const bool may_code = codes_ || round.request.spec.state.numbers != Numbers::kNone;
  const bool is_coded = may_code && !connection_->shares_memory() && !round.request.is_internal;
  OutFrame frame = is_coded ? coded(round, header, inputs, part.offset) : OutFrame::gather(header, inputs, part.offset);
  if (!frame.owner && &inputs == &round.request.inputs) frame.owner = round.request.inputs_owner;
  connection_->send(std::move(frame));
  return {connection_->queued_frame_count(), EventLoop::Clock::now()};
}

// As it is, where the code is not shorter. Without elements, it asks for an answer that is coded.
OutFrame ReducerLink::coded(const Round& round, FrameHeader header, const Leaves& inputs, size_t offset) {
  const size_t bytes = header.payload_bytes;
  const OpSpec& spec = round.request.spec;
  std::optional<ChunkCoder::Code> code;
  if (spec.state.numbers != Numbers::kNone) {
    code = coder_.encode_numbers(spec.state.numbers, spec.state.first, *round.request.step->leaf_ends, inputs, offset,
                                 bytes);
  }
  header.has_numbers = code.has_value();
  if (codes_ && !code.has_value()) code = coder_.encode(spec.dtype, inputs, offset, bytes);
  header.is_coded = codes_ && (bytes == 0 || code.has_value());
  if (!code.has_value()) return OutFrame::gather(header, inputs, offset);
  counters_->saved_bytes += bytes - code->bytes.size();
  return OutFrame::of(header, code->bytes, std::move(code->owner));
}

Status ReducerLink::decode_result(const Round& round, const FrameHeader& header) {
  std::vector<iovec> pieces;
  round.place(round.answered({header.offset, header.count}), pieces);
  if (coder_.decode(round.request.spec.result_dtype(), control_, pieces)) return {};
  return {Code::kProtocol, "it sent a total in a malformed code"};
}

Status ReducerLink::check_result(const Round& round, const Segment& segment, const FrameHeader& header) const {
  const Range chunk = segment.awaited_chunk();
  // A total can only exist once our own piece has left this process, so its memory is no longer needed.
  const bool pushed =
      !segment.in_flight.empty() && segment.in_flight.front().frame <= connection_->written_frame_count();
  if (pushed && header.offset == chunk.offset && header.count == chunk.count &&
      header.last == (segment.next_result + chunk.count == segment.end()) &&
      may_carry(header, round.answered(chunk).bytes)) {
    return {};
  }
  return {Code::kProtocol, "it sent a result out of order"};
}

}  // namespace jaxhetero
