#include "xla_ffi/simulator/plan.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "xla_ffi/wire/frame.h"

namespace jaxhetero::simulator {
namespace {

using Clock = EventLoop::Clock;

// A round of the measurement as long as its bytes take at the interfaces, or its messages on the cores.
class NoiselessProbe {
 public:
  NoiselessProbe(const View& view, const Cluster& cluster, const JobConfig& job)
      : view_(view), cluster_(cluster), job_(job) {}

  // `parts`: of the request. A small one has a single part, and goes over the interface of its strand alone.
  [[nodiscard]] RoundOutcome run(const RoundRequest& request, const std::vector<RoundPart>& parts) {
    RoundOutcome outcome;
    if (request.outputs.bytes() > 0) {
      agree(request);
      return outcome;
    }
    strands_.clear();
    own_s_ = 0;
    message_count_ = 0;
    for (const RoundPart& part : parts) strands_.push_back(part.strand);
    Clock::time_point last;
    const uint64_t items_per_chunk = request.plan->items_per_chunk(parts[0].request.spec.total_count, sizeof(float));
    const auto k = static_cast<double>(request.plan->owner_count());
    for (const Shard& shard : request.plan->cut(request.op, request.spec.total_count, sizeof(float))) {
      const View::Reducer& reducer = view_.reducers[shard.reducer];
      const uint64_t bytes = shard.count * sizeof(float);
      const uint64_t part_count = shard.count / parts.size();
      // Of a strand, to this reducer and back.
      const uint64_t messages = 2 * std::max<uint64_t>(1, (part_count + items_per_chunk - 1) / items_per_chunk);
      const double own_s = time_on_core(job_.worker_costs, messages, 2 * part_count * sizeof(float));
      const double its_s = time_on_core(job_.reducer_costs, messages, 2 * part_count * sizeof(float));
      const double time_s = std::max(
          {static_cast<double>(bytes) / link_rate(reducer, *request.plan), k * own_s, job_.shape.worker_count * its_s});
      own_s_ += own_s;
      message_count_ += messages;
      const Clock::time_point end = after(time_s);
      outcome.entry.parts.push_back({reducer.number, bytes, end});
      last = std::max(last, end);
    }
    // Each interface that carries a part carries as much as the others.
    const std::vector<double>& rates = cluster_.hosts[job_.worker_hosts[0]].interfaces;
    const auto rate_of = [&](uint32_t strand) { return rates[strand % rates.size()]; };
    const double slowest = rate_of(std::ranges::min(strands_, {}, rate_of));
    for (const uint32_t strand : strands_) {
      const Clock::time_point end(
          std::chrono::duration_cast<Clock::duration>(last.time_since_epoch() * (slowest / rate_of(strand))));
      outcome.strand_parts.push_back({strand, end, after(own_s_).time_since_epoch(), message_count_});
    }
    return outcome;
  }

 private:
  static double time_on_core(const Costs& costs, uint64_t messages, uint64_t bytes) {
    return static_cast<double>(messages) * (costs.s_per_message + kHeaderBytes * costs.s_per_byte) +
           static_cast<double>(bytes) * costs.s_per_byte;
  }

  static Clock::time_point after(double time_s) {
    return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(time_s)));
  }

  // All workers have seen the same.
  void agree(const RoundRequest& request) const {
    std::vector<iovec> own;
    std::vector<iovec> total;
    request.inputs.slice(0, request.inputs.bytes(), own);
    request.outputs.slice(0, request.outputs.bytes(), total);
    const auto* from = static_cast<const int64_t*>(own[0].iov_base);
    auto* to = static_cast<int64_t*>(total[0].iov_base);
    for (size_t i = 0; i < total[0].iov_len / sizeof(int64_t); ++i) to[i] = from[i] * job_.shape.worker_count;
  }

  // Of the message's own bytes, by the interfaces that carry the round.
  [[nodiscard]] double rate(uint32_t host) const {
    const std::vector<double>& rates = cluster_.hosts[host].interfaces;
    std::set<size_t> carrying;
    for (const uint32_t strand : strands_) carrying.insert(strand % rates.size());
    double sum = 0;
    for (const size_t interface : carrying) sum += rates[interface];
    const double packet = cluster_.network.packet_bytes;
    return sum * packet / (packet + cluster_.network.packet_overhead_bytes);
  }

  [[nodiscard]] double link_rate(const View::Reducer& reducer, const ShardPlan& plan) const {
    const double n = job_.shape.worker_count;
    const auto k = static_cast<double>(plan.owner_count());
    if (reducer.colocated_rank >= 0) return rate(job_.worker_hosts[reducer.colocated_rank]) / std::max(1.0, k + n - 2);
    double slowest = rate(job_.worker_hosts[0]);
    for (const uint32_t host : job_.worker_hosts) slowest = std::min(slowest, rate(host));
    return std::min(rate(job_.reducer_hosts[reducer.number]) / n, slowest / k);
  }

  const View& view_;
  const Cluster& cluster_;
  const JobConfig& job_;
  std::vector<uint32_t> strands_;  // the strands that carry the round
  // Of each strand of a worker, in the round.
  double own_s_ = 0;
  uint64_t message_count_ = 0;
};

}  // namespace

View view_of(const Cluster& cluster, const JobConfig& job) {
  View view;
  view.job = job.shape;
  view.strand_count = job.strand_count;
  for (uint32_t number = 0; number < total_reducer_count(job.shape); ++number) {
    View::Reducer& reducer = view.reducers.emplace_back();
    reducer.number = number;
    if (number >= job.shape.reducer_count)
      reducer.colocated_rank = static_cast<int32_t>(number - job.shape.reducer_count);
  }
  const auto count_rails = [&](uint32_t host) {
    view.rail_count = std::max(view.rail_count, static_cast<uint32_t>(cluster.hosts[host].interfaces.size()));
  };
  std::ranges::for_each(job.worker_hosts, count_rails);
  std::ranges::for_each(job.reducer_hosts, count_rails);
  return view;
}

std::vector<uint32_t> part_counts(const Cluster& cluster, const JobConfig& job) {
  Planner planner(job.shape);
  prepare(planner, view_of(cluster, job), cluster, job);
  std::vector<uint32_t> counts;
  for (const BucketConfig& bucket : job.buckets) {
    RoundRequest request;
    request.spec.dtype = bucket.dtype;
    request.spec.total_count = bucket.count;
    counts.push_back(planner.parts_of(request).part_count(request.spec));
  }
  return counts;
}

void prepare(Planner& planner, const View& view, const Cluster& cluster, const JobConfig& job) {
  planner.enter(view);
  NoiselessProbe probe(view, cluster, job);
  while (const std::optional<RoundRequest> request = planner.next_probe()) {
    planner.finish_probe(probe.run(*request, planner.parts_of(*request).cut(*request)));
  }
}

}  // namespace jaxhetero::simulator
