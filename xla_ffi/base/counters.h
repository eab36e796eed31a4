// The counters of a process, declared once: metrics() of workers and reducers, and their Python dictionaries, follow.
// And whose they are.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace jaxhetero {

// `Number` is std::atomic<uint64_t> while counting, uint64_t in a snapshot.
template <typename Number>
struct CountersOf {
  Number sent_bytes{0};  // over sockets and through shared memory, headers and handshakes included
  Number received_bytes{0};
  Number channel_sent_bytes{0};       // part of sent_bytes: for channels to other workers (worker)
  Number channel_received_bytes{0};   // part of received_bytes, likewise
  Number lent_bytes{0};               // part of sent_bytes: payloads that the peer, or a device, reads where they lie
  Number saved_bytes{0};              // by which chunks that were sent are shorter for their code
  Number shared_connection_count{0};  // connections that moved to shared memory
  Number fabric_connection_count{0};  // connections that moved to a fabric
  Number fabric_unknown_count{0};     // messages over the fabric that belonged to no connection: late, or a stranger's
  Number fabric_retry_count{0};       // messages for which the fabric had no room at first
  Number fabric_error_count{0};       // operations of the fabric that failed
  Number refused_count{0};            // peers that connected and did not prove that they know the job token
  Number bad_frame_count{0};          // connections that ended because the peer broke the protocol
  Number checksum_mismatch_count{0};  // part of bad_frame_count: the last frame was damaged
  Number round_count{0};              // completed rounds
  Number bucket_bytes{0};             // the sizes of their buckets on the wire (worker)
  Number busy_us{0};                  // time during which at least one round ran (worker)
  Number view_count{0};               // views after the first: how often a reducer was lost or joined (worker)
  Number rate_change_count{0};        // how often the plan has followed rates that changed (worker)
  Number kept_bytes{0};          // contributions kept in case a reducer is lost; updated every few hundred ms (worker)
  Number pending_count{0};       // rounds that a program has started and none has finished (worker)
  Number pending_bytes{0};       // the memory of their totals (worker)
  Number done_wait_us{0};        // how long programs have waited to finish such rounds, added up (worker)
  Number live_reducer_count{0};  // reducers of the view (worker)
  Number live_worker_count{0};   // workers of the view (worker)
  Number joined_count{0};        // workers of the view that have joined (reducer)
  Number message_ns{0};          // what a message costs a core, as measured at the start; 0 if it was not (worker)
  Number byte_ps{0};             // what each byte of it costs beside that (worker)
};
// Each strand writes counters of its own; any thread reads them.
using Counters = CountersOf<std::atomic<uint64_t>>;
using Metrics = CountersOf<uint64_t>;

// Calls `visit(name, counter, metric)` for every counter, the last two as pointers to members.
template <typename Visit>
void for_each_counter(Visit&& visit) {
  visit("sent_bytes", &Counters::sent_bytes, &Metrics::sent_bytes);
  visit("received_bytes", &Counters::received_bytes, &Metrics::received_bytes);
  visit("channel_sent_bytes", &Counters::channel_sent_bytes, &Metrics::channel_sent_bytes);
  visit("channel_received_bytes", &Counters::channel_received_bytes, &Metrics::channel_received_bytes);
  visit("lent_bytes", &Counters::lent_bytes, &Metrics::lent_bytes);
  visit("saved_bytes", &Counters::saved_bytes, &Metrics::saved_bytes);
  visit("shared_connection_count", &Counters::shared_connection_count, &Metrics::shared_connection_count);
  visit("fabric_connection_count", &Counters::fabric_connection_count, &Metrics::fabric_connection_count);
  visit("fabric_unknown_count", &Counters::fabric_unknown_count, &Metrics::fabric_unknown_count);
  visit("fabric_retry_count", &Counters::fabric_retry_count, &Metrics::fabric_retry_count);
  visit("fabric_error_count", &Counters::fabric_error_count, &Metrics::fabric_error_count);
  visit("refused_count", &Counters::refused_count, &Metrics::refused_count);
  visit("bad_frame_count", &Counters::bad_frame_count, &Metrics::bad_frame_count);
  visit("checksum_mismatch_count", &Counters::checksum_mismatch_count, &Metrics::checksum_mismatch_count);
  visit("round_count", &Counters::round_count, &Metrics::round_count);
  visit("bucket_bytes", &Counters::bucket_bytes, &Metrics::bucket_bytes);
  visit("busy_us", &Counters::busy_us, &Metrics::busy_us);
  visit("view_count", &Counters::view_count, &Metrics::view_count);
  visit("rate_change_count", &Counters::rate_change_count, &Metrics::rate_change_count);
  visit("kept_bytes", &Counters::kept_bytes, &Metrics::kept_bytes);
  visit("pending_count", &Counters::pending_count, &Metrics::pending_count);
  visit("pending_bytes", &Counters::pending_bytes, &Metrics::pending_bytes);
  visit("done_wait_us", &Counters::done_wait_us, &Metrics::done_wait_us);
  visit("live_reducer_count", &Counters::live_reducer_count, &Metrics::live_reducer_count);
  visit("live_worker_count", &Counters::live_worker_count, &Metrics::live_worker_count);
  visit("joined_count", &Counters::joined_count, &Metrics::joined_count);
  visit("message_ns", &Counters::message_ns, &Metrics::message_ns);
  visit("byte_ps", &Counters::byte_ps, &Metrics::byte_ps);
}

inline void add(Metrics& total, const Metrics& more) {
  for_each_counter([&](const char* /*name*/, auto /*counter*/, auto metric) { total.*metric += more.*metric; });
}

inline Metrics snapshot(const Counters& counters) {
  Metrics metrics;
  for_each_counter([&](const char* /*name*/, auto counter, auto metric) { metrics.*metric = counters.*counter; });
  return metrics;
}

// Which process of which job it is that counts: known from its first view on. Set on the event loop's thread, read on
// any.
class Place {
 public:
  struct Known {
    uint64_t job_id = 0;
    uint32_t number = 0;  // a worker's rank, a reducer's number
  };

  void set(Known known) {
    number_ = known.number;
    job_id_ = known.job_id;
    is_known_ = true;
  }

  [[nodiscard]] std::optional<Known> get() const {
    if (!is_known_) return std::nullopt;
    return Known{job_id_, number_};
  }

 private:
  std::atomic<uint64_t> job_id_{0};
  std::atomic<uint32_t> number_{0};
  std::atomic<bool> is_known_{false};
};

}  // namespace jaxhetero
