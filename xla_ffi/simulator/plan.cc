#include "xla_ffi/simulator/plan.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

namespace jaxhetero::simulator {
namespace {

using Clock = EventLoop::Clock;

// A round of the measurement as long as its bytes take at the interfaces.
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
    for (const RoundPart& part : parts) strands_.push_back(part.strand);
    Clock::time_point last;
    for (const Shard& shard : request.plan->cut(request.op, request.spec.total_count, sizeof(float))) {
      const View::Reducer& reducer = view_.reducers[shard.reducer];
      const uint64_t bytes = shard.count * sizeof(float);
      const Clock::time_point end = after(static_cast<double>(bytes) / link_rate(reducer, *request.plan));
      outcome.entry.parts.push_back({reducer.number, bytes, end});
      last = std::max(last, end);
    }
    // Each interface that carries a part carries as much as the others.
    const std::vector<double>& rates = cluster_.hosts[job_.worker_hosts[0]].interfaces;
    const auto rate_of = [&](uint32_t strand) { return rates[strand % rates.size()]; };
    const double slowest = rate_of(std::ranges::min(strands_, {}, rate_of));
    for (const uint32_t strand : strands_) {
      outcome.strand_ends.emplace_back(strand, Clock::time_point(std::chrono::duration_cast<Clock::duration>(
                                                   last.time_since_epoch() * (slowest / rate_of(strand)))));
    }
    return outcome;
  }

 private:
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

uint32_t part_count(const JobConfig& job, const BucketConfig& bucket) {
  OpSpec spec;
  spec.dtype = bucket.dtype;
  spec.total_count = bucket.count;
  return PartPlan(job.shape, std::vector<uint32_t>(job.strand_count, 1)).part_count(spec);
}

void prepare(Planner& planner, const View& view, const Cluster& cluster, const JobConfig& job) {
  planner.enter(view);
  NoiselessProbe probe(view, cluster, job);
  while (const std::optional<RoundRequest> request = planner.next_probe()) {
    planner.finish_probe(probe.run(*request, planner.parts_of(*request).cut(*request)));
  }
}

}  // namespace jaxhetero::simulator
