#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/simulator/events.h"
#include "xla_ffi/simulator/network.h"

namespace jaxhetero::simulator {
namespace {

constexpr double kRate = 1e6;
constexpr double kLatency = 0.01;

class Arrivals final : public Receiver {
 public:
  explicit Arrivals(const EventQueue& events) : events_(events) {}
  void on_message(const Message& message) override {
    messages.push_back(message);
    times_s.push_back(events_.now_s());
  }

  std::vector<Message> messages;
  std::vector<double> times_s;

 private:
  const EventQueue& events_;
};

// Packets without headers, and no acknowledgements, so that times are easily told.
NetworkConfig plain() {
  NetworkConfig config;
  config.latency_s = kLatency;
  config.packet_bytes = 1000;
  config.packet_overhead_bytes = 0;
  config.ack_bytes = 0;
  config.piece_bytes = 1000;
  return config;
}

// Hosts of one interface each.
class NetworkTest : public testing::Test {
 protected:
  void make(const NetworkConfig& config, uint32_t host_count) {
    network_ = std::make_unique<Network>(events_, config);
    for (uint32_t host = 0; host < host_count; ++host) network_->add_interface(host, kRate);
  }
  uint32_t flow(uint32_t from, uint32_t to) { return network_->add_flow(from, to, arrivals_, from); }
  void send(uint32_t flow, uint32_t bytes, uint64_t op = 0) {
    FrameHeader header;
    header.op = op;
    network_->send(flow, bytes, header);
  }
  void run() {
    while (events_.step()) {
    }
  }

  EventQueue events_;
  Arrivals arrivals_{events_};
  std::unique_ptr<Network> network_;
};

TEST_F(NetworkTest, AMessageTakesItsBytesAndTheLatency) {
  make(plain(), 2);
  send(flow(0, 1), 100'000);
  run();
  ASSERT_EQ(arrivals_.times_s.size(), 1u);
  EXPECT_NEAR(arrivals_.times_s[0], 0.1 + kLatency + 0.001, 1e-9) << "its first packet has to arrive first";
  EXPECT_EQ(network_->sent_bytes(0), 100'000);
  EXPECT_EQ(network_->received_bytes(1), 100'000);
}

TEST_F(NetworkTest, HeadersAndAcknowledgementsTakeBytesToo) {
  NetworkConfig config = plain();
  config.packet_overhead_bytes = 50;
  config.ack_bytes = 70;
  config.bytes_per_ack = 10'000;
  make(config, 2);
  send(flow(0, 1), 100'000);
  run();
  EXPECT_EQ(network_->sent_bytes(0), 105'000);
  EXPECT_EQ(network_->sent_bytes(1), 700);
  EXPECT_EQ(network_->received_bytes(0), 700);
}

TEST_F(NetworkTest, FlowsShareAnInterface) {
  make(plain(), 3);
  send(flow(0, 1), 100'000, 1);
  send(flow(0, 2), 100'000, 2);
  run();
  EXPECT_NEAR(arrivals_.times_s[0], arrivals_.times_s[1], 0.005);
  EXPECT_NEAR(arrivals_.times_s[1], 0.2, 0.02);
}

TEST_F(NetworkTest, AReceiverIsTheBottleneckOfMany) {
  make(plain(), 5);
  for (uint32_t host = 1; host < 5; ++host) send(flow(host, 0), 50'000);
  run();
  EXPECT_NEAR(arrivals_.times_s.back(), 0.2, 0.02);
}

TEST_F(NetworkTest, ABurstPassesAtOnceAfterAPause) {
  NetworkConfig config = plain();
  config.burst_bytes = 20'000;
  make(config, 2);
  send(flow(0, 1), 20'000);
  run();
  EXPECT_NEAR(arrivals_.times_s[0], kLatency, 1e-9);
}

TEST_F(NetworkTest, AFlowMayBeSlowerThanItsInterface) {
  NetworkConfig config = plain();
  config.flow_bytes_per_s = kRate / 10;
  make(config, 3);
  send(flow(0, 1), 20'000);
  send(flow(0, 2), 20'000);
  run();
  EXPECT_NEAR(arrivals_.times_s[1], 0.2, 0.02);
}

TEST_F(NetworkTest, LeavesShareTheirLinksToSpines) {
  NetworkConfig config = plain();
  config.hosts_per_leaf = 2;
  config.uplink_bytes_per_s = kRate / 2;
  make(config, 4);
  send(flow(0, 1), 100'000, 1);
  send(flow(0, 2), 100'000, 2);
  send(flow(1, 3), 100'000, 3);
  run();
  std::vector<double> by_op(4);
  for (size_t i = 0; i < 3; ++i) by_op[arrivals_.messages[i].header.op] = arrivals_.times_s[i];
  EXPECT_NEAR(by_op[1], 0.2, 0.02) << "within a leaf nothing is shared but the interface";
  EXPECT_NEAR(std::max(by_op[2], by_op[3]), 0.4, 0.03) << "200,000 bytes through one link of half the rate";
}

TEST_F(NetworkTest, WhatAFullQueueDropsComesLaterAndInOrder) {
  NetworkConfig config = plain();
  config.queue_bytes = 10'000;
  config.loss_timeout_s = 0.5;
  make(config, 9);
  for (uint32_t host = 1; host < 9; ++host) {
    const uint32_t number = flow(host, 0);
    for (uint64_t op = 0; op < 5; ++op) send(number, 20'000, op);
  }
  run();
  EXPECT_GT(network_->lost_count(), 0u);
  ASSERT_EQ(arrivals_.messages.size(), 40u);
  std::vector<uint64_t> next(9);
  for (const Message& message : arrivals_.messages) EXPECT_EQ(message.header.op, next[message.sender]++);
  EXPECT_GT(arrivals_.times_s.back(), 0.8) << "losing bytes does not make the receiver faster";
}

TEST_F(NetworkTest, WithinAHostBytesPassNoInterface) {
  NetworkConfig config = plain();
  config.own_host_latency_s = 0.002;
  make(config, 1);
  send(flow(0, 0), 1'000'000);
  run();
  EXPECT_EQ(arrivals_.times_s, std::vector<double>{0.002});
  EXPECT_EQ(network_->sent_bytes(0), 0);
}

}  // namespace
}  // namespace jaxhetero::simulator
