// Any algorithm, as a list of transfers that wait for each other: rings, trees and what else moves bytes in a fixed
// order between hosts.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "xla_ffi/base/status.h"
#include "xla_ffi/simulator/events.h"
#include "xla_ffi/simulator/job.h"
#include "xla_ffi/simulator/network.h"
#include "xla_ffi/simulator/processor.h"

namespace jaxhetero::simulator {

struct Transfer {
  uint32_t from = 0;  // hosts
  uint32_t to = 0;
  uint32_t bytes = 0;
  double ready_s = 0;           // the earliest time of its start
  std::vector<uint32_t> after;  // earlier transfers of the list, which have to arrive before it starts
};

class Transfers final : private EventHandler {
 public:
  // Every host is one strand of such costs, on one interface.
  Transfers(const Cluster& cluster, const Costs& costs, std::vector<Transfer> transfers);
  ~Transfers() override;
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // Runs so many events at most. Returns whether all have arrived.
  Result<bool> run(uint64_t most_events);
  [[nodiscard]] const std::vector<double>& ends_s() const { return ends_s_; }  // indexed by transfer
  [[nodiscard]] std::vector<double> sent_bytes() const;                        // indexed by host
  [[nodiscard]] uint64_t event_count() const { return events_.past_count(); }

 private:
  class Host;

  void on_event(uint64_t what) override;
  void start(uint32_t transfer);
  void finish(uint32_t transfer);

  const Cluster cluster_;
  EventQueue events_;
  Network network_;
  std::vector<std::unique_ptr<Processor>> processors_;
  std::vector<std::unique_ptr<Host>> hosts_;
  const std::vector<Transfer> transfers_;
  std::vector<std::vector<uint32_t>> followers_;  // indexed by transfer
  std::vector<size_t> waits_for_;                 // how much each waits for: other transfers, and its time
  std::vector<double> ends_s_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> flows_;  // keyed by sender and receiver
  size_t ended_count_ = 0;
};

}  // namespace jaxhetero::simulator
