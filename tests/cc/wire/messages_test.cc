#include "xla_ffi/wire/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/cc/printing.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/sum/reduce.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/job_shape.h"
#include "xla_ffi/wire/op_spec.h"

namespace jaxhetero {
namespace {

constexpr FrameType kAllTypes[] = {FrameType::kRegister, FrameType::kWaiting,  FrameType::kView,    FrameType::kReady,
                                   FrameType::kJoin,     FrameType::kDescribe, FrameType::kPush,    FrameType::kResult,
                                   FrameType::kLate,     FrameType::kFault,    FrameType::kGoodbye, FrameType::kLost,
                                   FrameType::kHalt,     FrameType::kProgress, FrameType::kLeaving, FrameType::kIdle,
                                   FrameType::kAlive,    FrameType::kShare,    FrameType::kShared,  FrameType::kStill,
                                   FrameType::kForget,   FrameType::kReads,    FrameType::kAsk,     FrameType::kState,
                                   FrameType::kCredit,   FrameType::kMessage};

auto fields(const FrameHeader& h) {
  return std::tie(h.type, h.last, h.payload_bytes, h.count, h.op, h.round, h.offset, h.has_checksum, h.checksum,
                  h.is_lent, h.place);
}

FrameHeader a_push() {
  FrameHeader header;
  header.type = FrameType::kPush;
  header.last = true;
  header.payload_bytes = 0x1000;
  header.count = 0x0400;
  header.op = 0x1112131415161718;
  header.round = 0x2122232425262728;
  header.offset = 0x3132333435;
  header.has_checksum = true;
  header.checksum = 0x71727374;
  return header;
}

Result<FrameHeader> decode_bytes(std::vector<int> bytes) {
  EncodedHeader encoded;
  std::ranges::transform(bytes, encoded.begin(), [](int byte) { return static_cast<std::byte>(byte); });
  return decode(encoded);
}

class EveryType : public testing::TestWithParam<FrameType> {};

TEST_P(EveryType, ComesBackAsItWas) {
  FrameHeader header = a_push();
  header.type = GetParam();
  for (bool last : {false, true}) {
    header.last = last;
    const Result<FrameHeader> decoded = decode(encode(header));
    ASSERT_TRUE(decoded.ok()) << decoded.status().message();
    EXPECT_EQ(fields(decoded.value()), fields(header));
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryType, testing::ValuesIn(kAllTypes));

// Another build, another machine, another year: the same bytes. A change here needs a new kProtocolVersion.
TEST(Header, HasTheseBytes) {
  const std::vector<int> bytes = {
      0x48, 0x4a,                                      // magic
      7,    3,                                         // type, flags: last, with a checksum
      0x00, 0x10, 0x00, 0x00,                          // payload_bytes
      0x00, 0x04, 0x00, 0x00,                          // count
      0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,  // op
      0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,  // round
      0x35, 0x34, 0x33, 0x32, 0x31, 0x00, 0x00, 0x00,  // offset
      0x74, 0x73, 0x72, 0x71,                          // checksum
  };
  ASSERT_EQ(bytes.size(), kHeaderBytes);
  const EncodedHeader encoded = encode(a_push());
  for (size_t i = 0; i < bytes.size(); ++i) EXPECT_EQ(std::to_integer<int>(encoded[i]), bytes[i]) << "byte " << i;
  const Result<FrameHeader> decoded = decode_bytes(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(fields(decoded.value()), fields(a_push()));
}

TEST(Header, OfWhatIsLentSaysWhereItIs) {
  FrameHeader header = a_push();
  header.has_checksum = false;
  header.checksum = 0;
  EncodedHeader encoded = encode(header);
  set_place(encoded, 0x81828384);
  header.is_lent = true;
  header.place = 0x81828384;
  EXPECT_EQ(encoded, encode(header));
  EXPECT_EQ(std::to_integer<int>(encoded[3]), 5) << "flags: last, lent";
  EXPECT_EQ(std::to_integer<int>(encoded[36]), 0x84);
  const Result<FrameHeader> decoded = decode(encoded);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(fields(decoded.value()), fields(header));
}

struct Spoiling {
  std::string name;
  std::function<void(FrameHeader&)> change;
};

class RefusedHeader : public testing::TestWithParam<Spoiling> {};

TEST_P(RefusedHeader, IsAProtocolError) {
  FrameHeader header = a_push();
  GetParam().change(header);
  EXPECT_EQ(decode(encode(header)).status().code(), Code::kProtocol);
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedHeader,
    testing::Values(Spoiling{"type_0", [](FrameHeader& h) { h.type = static_cast<FrameType>(0); }},
                    Spoiling{"type_after_the_last",
                             [](FrameHeader& h) {
                               h.type = static_cast<FrameType>(static_cast<uint8_t>(kLastFrameType) + 1);
                             }},
                    Spoiling{"lent_with_a_checksum", [](FrameHeader& h) { h.is_lent = true; }},
                    Spoiling{"lends_no_chunk",
                             [](FrameHeader& h) {
                               h.type = FrameType::kDescribe;
                               h.has_checksum = false;
                               h.is_lent = true;
                             }},
                    Spoiling{"chunk_too_large", [](FrameHeader& h) { h.payload_bytes = kMaxChunkBytes + 1; }},
                    Spoiling{"control_too_large",
                             [](FrameHeader& h) {
                               h.type = FrameType::kDescribe;
                               h.payload_bytes = kMaxControlBytes + 1;
                             }}),
    [](const auto& info) { return info.param.name; });

TEST(Header, WithAnotherMagicOrFlagsIsRefused) {
  for (size_t at : {0, 1, 3}) {  // where both bytes of the magic and the flags are
    EncodedHeader encoded = encode(a_push());
    encoded[at] ^= std::byte{0x20};
    EXPECT_EQ(decode(encoded).status().code(), Code::kProtocol) << at;
  }
}

OpDescription a_description() {
  OpSpec spec{Kind::kMax, DType::kBF16, 0, 0x51525354, 0x0142434445464748, 0x61626364, 0x7172737475767778};
  spec.group = {0, 2, 0x0f1};
  spec.site = 0x5152535455565758;
  return {spec, "psum of grads"};
}

struct SpecSpoiling {
  std::string name;
  std::function<void(OpSpec&)> change;
};

class RefusedSpec : public testing::TestWithParam<SpecSpoiling> {};

TEST_P(RefusedSpec, IsAProtocolError) {
  OpDescription description = a_description();
  GetParam().change(description.spec);
  EXPECT_EQ(decode_op_description(encode(description)).status().code(), Code::kProtocol);
}

INSTANTIATE_TEST_SUITE_P(All, RefusedSpec,
                         testing::Values(SpecSpoiling{"kind_0", [](OpSpec& s) { s.kind = static_cast<Kind>(0); }},
                                         SpecSpoiling{"kind_11", [](OpSpec& s) { s.kind = static_cast<Kind>(11); }},
                                         SpecSpoiling{"dtype_0", [](OpSpec& s) { s.dtype = static_cast<DType>(0); }},
                                         SpecSpoiling{"dtype_13", [](OpSpec& s) { s.dtype = static_cast<DType>(13); }},
                                         SpecSpoiling{"root_that_no_job_has", [](OpSpec& s) { s.root = kMaxWorkers; }},
                                         SpecSpoiling{"total_whose_bytes_overflow",
                                                      [](OpSpec& s) { s.total_count = ~uint64_t{0}; }},
                                         SpecSpoiling{"group_out_of_order", [](OpSpec& s) { s.group = {2, 0}; }},
                                         SpecSpoiling{"state_of_a_maximum", [](OpSpec& s) { s.state.number = 1; }},
                                         SpecSpoiling{"rank_twice", [](OpSpec& s) { s.group = {0, 2, 2}; }},
                                         SpecSpoiling{"group_that_no_job_has",
                                                      [](OpSpec& s) {
                                                        s.group.resize(kMaxWorkers + 1);
                                                        std::iota(s.group.begin(), s.group.end(), 0u);
                                                      }}),
                         [](const auto& info) { return info.param.name; });

OpDescription an_update() {
  OpSpec spec{Kind::kUpdate, DType::kBF16, 0, 3, 5000, 0x61626364, 20000};
  spec.state = {0x0102030405060708, 4, 0, 0x1112131415161718, true, DType::kBF16, Numbers::kNone, true, 10000};
  return {spec, "optimizer 0 bucket 1", {1000, 4000}, {std::byte{1}, std::byte{2}}};
}

class RefusedUse : public testing::TestWithParam<SpecSpoiling> {};

TEST_P(RefusedUse, IsAProtocolError) {
  OpDescription description = an_update();
  ASSERT_TRUE(decode_op_description(encode(description)).ok());
  GetParam().change(description.spec);
  EXPECT_EQ(decode_op_description(encode(description)).status().code(), Code::kProtocol);
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedUse,
    testing::Values(SpecSpoiling{"no_state", [](OpSpec& s) { s.state.number = 0; }},
                    SpecSpoiling{"no_slots", [](OpSpec& s) { s.state.slot_count = 0; }},
                    SpecSpoiling{"slot_that_is_not_there", [](OpSpec& s) { s.state.slot = 4; }},
                    SpecSpoiling{"too_many_slots", [](OpSpec& s) { s.state.slot_count = kMaxStateSlots + 1; }},
                    SpecSpoiling{"integers", [](OpSpec& s) { s.dtype = DType::kI32; }},
                    SpecSpoiling{"weights_in_float64", [](OpSpec& s) { s.state.weights = DType::kF64; }},
                    SpecSpoiling{"store_of_bfloat16", [](OpSpec& s) { s.kind = Kind::kStore; }},
                    SpecSpoiling{"part_whose_bytes_overflow", [](OpSpec& s) { s.state.first = ~uint64_t{0}; }},
                    SpecSpoiling{"group", [](OpSpec& s) { s.group = {0, 1}; }}),
    [](const auto& info) { return info.param.name; });

TEST(OpDescription, TakesEveryWorkerAsTheRoot) {
  OpDescription description = a_description();
  description.spec.kind = Kind::kBroadcast;
  description.spec.root = kMaxWorkers - 1;
  EXPECT_EQ(decode_op_description(encode(description))->spec, description.spec);
}

StateCopy a_copy() {
  return {.number = 7,
          .count = 1000,
          .slot_count = 2,
          .is_backed_up = true,
          .part = {998, 2},
          .version = 3,
          .op = 4,
          .round = 5,
          .has_gradient = true,
          .values = Bytes(3 * 2 * sizeof(float), std::byte{1})};
}

Registration a_registration() {
  return {Role::kReducer, -1, 1, {4, 2, 65536, 8}, 3, 2, "1.2.3", "host-a", 4242, "10.0.0.1", {"10.1.0.1"}};
}

View some_view() {
  View view;
  view.job_id = 0x0102030405060708;
  view.job = {3, 2, 0, 65536, 8, true, true};
  view.strand_count = 4;
  view.own_index = 1;
  view.worker_hosts = {"a", "", "host-c"};
  view.worker_endpoints = {{"10.0.0.7", 4001}, {"", 0}, {"fd00::3", 65535}};
  view.reducers = {{0, "10.0.0.1", 4000, "a", -1, {}}, {7, "::1", 65535, "b", 2, {"fd00::1"}}};
  view.number = 3;
  view.resume = {{0x1122334455667788, 9}, {2, 0}};
  return view;
}

ProcessState a_process_state() { return {1, 12, 13, 14, "grads round 3", 250, {{3, 1000}, {0, 20}}}; }

JobState a_job_state() {
  return {7,
          1,
          true,
          4,
          8,
          2,
          "rank 3",
          {{Role::kWorker, 0, -1, "host-a", "10.0.0.1:5", true, false, true, 10, a_process_state()},
           {Role::kWorker, 1, -1, "host-a", "10.0.0.1:7", false, true, false, 10, {}},
           {Role::kReducer, -1, 1, "host-b", "10.0.0.2:6", true, false, false, 9000, {}, 51}}};
}

// A control message without its type: what it is made of, and what comes back.
struct Message {
  std::string name;
  Bytes bytes;
  // Decoded and encoded again, or the reason why not.
  std::function<Result<Bytes>(std::span<const std::byte>)> again;
  std::optional<size_t> text_at = {};  // what comes behind has any length
};

template <auto Decode>
Result<Bytes> again(std::span<const std::byte> bytes) {
  const auto decoded = Decode(bytes);
  if (!decoded.ok()) return decoded.status();
  return encode(decoded.value());
}

std::vector<Message> messages() {
  return {{"registration", encode(a_registration()), &again<decode_registration>},
          {"view", encode(some_view()), &again<decode_view>},
          {"op_description", encode(a_description()), &again<decode_op_description>, 121},
          {"update", encode(an_update()), &again<decode_op_description>, 111},
          {"step_inputs", encode(StepInputs{7, {0x3f800000, 1}}), &again<decode_step_inputs>},
          {"step_totals", encode(StepTotals{{{1, 4096, 12, 0x3ff0000000000000}, {0, 0, 3, 1}}}),
           &again<decode_step_totals>},
          {"state_copy", encode(a_copy()), &again<decode_state_copy>},
          {"join", encode(Join{7, 3, 1}), &again<decode_join>},
          {"shared_offer", encode(SharedOffer{4711, 12, {std::byte{1}, std::byte{255}}}), &again<decode_shared_offer>},
          {"lost", encode(Lost{2, 5, "why"}), &again<decode_lost>},
          {"halt", encode(Halt{2, "why"}), &again<decode_halt>},
          {"goodput", encode(Goodput{2, 3, {{0, 16, 1 << 20, 5000}, {1, 8, 0, 0}}, {1 << 20, 5000, 7, -1}}),
           &again<decode_goodput>},
          {"new_rates", encode(NewRates{2, {{0, 256}, {1, 1}}, {{7, 9}, {8, 0}}}), &again<decode_new_rates>},
          {"progress", encode(Progress{2, {{7, 1}, {8, 0, 2}}}), &again<decode_progress>},
          {"process_state", encode(a_process_state()), &again<decode_process_state>},
          {"job_state", encode(a_job_state()), &again<decode_job_state>},
          {"fault", encode(Status(Code::kMismatch, "rank 1 differs")),
           [](std::span<const std::byte> bytes) -> Result<Bytes> { return encode(decode_fault(bytes)); }, 0}};
}

class ControlMessage : public testing::TestWithParam<Message> {};

TEST_P(ControlMessage, ComesBackAsItWas) { EXPECT_EQ(*GetParam().again(GetParam().bytes), GetParam().bytes); }

TEST_P(ControlMessage, IsRefusedWhenItsLengthIsWrong) {
  const auto& [name, bytes, again, text_at] = GetParam();
  for (size_t length = 0; length < text_at.value_or(bytes.size()); ++length) {
    EXPECT_EQ(again(std::span(bytes).first(length)).status().code(), Code::kProtocol) << length;
  }
  if (text_at.has_value()) {
    EXPECT_TRUE(again(std::span(bytes).first(*text_at)).ok() || *text_at == 0) << "a text may be empty";
    return;
  }
  Bytes longer = bytes;
  longer.push_back({});
  EXPECT_EQ(again(longer).status().code(), Code::kProtocol);
}

// Random bytes, and random damage to good ones. What is accepted must mean something: encoded again, it is accepted
// again, and then nothing changes any more (the first time, control characters were replaced).
TEST_P(ControlMessage, SurvivesDamage) {
  const auto& [name, bytes, again, text_at] = GetParam();
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    Bytes damaged = bytes;
    if (i % 4 == 0) {
      damaged.resize(random() % (2 * bytes.size()));
      for (std::byte& byte : damaged) byte = static_cast<std::byte>(random());
    } else {
      for (uint32_t left = random() % 4 + 1; left > 0 && !damaged.empty(); --left) {
        damaged[random() % damaged.size()] = static_cast<std::byte>(random());
      }
      if (random() % 8 == 0) damaged.resize(random() % (damaged.size() + 4));
    }
    const Result<Bytes> once = again(damaged);
    if (!once.ok()) {
      ASSERT_EQ(once.status().code(), Code::kProtocol);
      continue;
    }
    ++accepted;
    const Result<Bytes> twice = again(once.value());
    ASSERT_TRUE(twice.ok());
    ASSERT_EQ(twice.value(), once.value());
  }
  EXPECT_GT(accepted, 100) << "the damage was so great that nothing was tested";
}

INSTANTIATE_TEST_SUITE_P(All, ControlMessage, testing::ValuesIn(messages()),
                         [](const auto& info) { return info.param.name; });

TEST(Header, SurvivesDamage) {
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    FrameHeader header = a_push();
    header.type = kAllTypes[random() % std::size(kAllTypes)];
    EncodedHeader damaged = encode(header);
    for (uint32_t left = random() % 4; left > 0; --left) {
      damaged[random() % damaged.size()] = static_cast<std::byte>(random());
    }
    if (i % 4 == 0) {
      for (std::byte& byte : std::span(damaged).subspan(2)) byte = static_cast<std::byte>(random());
    }
    Result<FrameHeader> decoded = decode(damaged);
    if (!decoded.ok()) {
      ASSERT_EQ(decoded.status().code(), Code::kProtocol);
      continue;
    }
    ++accepted;
    ASSERT_EQ(encode(decoded.value()), damaged);
    ASSERT_LE(decoded->payload_bytes, std::max(kMaxChunkBytes, kMaxControlBytes));
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Registration, KeepsEveryField) {
  const Registration sent = a_registration();
  const Result<Registration> got = decode_registration(encode(sent));
  ASSERT_TRUE(got.ok());
  const auto fields = [](const Registration& r) {
    return std::tie(r.role, r.rank, r.number, r.job, r.version, r.host_name, r.port, r.address);
  };
  EXPECT_EQ(fields(got.value()), fields(sent));
}

TEST(Registration, HasANumberOnlyOfADedicatedReducer) {
  for (const auto& [role, rank, number] :
       {std::tuple{Role::kWorker, 1, 1}, {Role::kReducer, 1, 1}, {Role::kReducer, -1, -2}}) {
    Registration registration = a_registration();
    registration.role = role;
    registration.rank = rank;
    registration.number = number;
    EXPECT_EQ(decode_registration(encode(registration)).status().code(), Code::kProtocol);
  }
}

TEST(Registration, CutsNamesThatAreTooLong) {
  Registration registration = a_registration();
  registration.host_name.assign(300, 'h');
  EXPECT_EQ(decode_registration(encode(registration))->host_name, std::string(255, 'h'));
}

TEST(View, KeepsEveryField) {
  const View sent = some_view();
  Result<View> got = decode_view(encode(sent));
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->job_id, sent.job_id);
  EXPECT_EQ(got->job, sent.job);
  EXPECT_EQ(got->number, sent.number);
  EXPECT_EQ(got->own_index, sent.own_index);
  EXPECT_EQ(got->worker_hosts, sent.worker_hosts);
  ASSERT_EQ(got->worker_endpoints.size(), sent.worker_endpoints.size());
  for (size_t rank = 0; rank < sent.worker_endpoints.size(); ++rank) {
    EXPECT_EQ(got->worker_endpoints[rank].address, sent.worker_endpoints[rank].address);
    EXPECT_EQ(got->worker_endpoints[rank].port, sent.worker_endpoints[rank].port);
  }
  ASSERT_EQ(got->reducers.size(), sent.reducers.size());
  for (size_t i = 0; i < sent.reducers.size(); ++i) {
    EXPECT_EQ(got->reducers[i].number, sent.reducers[i].number);
    EXPECT_EQ(got->reducers[i].address, sent.reducers[i].address);
    EXPECT_EQ(got->reducers[i].port, sent.reducers[i].port);
    EXPECT_EQ(got->reducers[i].host_name, sent.reducers[i].host_name);
    EXPECT_EQ(got->reducers[i].colocated_rank, sent.reducers[i].colocated_rank);
  }
  ASSERT_EQ(got->resume.size(), sent.resume.size());
  for (size_t i = 0; i < sent.resume.size(); ++i) {
    EXPECT_EQ(got->resume[i].op, sent.resume[i].op);
    EXPECT_EQ(got->resume[i].round, sent.resume[i].round);
  }
}

TEST(View, OfTheLargestJobFitInAFrame) {
  View view = some_view();
  view.job.worker_count = kMaxWorkers;
  view.worker_hosts.assign(kMaxWorkers, std::string(64, 'h'));  // HOST_NAME_MAX
  view.worker_endpoints.assign(kMaxWorkers, {std::string(45, '0'), 65535});
  view.resume.assign(size_t{kMaxOps} * kMaxStrands, {1, 2});
  view.reducers.assign(kMaxReducers, {0, std::string(45, '0'), 65535, std::string(64, 'h'), 0, {}});
  const Bytes bytes = encode(view);
  EXPECT_LE(bytes.size(), kMaxControlBytes);
  EXPECT_TRUE(decode_view(bytes).ok());
}

struct SpoiltJob {
  std::string name;
  std::function<void(View&)> change;
};

class RefusedMembers : public testing::TestWithParam<SpoiltJob> {};

TEST_P(RefusedMembers, AreAProtocolError) {
  View view = some_view();
  GetParam().change(view);
  EXPECT_EQ(decode_view(encode(view)).status().code(), Code::kProtocol);
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedMembers,
    testing::Values(SpoiltJob{"chunk_too_large", [](View& m) { m.job.chunk_bytes = kMaxChunkBytes + 64; }},
                    SpoiltJob{"chunk_that_cuts_elements", [](View& m) { m.job.chunk_bytes = 100; }},
                    SpoiltJob{"no_workers",
                              [](View& m) {
                                m.job.worker_count = 0;
                                m.worker_hosts.clear();
                                m.worker_endpoints.clear();
                              }},
                    SpoiltJob{"more_workers_than_the_job_has", [](View& m) { m.worker_hosts.emplace_back("d"); }},
                    SpoiltJob{"a_worker_without_endpoint", [](View& m) { m.worker_endpoints.pop_back(); }},
                    SpoiltJob{"too_many_workers",
                              [](View& m) {
                                m.job.worker_count = kMaxWorkers + 1;
                                m.worker_hosts.resize(kMaxWorkers + 1);
                                m.worker_endpoints.resize(kMaxWorkers + 1);
                              }},
                    SpoiltJob{"no_strand", [](View& m) { m.strand_count = 0; }},
                    SpoiltJob{"too_many_strands", [](View& m) { m.strand_count = kMaxStrands + 1; }},
                    SpoiltJob{"too_many_rounds_to_resume",
                              [](View& m) { m.resume.resize(size_t{kMaxOps} * kMaxStrands + 1); }},
                    SpoiltJob{"too_many_reducers", [](View& m) { m.reducers.resize(kMaxReducers + 1); }}),
    [](const auto& info) { return info.param.name; });

// The same bytes in every build, as HasTheseBytes has it for the header.
TEST(InAHeader, EveryMessageComesBackAsItWasFromTheseNumbers) {
  for (const bool yes : {false, true}) {
    const FrameHeader idle = header_of(Idle{yes});
    EXPECT_EQ(idle.count, yes ? 1u : 0u);
    EXPECT_EQ(decode_idle(idle).value(), Idle{yes});

    for (const bool also : {false, true}) {
      const FrameHeader settled = header_of(Settled{0xffffffff, yes, also});
      EXPECT_EQ(std::tie(settled.round, settled.count, settled.last), std::tuple(0xffffffffu, yes ? 1u : 0u, also));
      EXPECT_EQ(decode_settled(settled).value(), (Settled{0xffffffff, yes, also}));
    }

    const FrameHeader late = header_of(Late{7, 8, kMaxWorkers, yes});
    EXPECT_EQ(std::tie(late.op, late.round, late.count, late.offset), std::tuple(7u, 8u, kMaxWorkers, yes ? 1u : 0u));
    EXPECT_EQ(decode_late(late).value(), (Late{7, 8, kMaxWorkers, yes}));
  }
  EXPECT_EQ(header_of(Hold{0xffffffff}).round, 0xffffffffu);
  EXPECT_EQ(decode_hold(header_of(Hold{0xffffffff})).value(), Hold{0xffffffff});
}

TEST(InAHeader, WhatNoMessageSaysIsAProtocolError) {
  FrameHeader header;
  header.count = 2;
  EXPECT_EQ(decode_idle(header).status().code(), Code::kProtocol);
  EXPECT_EQ(decode_settled(header).status().code(), Code::kProtocol);
  header.count = kMaxWorkers + 1;
  EXPECT_EQ(decode_late(header).status().code(), Code::kProtocol);
  header = {};
  header.offset = 2;
  EXPECT_EQ(decode_late(header).status().code(), Code::kProtocol);
  header.round = uint64_t{1} << 32;
  EXPECT_EQ(decode_settled(header).status().code(), Code::kProtocol);
  EXPECT_EQ(decode_hold(header).status().code(), Code::kProtocol);
}

TEST(Fault, KeepsEveryCode) {
  for (uint8_t code = 1; code < kCodeCount; ++code) {
    const Status fault = decode_fault(encode(Status(static_cast<Code>(code), "why")));
    EXPECT_EQ(fault.code(), static_cast<Code>(code));
    EXPECT_EQ(fault.message(), "why");
  }
}

// Without a share for anybody, no bucket could be cut.
TEST(NewRates, AreAboveZeroAndAtMostFull) {
  for (const uint32_t rate : {0u, NewRates::kMostRate + 1, ~0u}) {
    const Bytes bytes = encode(NewRates{1, {{0, NewRates::kFullRate}, {1, rate}}, {}});
    EXPECT_EQ(decode_new_rates(bytes).status().code(), Code::kProtocol) << rate;
  }
}

// A fault must never turn into "all is well".
TEST(Fault, OfUnknownCodeIsAProtocolError) {
  for (int code : {0, int{kCodeCount}, 255}) {
    Bytes bytes = encode(Status(Code::kInternal, "why"));
    bytes[0] = static_cast<std::byte>(code);
    EXPECT_EQ(decode_fault(bytes).code(), Code::kProtocol) << code;
  }
}

TEST(Text, IsPrintable) {
  Bytes every;
  for (int c = 0; c < 256; ++c) every.push_back(static_cast<std::byte>(c));
  const std::string text = decode_text(every);
  ASSERT_EQ(text.size(), every.size());
  for (int c = 0; c < 256; ++c) EXPECT_EQ(text[static_cast<size_t>(c)], c >= ' ' && c <= '~' ? c : '?') << c;
}

TEST(Text, IsCutToASaneLength) {
  const std::string endless(1 << 20, 'x');
  EXPECT_EQ(encode(endless).size(), 8192u);
  EXPECT_EQ(decode_text(std::as_bytes(std::span(endless))).size(), 8192u);
  EXPECT_LE(encode(Status(Code::kInternal, endless)).size(), kMaxControlBytes);
}

TEST(Describe, SpeaksToPeople) {
  EXPECT_EQ(describe(OpSpec{Kind::kSum, DType::kF32, 0, 2, 1024, 0}), "sum of float32[1024] in 2 leaves");
  EXPECT_EQ(describe(OpSpec{Kind::kBroadcast, DType::kI8, 3, 1, 5, 0}), "broadcast of int8[5] from rank 3");
  EXPECT_EQ(describe(OpSpec{Kind::kMax, DType::kF64, 0, 1, 7, 0}), "maximum of float64[7]");
  EXPECT_EQ(describe(OpSpec{Kind::kMin, DType::kU8, 0, 1, 0, 0}), "minimum of uint8[0]");
  EXPECT_EQ(describe(OpSpec{Kind::kScatter, DType::kU8, 0, 1, 6, 0}), "scattered sum of uint8[6]");
  EXPECT_EQ(describe(OpSpec{Kind::kGather, DType::kU8, 0, 1, 6, 0}), "gather of uint8[6]");
  EXPECT_EQ(describe(OpSpec{Kind::kSum, DType::kF32, 0, 1, 8, 0, 32}), "sum of float32[8]");
  EXPECT_EQ(describe(OpSpec{Kind::kSum, DType::kF32, 0, 1, 8, 0, 33}), "sum of float32[8] in a call of 33 bytes");
}

TEST(Difference, NamesEachFieldThatDiffers) {
  const JobShape job{4, 2, 1, 65536, 8, false};
  EXPECT_EQ(difference(job, job), "");
  EXPECT_EQ(difference({4, 2, 1, 4096, 8, false}, job), "chunk_bytes is 4096, not 65536");
  EXPECT_EQ(
      difference({5, 3, 0, 1024, 9, true, true, true}, job),
      "worker_count is 5, not 4, reducer_count is 3, not 2, colocated_count is 0, not 1, chunk_bytes is 1024, not "
      "65536, window_chunks is 9, not 8, checksum is 1, not 0, failover is 1, not 0, measure_rates is 1, not 0");
}

}  // namespace
}  // namespace jaxhetero
