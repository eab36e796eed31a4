#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lab/fake_cuda/fake_cuda.h"
#include "tests/cc/job.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/cuda/driver.h"
#include "xla_ffi/cuda/lane.h"
#include "xla_ffi/cuda/pinned_pool.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

// The library that the test is linked to.
std::shared_ptr<const CudaDriver> fake_driver() {
  Result<std::shared_ptr<const CudaDriver>> driver = CudaDriver::open("libfake_cuda.so");
  EXPECT_TRUE(driver.ok()) << driver.status().message();
  return *driver;
}

CudaContext fake_context() {
  CudaContext context = nullptr;
  EXPECT_EQ(fake_driver()->primary_context(&context, 0), kCudaSuccess);
  return context;
}

// The operands and the results of a round in the memory of a GPU, each leaf by itself.
class DeviceBucket {
 public:
  DeviceBucket(const TestRound& round, uint32_t rank) : contents_(round.input(rank)) {
    operands_ = allocate(round, round.input_rows());
    results_ = allocate(round, round.output_rows());
  }
  ~DeviceBucket() {
    for (const uint64_t memory : memory_) fake_cuda_free(memory);
  }
  DeviceBucket(const DeviceBucket&) = delete;
  DeviceBucket& operator=(const DeviceBucket&) = delete;

  [[nodiscard]] const Leaves& operands() const { return operands_; }
  [[nodiscard]] const Leaves& results() const { return results_; }

  // What the program computes on a stream: the operands, and what it finds as results.
  void write_operands(void* stream) { on_each_piece(stream, operands_, /*writes=*/true); }
  void read_results(void* stream) {
    found_.resize(results_.bytes());
    on_each_piece(stream, results_, /*writes=*/false);
  }
  [[nodiscard]] const Bytes& contents() const { return found_; }

 private:
  Leaves allocate(const TestRound& round, uint32_t rows) {
    Leaves leaves;
    std::vector<iovec> buffers;
    for (size_t count : round.leaf_counts) {
      const size_t row_bytes = count * item_bytes(round.dtype);
      memory_.push_back(fake_cuda_alloc(rows * row_bytes));
      buffers.push_back({reinterpret_cast<void*>(memory_.back()), row_bytes});
    }
    for (uint32_t row = 0; row < rows; ++row) {
      for (const iovec& buffer : buffers) {
        leaves.append(static_cast<std::byte*>(buffer.iov_base) + row * buffer.iov_len, buffer.iov_len);
      }
    }
    return leaves;
  }
  struct Move {
    void* to;
    const void* from;
    size_t bytes;
  };
  static void run(void* data) {
    const std::unique_ptr<Move> move(static_cast<Move*>(data));
    std::memcpy(move->to, move->from, move->bytes);
  }
  static std::vector<iovec> pieces_of(const Leaves& leaves) {
    std::vector<iovec> pieces;
    leaves.slice(0, leaves.bytes(), pieces);
    return pieces;
  }
  void on_each_piece(void* stream, const Leaves& leaves, bool writes) {
    std::byte* host = (writes ? contents_ : found_).data();
    for (const iovec& piece : pieces_of(leaves)) {
      auto move = writes ? std::make_unique<Move>(piece.iov_base, host, piece.iov_len)
                         : std::make_unique<Move>(host, piece.iov_base, piece.iov_len);
      fake_cuda_compute(stream, reinterpret_cast<uint64_t>(piece.iov_base), piece.iov_len, writes, &run,
                        move.release());
      host += piece.iov_len;
    }
  }

  std::vector<uint64_t> memory_;
  Leaves operands_;
  Leaves results_;
  Bytes contents_;
  Bytes found_;
};

// A worker whose arrays are on a GPU. As in XLA, each bucket of a program is reduced on a stream of its own.
struct Gpu {
  Gpu(Job& job, uint32_t rank, CudaLaneConfig config) : rank(rank) {
    config.rank = rank;
    // Jobs own their communicators.
    const std::shared_ptr<Communicator> communicator(std::shared_ptr<void>(), job.workers[rank].get());
    Result<std::unique_ptr<CudaLane>> made = CudaLane::create(fake_driver(), fake_context(), communicator, config);
    EXPECT_TRUE(made.ok()) << made.status().message();
    lane = std::move(*made);
  }

