// The network between simulated hosts. An interface sends the messages of its flows in turn, a piece of each, and
// receives in the order of arrival. Between interfaces lies one switch that is never full, or leaves and spines whose
// links are.
//
// Messages have a size and a frame's header, but no payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "xla_ffi/simulator/events.h"
#include "xla_ffi/simulator/huge_pages.h"
#include "xla_ffi/wire/frame.h"

namespace jaxhetero::simulator {

struct NetworkConfig {
  double latency_s = 0;           // one way, without the time that bytes take at interfaces
  double own_host_latency_s = 0;  // within a host, where bytes pass no interface
  // A message goes in packets. Each has so many bytes of the message at most, and so many of headers beside them.
  uint32_t packet_bytes = 1448;
  uint32_t packet_overhead_bytes = 90;
  // What goes back for a message: an acknowledgement for every so many of its bytes, at least one.
  uint32_t ack_bytes = 90;
  uint32_t bytes_per_ack = 16384;
  uint32_t piece_bytes = 65536;  // a flow sends so many before the interface's other flows have their turn
  double burst_bytes = 0;        // an interface passes so many at once after it was idle, as a token bucket does
  double flow_bytes_per_s = 0;   // the highest rate of one flow; that of the interface where it is 0
  // Beyond so many bytes a queue drops what arrives; 0: never. The sender stops its flow, and sends what was lost anew
  // after the time of a round trip, or, where nothing behind it arrives to tell of the loss, after a timeout.
  double queue_bytes = 0;
  double loss_timeout_s = 0.2;
  // Leaves and spines; 0 hosts for one switch. Every leaf has a link of this rate to every spine.
  uint32_t hosts_per_leaf = 0;
  uint32_t spine_count = 1;
  double uplink_bytes_per_s = 0;
};

struct Message {
  uint32_t flow = 0;
  uint32_t sender = 0;
  uint32_t bytes = 0;
  FrameHeader header;
};

class Receiver {
 public:
  virtual ~Receiver() = default;
  virtual void on_message(const Message& message) = 0;
};

class Network final : private EventHandler {
 public:
  // `events` outlives the network.
  Network(EventQueue& events, const NetworkConfig& config) : events_(events), config_(config) {}

  // Returns the interface's number. Hosts are numbered by the caller; their numbers decide about leaves.
  uint32_t add_interface(uint32_t host, double bytes_per_s);
  // Returns the flow's number. Messages of a flow arrive in order, and with the number of their sender. The receiver
  // outlives the network's events.
  uint32_t add_flow(uint32_t from_interface, uint32_t to_interface, Receiver& receiver, uint32_t sender);
  void send(uint32_t flow, uint32_t bytes, const FrameHeader& header);

  [[nodiscard]] uint32_t interface_count() const { return static_cast<uint32_t>(interfaces_.size()); }
  // Of an interface so far, with the headers of packets and acknowledgements.
  [[nodiscard]] double sent_bytes(uint32_t interface) const { return interfaces_[interface].out.bytes; }
  [[nodiscard]] double received_bytes(uint32_t interface) const { return interfaces_[interface].in.bytes; }
  [[nodiscard]] uint64_t lost_count() const { return lost_count_; }  // pieces

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  // What carries bytes one way, one after the other.
  struct Port {
    double s_per_byte = 0;
    double burst_s = 0;
    double free_at_s = 0;  // the time when it is free, or so long ago that a burst may pass
    double bytes = 0;

    // When bytes that come at this time have passed.
    double pass(double begin_s, double count) {
      free_at_s = (free_at_s > begin_s - burst_s ? free_at_s : begin_s - burst_s) + count * s_per_byte;
      bytes += count;
      return free_at_s > begin_s ? free_at_s : begin_s;
    }
    [[nodiscard]] double waiting_bytes(double now_s) const {
      return free_at_s > now_s ? (free_at_s - now_s) / s_per_byte : 0;
    }
  };
  struct Interface {
    uint32_t host = 0;
    Port out;
    Port in;
    bool is_sending = false;
    uint32_t first_flow = kNone;  // the first in turn of the flows that have something to send
    uint32_t last_flow = kNone;
  };
  struct Flow {
    uint32_t from = 0;
    uint32_t to = 0;
    uint32_t sender = 0;
    bool is_within_host = false;
    Receiver* receiver = nullptr;
    bool is_in_turn = false;
    uint32_t next_flow = kNone;  // the next in the interface's turn
    uint32_t to_send = kNone;    // the first message that is not completely sent
    uint32_t last_to_send = kNone;
    uint32_t oldest = kNone;  // the first message that is not planned to arrive
    uint32_t newest = kNone;
    double ready_at_s = 0;    // the time when it may send again
    double arrived_at_s = 0;  // the arrival of the last piece that is planned
  };
  struct Passage {
    Message message;
    uint32_t left_bytes = 0;     // bytes that are still to be sent
    uint32_t missing_bytes = 0;  // bytes that are still to pass the last port
    double arrives_at_s = 0;
    bool is_to_send = false;
    uint32_t next_to_send = kNone;
    uint32_t next_newer = kNone;
  };
  // A part of a message on its way through leaves and spines.
  struct Piece {
    uint32_t passage = 0;
    uint32_t bytes = 0;
    uint32_t hop = 0;
    double begin_s = 0;  // the time when its first packet is at the next port
    double end_s = 0;    // the time when its last packet is there
  };
  enum class What : uint8_t { kSent, kAtPort, kArrived, kFlowReady, kSendAnew };

  void on_event(uint64_t what) override;
  void plan(double time_s, What what, uint32_t number) {
    events_.at(time_s, *this, uint64_t{number} << 8 | static_cast<uint8_t>(what));
  }
  [[nodiscard]] double on_wire(uint32_t bytes) const;
  [[nodiscard]] double acknowledgements(uint32_t bytes) const;
  uint32_t take_passage();
  uint32_t take_piece(const Piece& piece);
  void give_turn(uint32_t flow);
  uint32_t next_in_turn(Interface& interface);
  void send_next(uint32_t interface);
  void pop_sent(Flow& flow);
  [[nodiscard]] Port* port_at(const Flow& flow, uint32_t flow_number, uint32_t hop);
  void pass_ports(Piece piece);
  void drop(const Piece& piece);
  void send_anew(const Piece& piece);
  void arrive_in_order(Flow& flow);
  void deliver(uint32_t passage);

  EventQueue& events_;
  const NetworkConfig config_;
  std::vector<Interface> interfaces_;
  std::vector<Flow, HugePages<Flow>> flows_;
  std::vector<Passage, HugePages<Passage>> passages_;
  std::vector<uint32_t> free_passages_;
  std::vector<Piece> pieces_;
  std::vector<uint32_t> free_pieces_;
  std::vector<Port> up_;    // indexed by leaf and spine
  std::vector<Port> down_;  // indexed by leaf and spine
  uint64_t lost_count_ = 0;
};

}  // namespace jaxhetero::simulator
