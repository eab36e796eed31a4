#include "xla_ffi/worker/reducer_link.h"

namespace jaxhetero {

ReducerLink::ReducerLink(const View::Reducer& reducer, const TcpAddress& address, const JobShape& job)
    : number_(reducer.number),
      name_("reducer " + std::to_string(reducer.number) + " (host " + reducer.host_name + ", " + address.text() + ")"),
      address_(address),
      rule_(job) {}

void ReducerLink::connect(TcpContext& context, ConnectionOwner& owner, std::chrono::milliseconds patience) {
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
  connection_->send(OutFrame::gather(header, round.wire_inputs(lends), part.offset));
  return {connection_->queued_frame_count(), EventLoop::Clock::now()};
}

Status ReducerLink::check_result(const Round& round, const Segment& segment, const FrameHeader& header) const {
  const Range chunk = segment.awaited_chunk();
  // A total can only exist once our own piece has left this process, so its memory is no longer needed.
  const bool pushed =
      !segment.in_flight.empty() && segment.in_flight.front().frame <= connection_->written_frame_count();
  if (pushed && header.offset == chunk.offset && header.count == chunk.count &&
      header.last == (segment.next_result + chunk.count == segment.end()) &&
      header.payload_bytes == round.answered(chunk).bytes) {
    return {};
  }
  return {Code::kProtocol, "it sent a result out of order"};
}

}  // namespace jaxhetero