  void* stream(size_t index) {
    while (streams.size() <= index) streams.push_back(fake_cuda_stream());
    return streams[index];
  }

  Status reduce(const TestRound& round, const DeviceBucket& bucket, size_t index = 0, CudaAside aside = {}) {
    RoundRequest request;
    request.op = round.op;
    request.description = "test op " + std::to_string(round.op);
    request.spec = round.spec();
    return lane->reduce(static_cast<CudaStream>(stream(index)), std::move(request), bucket.operands(), bucket.results(),
                        std::move(aside));
  }
  // Whether all streams ran dry.
  [[nodiscard]] bool wait() const {
    return std::ranges::all_of(streams, [](void* stream) { return fake_cuda_wait(stream, kPatience.count()); });
  }

  uint32_t rank;
  std::vector<void*> streams;
  std::unique_ptr<CudaLane> lane;
};

CudaLaneConfig small_lane() {
  CudaLaneConfig config;
  config.pinned_bytes = size_t{1} << 20;
  config.slice_bytes = 10'000;
  config.timeout = kPatience;
  return config;
}

class CudaLaneTest : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda_reset();
    fake_cuda_set_speed(2e9, 20);
  }
  void TearDown() override {
    gpus.clear();
    EXPECT_STREQ(fake_cuda_violations(), "");
  }

  void start(Job& job, const CudaLaneConfig& config = small_lane()) {
    job.start();
    for (uint32_t rank = 0; rank < job.workers.size(); ++rank) gpus.emplace_back(job, rank, config);
  }

  // A program that reduces all of `rounds` at once, launched without a wait.
  void run(const std::vector<TestRound>& rounds) {
    std::vector<std::vector<std::unique_ptr<DeviceBucket>>> buckets(gpus.size());
    for (Gpu& gpu : gpus) {
      for (size_t index = 0; index < rounds.size(); ++index) {
        DeviceBucket& bucket = *buckets[gpu.rank].emplace_back(std::make_unique<DeviceBucket>(rounds[index], gpu.rank));
        bucket.write_operands(gpu.stream(index));
        ASSERT_TRUE(gpu.reduce(rounds[index], bucket, index).ok());
        bucket.read_results(gpu.stream(index));
      }
    }
    for (const Gpu& gpu : gpus) ASSERT_TRUE(gpu.wait());
    for (size_t index = 0; index < rounds.size(); ++index) {
      for (const Gpu& gpu : gpus) {
        const Bytes expected = rounds[index].output(static_cast<uint32_t>(gpus.size()), gpu.rank);
        ASSERT_TRUE(buckets[gpu.rank][index]->contents() == expected) << "round " << index << ", rank " << gpu.rank;
      }
    }
    for (const Gpu& gpu : gpus) EXPECT_TRUE(gpu.lane->drain(kPatience));
  }

  std::vector<Gpu> gpus;
};

