#include "xla_ffi/simulator/processor.h"

#include <algorithm>
#include <utility>

namespace jaxhetero::simulator {

uint32_t Processor::add(Strand& strand) {
  strands_.push_back(&strand);
  return static_cast<uint32_t>(strands_.size() - 1);
}

void Processor::enqueue(Strand& strand) {
  if (std::exchange(strand.is_queued_, true)) return;
  strand.owed_s_ += strand.costs_.wake_up_s;
  ready_.push_back(&strand);
  run_next();
}

void Processor::run_next() {
  while (idle_cores_ > 0 && !ready_.empty()) {
    Strand& strand = *ready_.front();
    ready_.pop_front();
    --idle_cores_;
    run(strand);
  }
}

void Processor::run(Strand& strand) {
  double work_s = std::exchange(strand.owed_s_, 0);
  uint64_t bytes = std::exchange(strand.owed_bytes_, 0);
  strand.has_message_ = !strand.inbox_.empty();
  if (strand.has_message_) {
    const Message& message = strand.inbox_.front();
    work_s += message.flow == Strand::kCall ? strand.costs_.s_per_call
                                            : strand.costs_.s_per_message + message.bytes * strand.costs_.s_per_byte;
    bytes += message.bytes;
  }
  double end_s = events_.now_s() + work_s;
  if (memory_bytes_per_s_ > 0) {
    memory_free_at_s_ = std::max(memory_free_at_s_, events_.now_s()) + static_cast<double>(bytes) / memory_bytes_per_s_;
    end_s = std::max(end_s, memory_free_at_s_);
  }
  strand.busy_s_ += end_s - events_.now_s();
  events_.at(end_s, *this, strand.number_);
}

void Processor::on_event(uint64_t what) {
  Strand& strand = *strands_[what];
  if (strand.has_message_) {
    const Message message = strand.inbox_.front();
    strand.inbox_.pop_front();
    strand.handle(message);
  }
  ++idle_cores_;
  if (strand.inbox_.empty() && strand.owed_s_ == 0) {
    strand.is_queued_ = false;
  } else {
    ready_.push_back(&strand);
  }
  run_next();
}

void Strand::on_message(const Message& message) {
  inbox_.push_back(message);
  processor_.enqueue(*this);
}

void Strand::charge_send(uint32_t bytes) {
  owed_s_ += costs_.s_per_message + bytes * costs_.s_per_byte;
  owed_bytes_ += bytes;
  if (owed_s_ > 0) processor_.enqueue(*this);
}

}  // namespace jaxhetero::simulator
