// Reducers behind a line protocol, for test_reducer_model.py. One command a line on standard input; for each, the
// frames that the reducer sends and then a line that says how it went. REDUCER is any number; `new` takes the place of
// what had it.
//
//   new REDUCER WORKERS CHUNK WINDOW                           for chunks of so many int64
//   describe REDUCER RANK OP ROUND KIND TOTAL RANK...          of an op of these ranks from a round on; none: all
//   begin REDUCER RANK OP ROUND OFFSET COUNT LAST PUSHED       the header of a push with a payload of so many
//   commit REDUCER RANK VALUE...                               its payload
//   leave REDUCER RANK / lose REDUCER RANK                     in order, or not
//
//   -> result RANK OP ROUND OFFSET LAST COUNT VALUE... / fault RANK TEXT
//   -> ok / error TEXT
#include <algorithm>
#include <cstring>
#include <iostream>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/reducer/state_machine.h"

namespace jaxhetero {
namespace {

template <typename Number>
Number next(std::istringstream& words) {
  Number number = 0;
  words >> number;
  return number;
}

ReducerStateMachine::Job job_of(std::istringstream& words) {
  ReducerStateMachine::Job job;
  job.shape.worker_count = next<uint32_t>(words);
  for (uint32_t rank = 0; rank < job.shape.worker_count; ++rank) {
    job.worker_hosts.push_back("host-" + std::to_string(rank));
  }
  job.shape.reducer_count = 1;
  job.shape.chunk_bytes = next<uint32_t>(words) * static_cast<uint32_t>(sizeof(int64_t));
  job.shape.window_chunks = next<uint32_t>(words);
  return job;
}

struct Push {
  FrameHeader header;
  std::span<std::byte> memory;
};

class Machine {
 public:
  explicit Machine(ReducerStateMachine::Job job) : reducer_(std::move(job)) {}

  Status run(const std::string& command, std::istringstream& words) {
    const auto rank = next<uint32_t>(words);
    if (command == "describe") return describe(rank, words);
    if (command == "begin") return begin(rank, words);
    if (command == "commit") return commit(rank, words);
    const bool in_order = command == "leave";
    reducer_.leave(rank, in_order ? Status() : Status(Code::kInternal, "it closed the connection"), outgoing_);
    return {};
  }

  void print_outgoing() {
    for (const Outgoing& frame : outgoing_) {
      const FrameHeader& header = frame.header;
      if (header.type == FrameType::kFault) {
        std::cout << "fault " << frame.rank << " " << decode_fault(frame.payload).message() << "\n";
        continue;
      }
      std::cout << "result " << frame.rank << " " << header.op << " " << header.round << " " << header.offset << " "
                << header.last << " " << header.count;
      for (size_t at = 0; at < frame.payload.size(); at += sizeof(int64_t)) {
        int64_t value = 0;
        std::memcpy(&value, frame.payload.data() + at, sizeof value);
        std::cout << " " << value;
      }
      std::cout << "\n";
    }
    outgoing_.clear();
  }

 private:
  Status describe(uint32_t rank, std::istringstream& words) {
    FrameHeader header;
    header.op = next<uint64_t>(words);
    header.round = next<uint64_t>(words);
    OpSpec spec{static_cast<Kind>(next<int>(words)), DType::kI64, 0, 1, 0, 0};
    spec.total_count = next<uint64_t>(words);
    for (uint32_t member = 0; words >> member;) spec.group.push_back(member);
    return reducer_.describe_op(rank, header, {spec, "op"}, outgoing_);
  }

  Status begin(uint32_t rank, std::istringstream& words) {
    FrameHeader header;
    header.type = FrameType::kPush;
    header.op = next<uint64_t>(words);
    header.round = next<uint64_t>(words);
    header.offset = next<uint64_t>(words);
    header.count = next<uint32_t>(words);
    header.last = next<int>(words) != 0;
    header.payload_bytes = next<uint32_t>(words) * static_cast<uint32_t>(sizeof(int64_t));
    Result<std::span<std::byte>> memory = reducer_.start_push(rank, header, 0, outgoing_);
    if (!memory.ok()) return memory.status();
    pushes_[rank] = {header, *memory};
    return {};
  }

  Status commit(uint32_t rank, std::istringstream& words) {
    const Push push = pushes_.at(rank);
    pushes_.erase(rank);
    for (size_t at = 0; reducer_.fault().ok() && at < push.memory.size(); at += sizeof(int64_t)) {
      const auto value = next<int64_t>(words);
      std::memcpy(push.memory.data() + at, &value, sizeof value);
    }
    return reducer_.finish_push(rank, push.header, 0, outgoing_);
  }

  ReducerStateMachine reducer_;
  std::map<uint32_t, Push> pushes_;  // begun, by rank
  std::vector<Outgoing> outgoing_;
};

}  // namespace
}  // namespace jaxhetero

int main() {
  std::map<uint32_t, jaxhetero::Machine> machines;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    uint32_t reducer = 0;
    words >> command >> reducer;
    jaxhetero::Status status;
    if (command == "new") {
      machines.erase(reducer);
      machines.try_emplace(reducer, jaxhetero::job_of(words));
    } else {
      status = machines.at(reducer).run(command, words);
      machines.at(reducer).print_outgoing();
    }
    std::cout << (status.ok() ? "ok" : "error " + status.message()) << std::endl;
  }
}