std::vector<TestRound> mixed_rounds() {
  std::vector<TestRound> rounds;
  uint64_t op = 0;
  for (const std::vector<size_t>& leaves :
       {std::vector<size_t>{1}, {0}, {1000}, {3, 0, 5000, 1}, {2500}, {20'000, 7}, {1, 1, 1, 1, 1, 1, 1, 1}}) {
    rounds.push_back({.op = ++op, .dtype = op % 2 == 0 ? DType::kI32 : DType::kF32, .leaf_counts = leaves});
    rounds.back().seed = static_cast<uint32_t>(op);
  }
  return rounds;
}

TEST_F(CudaLaneTest, SumsBucketsOfManyShapesInFlightTogether) {
  for (const auto& [workers, reducers] : {std::pair<uint32_t, uint32_t>{1, 1}, {2, 1}, {3, 2}, {2, 0}}) {
    Job job({.workers = workers, .reducers = reducers});
    start(job);
    run(mixed_rounds());
    gpus.clear();
  }
  EXPECT_EQ(fake_cuda_call_count("cuMemsetD8Async"), 0);  // which would be a kernel
}

TEST_F(CudaLaneTest, RunsManyRoundsOfTheSameOps) {
  Job job({.workers = 2, .reducers = 2});
  start(job);
  for (int step = 0; step < 20; ++step) run(mixed_rounds());
  for (const Gpu& gpu : gpus) EXPECT_EQ(gpu.lane->pool().used_bytes(), 0U);
  // Once for each lane's data and once for its flags: never again, since that waits for the whole GPU.
  EXPECT_EQ(fake_cuda_call_count("cuMemHostAlloc"), 4);
}

TEST_F(CudaLaneTest, RoundsQueueForPinnedMemory) {
  Job job({.workers = 2, .reducers = 1});
  CudaLaneConfig config = small_lane();
  config.pinned_bytes = 2 * PinnedPool::rounded(80'028);
  start(job, config);
  for (int step = 0; step < 10; ++step) run(mixed_rounds());
}

TEST_F(CudaLaneTest, ABucketThatThePoolCannotHoldIsRefused) {
  Job job({.workers = 1, .reducers = 1});
  CudaLaneConfig config = small_lane();
  config.pinned_bytes = 8192;
  start(job, config);
  const TestRound round{.leaf_counts = {4097}};
  const DeviceBucket bucket(round, 0);
  EXPECT_TRUE(failed_with(gpus[0].reduce(round, bucket), Code::kInvalidArgument,
                          {"test op 1 needs 40960 bytes", "has 8192", "JAXHETERO_PINNED_BYTES"}));
  run({{.leaf_counts = {500}}});
}

// A round that also brings small values along, which come back with a mark.
class WithAside {
 public:
  WithAside(const TestRound& round, const TestRound& values, Gpu& gpu, const Status& end = {})
      : bucket_(round, gpu.rank), values_(values, gpu.rank), sent_(values.input(gpu.rank)) {
    void* stream = gpu.stream(0);
    bucket_.write_operands(stream);
    values_.write_operands(stream);
    CudaAside aside{values_.operands(), values_.results(),
                    [this](std::span<const std::byte> from, RoundRequest& request) {
                      begun_.assign(from.begin(), from.end());
                      request.description += " with values";
                    },
                    [this, end](std::span<std::byte> to) -> Status {
                      std::ranges::copy(begun_, to.begin());
                      to.front() ^= std::byte{1};
                      return end;
                    }};
    EXPECT_TRUE(gpu.reduce(round, bucket_, 0, std::move(aside)).ok());
    bucket_.read_results(stream);
    values_.read_results(stream);
  }

  [[nodiscard]] const Bytes& sum() const { return bucket_.contents(); }
  [[nodiscard]] const Bytes& values() const { return values_.contents(); }
  [[nodiscard]] Bytes marked() const {
    Bytes marked = sent_;
    marked.front() ^= std::byte{1};
    return marked;
  }

 private:
  DeviceBucket bucket_;
  DeviceBucket values_;
  Bytes sent_;
  Bytes begun_;
};

TEST_F(CudaLaneTest, TheHostKnowsSmallValuesBeforeTheRoundAndGivesOthersAfterIt) {
  Job job({.workers = 2, .reducers = 1});
  start(job);
  const TestRound values{.dtype = DType::kI32, .leaf_counts = {3, 0, 1}};
  for (const TestRound& round : mixed_rounds()) {
    WithAside first(round, values, gpus[0]);
    WithAside second(round, values, gpus[1]);
    for (const Gpu& gpu : gpus) ASSERT_TRUE(gpu.wait());
    for (const WithAside* call : {&first, &second}) {
      EXPECT_EQ(call->sum(), round.output(2, 0));
      EXPECT_EQ(call->values(), call->marked());
    }
  }
  for (const Gpu& gpu : gpus) {
    EXPECT_TRUE(gpu.lane->drain(kPatience));
    EXPECT_EQ(gpu.lane->pool().used_bytes(), 0U);
  }
}

TEST_F(CudaLaneTest, WhereTheHostHasNoValuesToGiveAllResultsAreMarked) {
  Job job({.workers = 1, .reducers = 1});
  start(job);
  const TestRound round{.leaf_counts = {5000}};
  WithAside call(round, {.dtype = DType::kI32, .leaf_counts = {2}}, gpus[0], {Code::kInternal, "no values"});
  ASSERT_TRUE(gpus[0].wait());
  EXPECT_TRUE(std::ranges::all_of(call.sum(), [](std::byte byte) { return byte == std::byte{0xff}; }));
  EXPECT_TRUE(std::ranges::all_of(call.values(), [](std::byte byte) { return byte == std::byte{0xff}; }));
  EXPECT_TRUE(failed_with(gpus[0].lane->failure(), Code::kInternal, {"no values"}));
}

TEST_F(CudaLaneTest, Broadcasts) {
  Job job({.workers = 3, .reducers = 2});
  start(job);
  std::vector<TestRound> rounds;
  for (uint32_t root = 0; root < 3; ++root) {
    rounds.push_back({.op = root, .kind = Kind::kBroadcast, .leaf_counts = {5000, 17}, .root = root, .seed = root});
  }
  for (int step = 0; step < 3; ++step) run(rounds);
}

TEST_F(CudaLaneTest, ScattersAndGathers) {
  for (const bool failover : {false, true}) {
    Job job({.workers = 3, .reducers = 2, .failover = failover});
    start(job);
    for (uint32_t step = 0; step < 3; ++step) {
      run({{.op = 1, .kind = Kind::kScatter, .leaf_counts = {7000, 0, 17}, .seed = step, .rows = 3},
           {.op = 2, .kind = Kind::kGather, .leaf_counts = {7000, 0, 17}, .seed = step, .rows = 3},
           {.op = 3, .kind = Kind::kScatter, .leaf_counts = {1}, .seed = step, .rows = 3},
           {.op = 4, .kind = Kind::kGather, .leaf_counts = {1}, .seed = step, .rows = 3},
           {.op = 5, .kind = Kind::kGather, .leaf_counts = {0}, .seed = step, .rows = 3}});
    }
    gpus.clear();
  }
}

TEST_F(CudaLaneTest, MemoryMayBeReusedAsSoonAsTheStreamGoesOn) {
  Job job({.workers = 2, .reducers = 1});
  start(job);
  const TestRound round{.leaf_counts = {30'000}};
  std::vector<std::unique_ptr<DeviceBucket>> buckets;
  for (Gpu& gpu : gpus) {
    DeviceBucket& bucket = *buckets.emplace_back(std::make_unique<DeviceBucket>(round, gpu.rank));
    for (int step = 0; step < 10; ++step) {
      // Ordered by nothing but the stream; the stand-in sees it if two streams are at the memory at once.
      bucket.write_operands(gpu.stream(0));
      ASSERT_TRUE(gpu.reduce(round, bucket).ok());
      bucket.read_results(gpu.stream(0));
    }
  }
  for (const Gpu& gpu : gpus) ASSERT_TRUE(gpu.wait());
}

TEST_F(CudaLaneTest, AChunkIsPushedAndItsTotalComesBackBeforeTheRestIsReady) {
  Job job({.workers = 1, .reducers = 1, .chunk_bytes = 1024, .window_chunks = 100});
  job.start();
  const size_t bytes = 64 * 1024;
  Bytes input(bytes, std::byte{1});
  Bytes output(bytes);
  std::atomic<size_t> received = 0;
  const auto ready = std::make_shared<std::atomic<size_t>>(bytes / 2);
  std::promise<Status> done;
  std::promise<void> half;
  RoundRequest request;
  request.op = 1;
  request.description = "test op";
  request.spec = {Kind::kSum, DType::kF32, 0, 1, bytes / 4, 0};
  request.inputs.append(input.data(), bytes);
  request.outputs.append(output.data(), bytes);
  request.sliced.ready_bytes = ready;
  request.sliced.received = [&](size_t offset, size_t count) {
    EXPECT_EQ(offset, received);
    received += count;
    if (received == bytes / 2) half.set_value();
  };
  request.done = [&](const Status& status) { done.set_value(status); };
  job.workers[0]->start_round(std::move(request));
  ASSERT_EQ(half.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(received, bytes / 2);
  *ready = bytes;
  job.workers[0]->feed();
  std::future<Status> end = done.get_future();
  ASSERT_EQ(end.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(end.get().ok());
  EXPECT_EQ(received, bytes);
}

// --- What goes wrong.

bool is_poisoned(const DeviceBucket& bucket) {
  return std::ranges::all_of(bucket.contents(), [](std::byte byte) { return byte == std::byte{0xff}; });
}

TEST_F(CudaLaneTest, ASilentPeerDoesNotKeepTheGpuWaiting) {
  Job job({.workers = 2, .reducers = 1, .start_timeout = kShort, .timeout = kShort});
  start(job);
  const TestRound round{.leaf_counts = {3000}};
  DeviceBucket bucket(round, 0);
  bucket.write_operands(gpus[0].stream(0));
  ASSERT_TRUE(gpus[0].reduce(round, bucket).ok());
  bucket.read_results(gpus[0].stream(0));
  ASSERT_TRUE(gpus[0].wait());
  EXPECT_TRUE(is_poisoned(bucket));
  EXPECT_TRUE(failed_with(gpus[0].lane->failure(), Code::kRoundTimeout, {"rank 1"}));
  EXPECT_TRUE(failed_with(gpus[0].reduce(round, bucket), Code::kRoundTimeout, {"rank 1"}));
  EXPECT_TRUE(gpus[0].lane->drain(kPatience));
}

TEST_F(CudaLaneTest, ADeadReducerDoesNotKeepTheGpuWaiting) {
  Job job({.workers = 2, .reducers = 1});
  start(job);
  const std::vector<TestRound> rounds = mixed_rounds();
  std::vector<std::unique_ptr<DeviceBucket>> buckets;
  for (size_t index = 0; index < rounds.size(); ++index) {
    DeviceBucket& bucket = *buckets.emplace_back(std::make_unique<DeviceBucket>(rounds[index], 0));
    bucket.write_operands(gpus[0].stream(index));
    ASSERT_TRUE(gpus[0].reduce(rounds[index], bucket, index).ok());
    bucket.read_results(gpus[0].stream(index));
  }
  job.reducers[0].reset();
  ASSERT_TRUE(gpus[0].wait());
  for (const auto& bucket : buckets) EXPECT_TRUE(is_poisoned(*bucket));
  EXPECT_TRUE(failed_with(gpus[0].lane->failure(), Code::kReducerLost, {"reducer 0"}));
}

struct Fault {
  std::string function;
  int64_t nth;

  [[nodiscard]] std::string name() const { return function + "_" + std::to_string(nth); }
  friend void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name(); }
};

class CudaFaultTest : public CudaLaneTest, public testing::WithParamInterface<Fault> {};

TEST_P(CudaFaultTest, EndsTheJobAndLeavesNobodyWaiting) {
  Job job({.workers = 2, .reducers = 1});
  start(job);
  const TestRound round{.leaf_counts = {3000, 4000}};
  std::vector<std::unique_ptr<DeviceBucket>> buckets;
  fake_cuda_fail(GetParam().function.c_str(), GetParam().nth, 700);
  bool told = false;
  for (Gpu& gpu : gpus) {
    const DeviceBucket& bucket = *buckets.emplace_back(std::make_unique<DeviceBucket>(round, gpu.rank));
    told |= !gpu.reduce(round, bucket).ok();
  }
  for (const Gpu& gpu : gpus) ASSERT_TRUE(gpu.wait());
  for (const Gpu& gpu : gpus) {
    EXPECT_TRUE(gpu.lane->drain(kPatience));
    told |= has(gpu.lane->failure().message(), "CUDA error 700");
  }
  EXPECT_TRUE(told);
}

INSTANTIATE_TEST_SUITE_P(Functions, CudaFaultTest,
                         testing::Values(Fault{"cuEventCreate", 1}, Fault{"cuEventRecord", 2},
                                         Fault{"cuStreamWaitEvent", 1}, Fault{"cuStreamWriteValue32_v2", 2},
                                         Fault{"cuStreamWriteValue32_v2", 7}, Fault{"cuMemcpyDtoHAsync_v2", 2},
                                         Fault{"cuMemcpyHtoDAsync_v2", 1}, Fault{"cuMemcpyHtoDAsync_v2", 2},
                                         Fault{"cuMemcpyHtoDAsync_v2", 3}, Fault{"cuStreamWaitValue32_v2", 1},
                                         Fault{"execution", 1}, Fault{"execution", 9}),
                         [](const auto& info) { return info.param.name(); });

TEST_F(CudaLaneTest, ADriverThatCannotMarkResultsEndsTheRoundToo) {
  Job job({.workers = 2, .reducers = 1, .start_timeout = kShort, .timeout = kShort});
  start(job);
  const TestRound round{.leaf_counts = {3000, 4000}};
  const DeviceBucket bucket(round, 0);
  fake_cuda_fail("cuMemsetD8Async", 1, 700);
  ASSERT_TRUE(gpus[0].reduce(round, bucket).ok());
  ASSERT_TRUE(gpus[0].wait());
  EXPECT_TRUE(gpus[0].lane->drain(kPatience));
  EXPECT_TRUE(failed_with(gpus[0].lane->failure(), Code::kRoundTimeout, {"rank 1"}));
}

TEST_F(CudaLaneTest, ALibraryThatIsNoDriverIsRefused) {
  EXPECT_TRUE(failed_with(CudaDriver::open("libnowhere.so").status(), Code::kInvalidArgument, {"libnowhere.so"}));
  EXPECT_TRUE(failed_with(CudaDriver::open("libc.so.6").status(), Code::kInvalidArgument, {"libc.so.6", "no cuInit"}));
}

TEST_F(CudaLaneTest, NoLaneWithoutPinnedMemory) {
  Job job({.workers = 1, .reducers = 1});
  job.start();
  const std::shared_ptr<Communicator> communicator(std::shared_ptr<void>(), job.workers[0].get());
  fake_cuda_fail("cuMemHostAlloc", 1, 2);
  const auto lane = CudaLane::create(fake_driver(), fake_context(), communicator, small_lane());
  EXPECT_TRUE(failed_with(lane.status(), Code::kInvalidArgument, {"1048576 bytes of pinned", "CUDA error 2"}));
}

TEST_F(CudaLaneTest, PinnedBlocksAreGivenBackAndJoined) {
  const auto driver = fake_driver();
  Result<std::shared_ptr<PinnedPool>> pool = PinnedPool::create(driver, fake_context(), 4 * PinnedPool::rounded(1));
  ASSERT_TRUE(pool.ok());
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back((*pool)->allocate(1));
  EXPECT_TRUE(std::ranges::all_of(blocks, [](const auto& block) { return block != nullptr; }));
  EXPECT_EQ((*pool)->allocate(1), nullptr);
  for (int i : {2, 0, 1}) blocks[i].reset();
  EXPECT_NE((*pool)->allocate(3 * PinnedPool::rounded(1)), nullptr);
  // A block may outlive the pool's other owners.
  std::shared_ptr<std::byte> last = std::move(blocks[3]);
  EXPECT_EQ((*pool)->used_bytes(), PinnedPool::rounded(1));
  *pool = nullptr;
  *last = std::byte{1};
}

}  // namespace
}  // namespace jaxhetero
