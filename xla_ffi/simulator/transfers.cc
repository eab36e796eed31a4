#include "xla_ffi/simulator/transfers.h"

#include <string>

namespace jaxhetero::simulator {

class Transfers::Host final : public Strand {
 public:
  Host(Transfers& transfers, Processor& processor, const Costs& costs)
      : Strand(processor, costs), transfers_(transfers) {}
  using Strand::charge_send;

 private:
  void handle(const Message& message) override { transfers_.finish(static_cast<uint32_t>(message.header.op)); }

  Transfers& transfers_;
};

Transfers::Transfers(const Cluster& cluster, const Costs& costs, std::vector<Transfer> transfers)
    : cluster_(cluster), network_(events_, cluster_.network), transfers_(std::move(transfers)) {
  for (const ProcessorConfig& processor : cluster_.processors) {
    processors_.push_back(std::make_unique<Processor>(events_, processor.core_count, processor.memory_bytes_per_s));
  }
  for (uint32_t host = 0; host < cluster_.hosts.size(); ++host) {
    network_.add_interface(host, cluster_.hosts[host].interfaces[0]);
    hosts_.push_back(std::make_unique<Host>(*this, *processors_[cluster_.hosts[host].processor], costs));
  }
  followers_.resize(transfers_.size());
  ends_s_.resize(transfers_.size());
  for (uint32_t i = 0; i < transfers_.size(); ++i) {
    waits_for_.push_back(transfers_[i].after.size() + 1);
    for (const uint32_t earlier : transfers_[i].after) followers_[earlier].push_back(i);
    events_.at(transfers_[i].ready_s, *this, i);
  }
}

Transfers::~Transfers() = default;

void Transfers::on_event(uint64_t what) {
  if (--waits_for_[what] == 0) start(static_cast<uint32_t>(what));
}

void Transfers::start(uint32_t number) {
  const Transfer& transfer = transfers_[number];
  const auto [flow, is_new] = flows_.try_emplace({transfer.from, transfer.to});
  if (is_new) flow->second = network_.add_flow(transfer.from, transfer.to, *hosts_[transfer.to], transfer.from);
  FrameHeader header;
  header.op = number;
  network_.send(flow->second, transfer.bytes, header);
  hosts_[transfer.from]->charge_send(transfer.bytes);
}

void Transfers::finish(uint32_t number) {
  ends_s_[number] = events_.now_s();
  ++ended_count_;
  for (const uint32_t follower : followers_[number]) {
    if (--waits_for_[follower] == 0) start(follower);
  }
}

Result<bool> Transfers::run(uint64_t most_events) {
  for (uint64_t i = 0; i < most_events; ++i) {
    if (events_.step()) continue;
    if (ended_count_ == transfers_.size()) return true;
    return Status(Code::kInternal, "the simulated transfers stand still after " + std::to_string(ended_count_) +
                                       " of " + std::to_string(transfers_.size()));
  }
  return false;
}

std::vector<double> Transfers::sent_bytes() const {
  std::vector<double> bytes;
  for (uint32_t i = 0; i < network_.interface_count(); ++i) bytes.push_back(network_.sent_bytes(i));
  return bytes;
}

}  // namespace jaxhetero::simulator
