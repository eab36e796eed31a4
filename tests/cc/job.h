// Whole jobs in one process: communicators, reducer servers and the coordinator, with real sockets on the loopback.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cc/bytes.h"
#include "tests/cc/fabric_library.h"
#include "tests/cc/printing.h"
#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/membership/coordinator_server.h"
#include "xla_ffi/reducer/server.h"
#include "xla_ffi/sum/convert.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/transport/tcp_connection.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/op_spec.h"
#include "xla_ffi/worker/communicator.h"

namespace jaxhetero {

using std::chrono::milliseconds;

inline constexpr milliseconds kPatience{30000};  // of a test; nothing should take that long
inline constexpr milliseconds kShort{1500};      // a timeout that a test waits for

inline bool has(const std::string& text, std::string_view word) { return text.find(word) != std::string::npos; }

// The codes and messages of failures, as a test wants them.
inline testing::AssertionResult failed_with(const Status& status, Code code, const std::vector<std::string>& words) {
  if (status.code() != code) {
    return testing::AssertionFailure() << exception_name(status.code()) << ": " << status.message();
  }
  for (const std::string& word : words) {
    if (!has(status.message(), word)) {
      return testing::AssertionFailure() << "'" << word << "' is not in '" << status.message() << "'";
    }
  }
  return testing::AssertionSuccess();
}

// Whether workers code what they push, in every test that does not say. Then floats are such that have shorter codes.
inline bool usually_codes() { return std::getenv("JAXHETERO_TEST_COMPRESS") != nullptr; }

// Random bits, as floats of this type whose exponents are close together and whose lower bits are zero, like gradients.
[[gnu::no_sanitize("thread")]] inline void make_like_gradients(DType dtype, Bytes& bytes) {
  const size_t item = item_bytes(dtype);
  if (dtype != DType::kF32 && dtype != DType::kBF16) return;
  for (size_t i = 0; i + item <= bytes.size(); i += item) {
    std::byte* const upper = bytes.data() + i + item - 2;
    upper[0] &= std::byte{0x7f};
    upper[1] = (upper[1] & std::byte{0x80}) | std::byte{0x3a};
    if (dtype == DType::kF32) bytes[i] = bytes[i + 1] = std::byte{0};
  }
}

// --- Rounds.

// What all workers, or those of a group, reduce or broadcast in one round.
struct TestRound {
  uint64_t op = 1;
  Kind kind = Kind::kSum;
  DType dtype = DType::kF32;
  std::vector<size_t> leaf_counts = {1000};  // of a scatter or a gather: in one row
  uint32_t root = 0;
  uint32_t seed = 0;
  uint64_t call_bytes = 0;
  bool in_place = false;  // the results take the operands' memory, as XLA may have it
  bool converts = false;  // the program has float32, and `dtype` is that of the wire
  bool like_gradients = usually_codes();
  uint32_t rows = 1;                 // of a scatter or a gather: the number of workers that take part
  std::vector<uint32_t> group = {};  // as in OpSpec

  [[nodiscard]] OpSpec spec() const {
    uint64_t count = 0;
    for (size_t leaf : leaf_counts) count += leaf;
    OpSpec spec{kind, dtype, root, static_cast<uint32_t>(leaf_counts.size()), rows * count, 0, call_bytes};
    spec.group = group;
    return spec;
  }
  // The ranks that take part.
  [[nodiscard]] std::vector<uint32_t> members(uint32_t worker_count) const {
    if (!group.empty()) return group;
    std::vector<uint32_t> all(worker_count);
    std::iota(all.begin(), all.end(), 0u);
    return all;
  }
  [[nodiscard]] uint32_t input_rows() const { return kind == Kind::kGather ? 1 : rows; }
  [[nodiscard]] uint32_t output_rows() const { return kind == Kind::kScatter ? 1 : rows; }
  [[nodiscard]] DType program_dtype() const { return converts ? DType::kF32 : dtype; }
  [[nodiscard]] size_t bytes() const { return spec().total_count * item_bytes(program_dtype()); }
  [[nodiscard]] Bytes input(uint32_t rank) const {
    Bytes bytes = pattern(this->bytes() / rows * input_rows(), seed * 4096 + rank);
    if (like_gradients) make_like_gradients(program_dtype(), bytes);
    return bytes;
  }
  [[nodiscard]] Bytes wire_input(uint32_t rank) const {
    Bytes wide = input(rank);
    if (!converts) return wide;
    Bytes bytes(wide.size() / 2);
    narrow(dtype, {reinterpret_cast<const float*>(wide.data()), wide.size() / sizeof(float)}, bytes.data());
    return bytes;
  }
  [[nodiscard]] bool is_same_for_all() const { return kind != Kind::kScatter; }  // its output
  [[nodiscard]] Bytes output(uint32_t worker_count, uint32_t rank = 0) const {
    if (kind == Kind::kBroadcast) return input(root);
    if (kind == Kind::kGather) return gathered(worker_count);
    const Bytes sum = total(worker_count);
    if (kind != Kind::kScatter) return sum;
    const auto row = std::span(sum).subspan(spec().place_of(rank) * sum.size() / rows, sum.size() / rows);
    return {row.begin(), row.end()};
  }

