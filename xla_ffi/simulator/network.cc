#include "xla_ffi/simulator/network.h"

#include <algorithm>
#include <utility>

#include "xla_ffi/base/mix.h"

namespace jaxhetero::simulator {

uint32_t Network::add_interface(uint32_t host, double bytes_per_s) {
  const double burst_s = config_.burst_bytes / bytes_per_s;
  const Port port{1 / bytes_per_s, burst_s, -burst_s};
  Interface& interface = interfaces_.emplace_back();
  interface.host = host;
  interface.out = interface.in = port;
  if (config_.hosts_per_leaf > 0) {
    const size_t links = size_t{host / config_.hosts_per_leaf + 1} * config_.spine_count;
    const Port link{1 / config_.uplink_bytes_per_s};
    if (up_.size() < links) up_.resize(links, link);
    down_.resize(up_.size(), link);
  }
  return static_cast<uint32_t>(interfaces_.size() - 1);
}

uint32_t Network::add_flow(uint32_t from_interface, uint32_t to_interface, Receiver& receiver, uint32_t sender) {
  Flow& flow = flows_.emplace_back();
  flow.from = from_interface;
  flow.to = to_interface;
  flow.sender = sender;
  flow.is_within_host = interfaces_[from_interface].host == interfaces_[to_interface].host;
  flow.receiver = &receiver;
  return static_cast<uint32_t>(flows_.size() - 1);
}

double Network::on_wire(uint32_t bytes) const {
  const uint32_t packets = (bytes + config_.packet_bytes - 1) / config_.packet_bytes;
  return bytes + static_cast<double>(packets) * config_.packet_overhead_bytes;
}

double Network::acknowledgements(uint32_t bytes) const {
  return static_cast<double>(config_.ack_bytes) * std::max(1.0, static_cast<double>(bytes) / config_.bytes_per_ack);
}

uint32_t Network::take_passage() {
  if (free_passages_.empty()) {
    passages_.emplace_back();
    return static_cast<uint32_t>(passages_.size() - 1);
  }
  const uint32_t number = free_passages_.back();
  free_passages_.pop_back();
  passages_[number] = {};
  return number;
}

uint32_t Network::take_piece(const Piece& piece) {
  if (free_pieces_.empty()) {
    pieces_.push_back(piece);
    return static_cast<uint32_t>(pieces_.size() - 1);
  }
  const uint32_t number = free_pieces_.back();
  free_pieces_.pop_back();
  pieces_[number] = piece;
  return number;
}

void Network::on_event(uint64_t what) {
  const auto number = static_cast<uint32_t>(what >> 8);
  switch (static_cast<What>(what & 0xff)) {
    case What::kSent:
      interfaces_[number].is_sending = false;
      return send_next(number);
    case What::kArrived:
      return deliver(number);
    case What::kFlowReady:
      return give_turn(number);
    case What::kAtPort:
      free_pieces_.push_back(number);
      return pass_ports(pieces_[number]);
    case What::kSendAnew:
      free_pieces_.push_back(number);
      return send_anew(pieces_[number]);
  }
}

// --- An interface's turn.

void Network::send(uint32_t flow_number, uint32_t bytes, const FrameHeader& header) {
  const uint32_t number = take_passage();
  Passage& passage = passages_[number];
  Flow& flow = flows_[flow_number];
  passage.message = {flow_number, flow.sender, bytes, header};
  if (flow.is_within_host) return plan(events_.now_s() + config_.own_host_latency_s, What::kArrived, number);
  passage.left_bytes = passage.missing_bytes = bytes;
  passage.is_to_send = true;
  (flow.to_send == kNone ? flow.to_send : passages_[flow.last_to_send].next_to_send) = number;
  flow.last_to_send = number;
  (flow.oldest == kNone ? flow.oldest : passages_[flow.newest].next_newer) = number;
  flow.newest = number;
  give_turn(flow_number);
}

void Network::give_turn(uint32_t number) {
  Flow& flow = flows_[number];
  if (flow.is_in_turn || flow.to_send == kNone) return;
  flow.is_in_turn = true;
  flow.next_flow = kNone;
  Interface& interface = interfaces_[flow.from];
  (interface.first_flow == kNone ? interface.first_flow : flows_[interface.last_flow].next_flow) = number;
  interface.last_flow = number;
  send_next(flow.from);
}

// A flow that may send now; those before it that may not come back when they may.
uint32_t Network::next_in_turn(Interface& interface) {
  while (interface.first_flow != kNone) {
    const uint32_t number = interface.first_flow;
    Flow& flow = flows_[number];
    interface.first_flow = flow.next_flow;
    flow.is_in_turn = false;
    if (flow.ready_at_s <= events_.now_s()) return number;
    plan(flow.ready_at_s, What::kFlowReady, number);
  }
  return kNone;
}

void Network::send_next(uint32_t number) {
  if (interfaces_[number].is_sending) return;
  const uint32_t flow_number = next_in_turn(interfaces_[number]);
  if (flow_number == kNone) return;
  Interface& interface = interfaces_[number];
  Flow& flow = flows_[flow_number];
  Passage& passage = passages_[flow.to_send];
  const uint32_t bytes = std::min(passage.left_bytes, config_.piece_bytes);
  const double wire_bytes = on_wire(bytes);
  const double now_s = events_.now_s();
  const double sent_s = interface.out.pass(now_s, wire_bytes);
  const double first_packet_s =
      std::min(sent_s, now_s + on_wire(std::min(bytes, config_.packet_bytes)) * interface.out.s_per_byte);
  if (config_.flow_bytes_per_s > 0) flow.ready_at_s = now_s + wire_bytes / config_.flow_bytes_per_s;
  interface.is_sending = true;
  const Piece piece{flow.to_send, bytes, 0, first_packet_s + config_.latency_s, sent_s + config_.latency_s};
  passage.left_bytes -= bytes;
  if (passage.left_bytes == 0) pop_sent(flow);
  plan(sent_s, What::kSent, number);
  give_turn(flow_number);
  pass_ports(piece);
}

void Network::pop_sent(Flow& flow) {
  Passage& sent = passages_[flow.to_send];
  sent.is_to_send = false;
  flow.to_send = std::exchange(sent.next_to_send, kNone);
}

// --- From port to port.

// The ports behind the sender's own; the last one is the receiver's.
Network::Port* Network::port_at(const Flow& flow, uint32_t flow_number, uint32_t hop) {
  Interface& to = interfaces_[flow.to];
  if (config_.hosts_per_leaf == 0) return &to.in;
  const size_t from_leaf = interfaces_[flow.from].host / config_.hosts_per_leaf;
  const size_t to_leaf = to.host / config_.hosts_per_leaf;
  if (from_leaf == to_leaf || hop == 2) return &to.in;
  const size_t spine = mix(flow_number) % config_.spine_count;
  return hop == 0 ? &up_[from_leaf * config_.spine_count + spine] : &down_[to_leaf * config_.spine_count + spine];
}

// Passes the next port, as its first packet comes there; packets behind it follow without a gap if the port is free.
void Network::pass_ports(Piece piece) {
  Passage& passage = passages_[piece.passage];
  Flow& flow = flows_[passage.message.flow];
  Port& port = *port_at(flow, passage.message.flow, piece.hop);
  const bool is_last = &port == &interfaces_[flow.to].in;
  const double wire_bytes = on_wire(piece.bytes);
  if (config_.queue_bytes > 0 && port.waiting_bytes(piece.begin_s) + wire_bytes > config_.queue_bytes) {
    return drop(piece);
  }
  const double passed_s = std::max(port.pass(piece.begin_s, wire_bytes), piece.end_s);
  if (!is_last) {
    const double first_packet_s = passed_s - wire_bytes * port.s_per_byte + config_.packet_bytes * port.s_per_byte;
    piece.begin_s = std::clamp(first_packet_s, piece.begin_s, passed_s);
    piece.end_s = passed_s;
    ++piece.hop;
    plan(piece.begin_s, What::kAtPort, take_piece(piece));
    return;
  }
  passage.missing_bytes -= piece.bytes;
  passage.arrives_at_s = std::max(passage.arrives_at_s, passed_s);
  if (passage.missing_bytes == 0) arrive_in_order(flow);
}

void Network::arrive_in_order(Flow& flow) {
  while (flow.oldest != kNone && passages_[flow.oldest].missing_bytes == 0) {
    const uint32_t number = flow.oldest;
    Passage& passage = passages_[number];
    flow.oldest = passage.next_newer;
    flow.arrived_at_s = std::max(flow.arrived_at_s, passage.arrives_at_s);
    plan(flow.arrived_at_s, What::kArrived, number);
  }
}

void Network::deliver(uint32_t number) {
  const Message message = passages_[number].message;
  free_passages_.push_back(number);
  const Flow& flow = flows_[message.flow];
  if (!flow.is_within_host) {
    const double ack_bytes = acknowledgements(message.bytes);
    interfaces_[flow.to].out.pass(events_.now_s(), ack_bytes);
    interfaces_[flow.from].in.pass(events_.now_s(), ack_bytes);
  }
  flow.receiver->on_message(message);
}

// --- Losses.

void Network::drop(const Piece& piece) {
  ++lost_count_;
  const Passage& passage = passages_[piece.passage];
  Flow& flow = flows_[passage.message.flow];
  const bool is_noticed = flow.to_send != kNone || flow.newest != piece.passage;
  const double answer_s = is_noticed ? 2 * config_.latency_s + config_.queue_bytes * interfaces_[flow.to].in.s_per_byte
                                     : config_.loss_timeout_s;
  flow.ready_at_s = std::max(flow.ready_at_s, piece.begin_s + answer_s);
  plan(flow.ready_at_s, What::kSendAnew, take_piece(piece));
}

void Network::send_anew(const Piece& piece) {
  Passage& passage = passages_[piece.passage];
  Flow& flow = flows_[passage.message.flow];
  passage.left_bytes += piece.bytes;
  if (!std::exchange(passage.is_to_send, true)) {
    passage.next_to_send = flow.to_send;
    if (flow.to_send == kNone) flow.last_to_send = piece.passage;
    flow.to_send = piece.passage;
  }
  give_turn(passage.message.flow);
}

}  // namespace jaxhetero::simulator