 private:
  [[nodiscard]] Bytes gathered(uint32_t worker_count) const {
    Bytes all;
    for (const uint32_t rank : members(worker_count)) {
      const Bytes row = input(rank);
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }
  [[nodiscard]] Bytes total(uint32_t worker_count) const {
    std::vector<Bytes> inputs;
    std::vector<const std::byte*> pieces;
    for (const uint32_t rank : members(worker_count)) inputs.push_back(wire_input(rank));
    for (const Bytes& bytes : inputs) pieces.push_back(bytes.data());
    Bytes total(bytes());
    const Arithmetic arithmetic = kind == Kind::kMax   ? Arithmetic::kMax
                                  : kind == Kind::kMin ? Arithmetic::kMin
                                                       : Arithmetic::kSum;
    std::byte* const sums = total.data() + (converts ? total.size() / 2 : 0);
    reduce_in_order(arithmetic, dtype, pieces, sums, spec().total_count);
    if (converts) widen_in_place(dtype, total);
    return total;
  }
};

// Memory of a bucket as a program has it. Each leaf is by itself, so that a sanitizer sees where one ends.
class BucketMemory {
 public:
  BucketMemory(const TestRound& round, uint32_t rows) {
    const size_t item = item_bytes(round.program_dtype());
    for (size_t count : round.leaf_counts) memory_.emplace_back(rows * count * item, std::byte{0xee});
    for (uint32_t row = 0; row < rows; ++row) {
      for (Bytes& leaf : memory_) leaves_.append(leaf.data() + row * leaf.size() / rows, leaf.size() / rows);
    }
  }

  [[nodiscard]] const Leaves& leaves() const { return leaves_; }
  void fill(Bytes flat) const { copy(leaves_of(flat), 0, leaves_, 0, flat.size()); }
  [[nodiscard]] Bytes contents() const {
    Bytes flat(leaves_.bytes());
    copy(leaves_, 0, leaves_of(flat), 0, flat.size());
    return flat;
  }

 private:
  static Leaves leaves_of(Bytes& flat) {
    Leaves leaves;
    leaves.append(flat.data(), flat.size());
    return leaves;
  }

  std::vector<Bytes> memory_;
  Leaves leaves_;
};

// One worker's part in a round. Its memory lives as long as the round, which may outlive the part.
class Part {
 public:
  Part(Communicator& communicator, const TestRound& round, uint32_t rank)
      : inputs_(std::make_shared<BucketMemory>(round, round.input_rows())),
        outputs_(round.in_place ? inputs_ : std::make_shared<BucketMemory>(round, round.output_rows())) {
    inputs_->fill(round.input(rank));
    RoundRequest request;
    request.op = round.op;
    request.description = "test op " + std::to_string(round.op);
    request.spec = round.spec();
    request.narrows = request.widens = round.converts;
    request.inputs = inputs_->leaves();
    request.outputs = outputs_->leaves();
    request.done = [done = done_, inputs = inputs_, outputs = outputs_](const Status& status) {
      done->set_value(status);
    };
    communicator.start_round(std::move(request));
  }
  Part(Part&&) = default;

  Status wait() {
    if (status_.wait_for(kPatience) == std::future_status::ready) return status_.get();
    return {Code::kInternal, "the test waited in vain"};
  }
  [[nodiscard]] bool is_done() const { return status_.wait_for(milliseconds(0)) == std::future_status::ready; }
  [[nodiscard]] bool has(const Bytes& output) const { return are_same(outputs_->contents(), output); }

 private:
  std::shared_ptr<BucketMemory> inputs_;
  std::shared_ptr<BucketMemory> outputs_;
  std::shared_ptr<std::promise<Status>> done_ = std::make_shared<std::promise<Status>>();
  std::future<Status> status_ = done_->get_future();
};

// --- Jobs.

// How many strands each process of a job has, if a test does not say. Half of the tests have two: nothing that a test
// promises may depend on it. JAXHETERO_TEST_STRANDS gives all the same.
inline uint32_t usual_strands() {
  if (const char* const text = std::getenv("JAXHETERO_TEST_STRANDS"); text != nullptr) {
    return static_cast<uint32_t>(std::stoul(text));
  }
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
  uint32_t sum = 0;  // the same in every run
  for (const char letter : name) sum = 31 * sum + static_cast<unsigned char>(letter);
  return 1 + sum / 7 % 2;
}

// JAXHETERO_TEST_FABRIC gives all jobs a fabric of this provider.
inline std::string usual_fabric() {
  if (std::getenv("JAXHETERO_TEST_FABRIC") == nullptr) return "off";
  test_fabric_library();
  return test_provider();
}

struct Shape {
  uint32_t workers = 2;
  uint32_t reducers = 2;   // dedicated; 0: one in each of several workers
  uint32_t colocated = 0;  // as well, in the first ranks
  uint32_t chunk_bytes = 1024;
  uint32_t window_chunks = 3;
  bool checksums = false;
  milliseconds start_timeout = kPatience;
  milliseconds timeout = kPatience;
  bool failover = false;
  bool measure_rates = false;
  bool shared_memory = false;
  Compress compress = usually_codes() ? Compress::kAlways : Compress::kNever;
  std::string fabric = usual_fabric();  // see FabricChoice; it counts where memory is not shared
  uint32_t strands = 0;                 // of every process; 0: usual_strands()
  uint32_t least = 0;                   // the fewest workers of an elastic job; 0: it is not elastic
  milliseconds lost_after = kPatience;
};

class Job {
 public:
  explicit Job(const Shape& shape) : shape_(shape), strands_(shape.strands > 0 ? shape.strands : usual_strands()) {
    // Bound but not listening, so nobody else gets the port, and the coordinator does.
    const TcpAddress any = *resolve("127.0.0.1", 0);
    const int on = 1;
    setsockopt(port_holder_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    EXPECT_EQ(::bind(port_holder_.get(), reinterpret_cast<const sockaddr*>(&any.storage), any.length), 0);
    address_.length = sizeof address_.storage;
    getsockname(port_holder_.get(), reinterpret_cast<sockaddr*>(&address_.storage), &address_.length);
  }

  [[nodiscard]] CommunicatorConfig worker_config(uint32_t rank) const {
    CommunicatorConfig config;
    config.rank = rank;
    config.job = {shape_.workers,       shape_.reducers,  colocated_count(), shape_.chunk_bytes,
                  shape_.window_chunks, shape_.checksums, shape_.failover,   shape_.measure_rates};
    if (shape_.least > 0) {
      config.job.least_worker_count = shape_.least;
      config.job.first_worker_count = shape_.workers;
    }
    config.most_strands = strands_;
    config.shared_memory = shape_.shared_memory;
    config.compress = shape_.compress;
    config.fabric = shape_.fabric;
    config.coordinator = address_.text();
    config.token = bytes_of("secret");
    config.host_name = "host-" + std::to_string(rank);
    config.version = "1.0";
    config.start_timeout = shape_.start_timeout;
    config.timeout = shape_.timeout;
    return config;
  }
  [[nodiscard]] ReducerServerConfig reducer_config(uint32_t index) const {
    ReducerServerConfig config;
    config.coordinator = address_.text();
    config.token = bytes_of("secret");
    config.most_strands = strands_;
    config.colocated_rank = index < shape_.reducers ? -1 : static_cast<int32_t>(index - shape_.reducers);
    config.host_name = "reducer-host-" + std::to_string(index);
    config.version = "1.0";
    config.start_timeout = shape_.start_timeout;
    config.timeout = shape_.timeout;
    return config;
  }

  // Of an elastic job.
  CoordinatorServer& start_coordinator() {
    coordinator.reset();
    coordinator = std::make_unique<CoordinatorServer>(CoordinatorServerConfig{
        address_.text(), bytes_of("secret"), "1.0", shape_.start_timeout, shape_.lost_after, milliseconds(0), ""});
    const Status status = coordinator->start();
    EXPECT_TRUE(status.ok()) << status.message();
    return *coordinator;
  }

  // In its place in `workers`; the others are left out.
  Communicator& add_worker(CommunicatorConfig config) {
    const uint32_t rank = config.rank;
    workers.resize(std::max<size_t>(workers.size(), rank + 1));
    workers[rank] = std::make_unique<Communicator>(std::move(config));
    const Status status = workers[rank]->start();
    EXPECT_TRUE(status.ok()) << status.message();
    return *workers[rank];
  }
  Communicator& add_worker(uint32_t rank) { return add_worker(worker_config(rank)); }
  ReducerServer& add_reducer(ReducerServerConfig config) {
    reducers.push_back(std::make_unique<ReducerServer>(std::move(config)));
    const Status status = reducers.back()->start();
    EXPECT_TRUE(status.ok()) << status.message();
    return *reducers.back();
  }
  void add_reducers(uint32_t count) {
    for (uint32_t index = 0; index < count; ++index) add_reducer(reducer_config(index));
  }
  [[nodiscard]] uint32_t colocated_count() const {
    const bool alone = shape_.reducers == 0 && shape_.workers > 1;
    return alone ? shape_.workers : shape_.colocated;
  }
  [[nodiscard]] uint32_t reducer_count() const { return shape_.reducers + colocated_count(); }

  // Everybody, in the order that is the hardest: rank 0, who listens, last.
  void start() {
    if (shape_.least > 0) start_coordinator();
    add_reducers(reducer_count());
    for (uint32_t rank = shape_.workers; rank > 0; --rank) add_worker(rank - 1);
    for (const auto& worker : workers) {
      const Status ready = wait_ready(*worker);
      ASSERT_TRUE(ready.ok()) << ready.message();
    }
  }

  static Status wait_ready(Communicator& worker) {
    return worker.wait_ready(kPatience).value_or(Status(Code::kInternal, "the test waited in vain"));
  }
  // A worker is ready when it has said that it joins; this is over when the reducer has read that.
  static void wait_joined(const ReducerServer& reducer, uint32_t worker_count) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (reducer.metrics().joined_count < worker_count) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  static Status wait_end(ReducerServer& reducer) {
    return reducer.wait(kPatience).value_or(Status(Code::kInternal, "the test waited in vain"));
  }

  std::vector<Part> begin(const TestRound& round) {
    std::vector<Part> parts;
    for (const uint32_t rank : round.members(shape_.workers)) parts.emplace_back(*workers[rank], round, rank);
    return parts;
  }
  void expect_done(const TestRound& round, std::vector<Part>& parts) const {
    Bytes output;
    for (uint32_t place = 0; place < parts.size(); ++place) {
      const uint32_t rank = round.spec().rank_at(place);
      const Status status = parts[place].wait();
      ASSERT_TRUE(status.ok()) << "rank " << rank << ": " << status.message();
      if (place == 0 || !round.is_same_for_all()) output = round.output(shape_.workers, rank);
      ASSERT_TRUE(parts[place].has(output)) << "rank " << rank;
    }
  }
  void expect_works(const TestRound& round = {}) {
    std::vector<Part> parts = begin(round);
    expect_done(round, parts);
  }

  void expect_shutdown() {
    for (const auto& worker : workers) {
      const Status status = worker->shutdown(kPatience);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    for (const auto& reducer : reducers) {
      const Status status = wait_end(*reducer);
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }

  [[nodiscard]] const TcpAddress& address() const { return address_; }
  [[nodiscard]] uint32_t strands() const { return strands_; }

  std::unique_ptr<CoordinatorServer> coordinator;  // of an elastic job
  std::vector<std::unique_ptr<ReducerServer>> reducers;
  std::vector<std::unique_ptr<Communicator>> workers;  // by rank

 private:
  const Shape shape_;
  const uint32_t strands_;
  Fd port_holder_{::socket(AF_INET, SOCK_STREAM, 0)};
  TcpAddress address_;
};

}  // namespace jaxhetero
