// The part of the coordinator that starts a job: it admits processes, and tells who is missing.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "xla_ffi/membership/coordinator.h"
#include "xla_ffi/membership/names.h"
#include "xla_ffi/transport/tcp_address.h"
#include "xla_ffi/transport/tcp_context.h"
#include "xla_ffi/wire/auth.h"

namespace jaxhetero {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kMissingReportInterval{3000};  // the pause between reports of who is missing

}  // namespace

// A name may stand for addresses that this host lacks: of IPv6 where that is turned off, or of another host.
Status Coordinator::bind(const std::vector<TcpAddress>& addresses) {
  std::vector<TcpAddress> own;
  std::ranges::copy_if(addresses, std::back_inserter(own), &TcpAddress::is_own);
  if (own.empty()) own.push_back(addresses.front());  // the address whose error is reported
  for (const TcpAddress& address : own) {
    auto listener = TcpListener::bind(context_.loop, address, "the coordinator");
    if (!listener.ok()) return listener.status();
    listeners_.push_back(std::move(*listener));
  }
  return {};
}

Status Coordinator::start(milliseconds patience, milliseconds timeout) {
  patience_ = patience;
  timeout_ = timeout;
  context_.loop.after(patience, [this] { give_up(); });
  context_.loop.after(kMissingReportInterval, [this] { report_missing(); });
  for (const auto& listener : listeners_) {
    const Status status =
        listener->start([this](Fd socket, const TcpAddress& peer, const std::shared_ptr<void>& admission) {
          auto connection = TcpConnection::accept(context_, std::move(socket), peer, *this, admission);
          guests_[connection.get()].connection = connection;
        });
    if (!status.ok()) return status;
  }
  return {};
}

Status Coordinator::admit(Guest& guest, Registration registration) {
  if (guest.is_registered()) return {Code::kProtocol, "it registered twice"};
  if (registration.address.empty()) registration.address = guest.connection->peer_host();
  if (Status refusal = check(registration); !refusal.ok()) {
    last_refusal_ = named(registration) + " was refused: " + refusal.message();
    log_.add(Severity::kWarning, last_refusal_);
    refuse(*guest.connection, refusal);
    return {};
  }
  guest.registration = std::move(registration);
  guest.phase = Guest::Phase::kRegistered;
  if (has_visitors_) guest.connection->send(OutFrame::control(FrameType::kAsk, {}));
  if (phase_ != Phase::kGathering) {  // it joins later: a new view will have it once it is ready
    if (guest.registration.rank >= 0) guest.phase = Guest::Phase::kCandidate;
    if (guest.is_reducer()) give_number(guest.registration);
    view_.own_index = guest.is_reducer() ? guest.number() : static_cast<uint32_t>(guest.registration.rank);
    view_.is_candidate = true;
    guest.connection->send(OutFrame::control(FrameType::kView, encode(view_)));
    return {};
  }
  consider_start();
  return {};
}

void Coordinator::consider_start() {
  if (count(Role::kWorker) == workers_at_start(job_) && count(Role::kReducer) == reducers_at_start(job_)) {
    tell_reducers();
  }
}

Status Coordinator::check(const Registration& registration) const {
  const bool is_dedicated = registration.role == Role::kReducer && registration.rank < 0;
  const bool may_join_later = job_.failover && !has_released_ && (is_dedicated || job_.is_elastic()) &&
                              (phase_ == Phase::kStarted || phase_ == Phase::kChanging);
  if (phase_ == Phase::kFailed) return fault_;
  if (phase_ != Phase::kGathering && !may_join_later) {
    return {Code::kInvalidArgument, "this job has started already, with everybody it needs"};
  }
  if (registration.version != version_) {
    return {Code::kVersionMismatch, named(registration) + " runs jaxhetero " + registration.version + ", rank 0 runs " +
                                        version_ + "; install the same version everywhere"};
  }
  const bool colocated = registration.role == Role::kReducer && registration.rank >= 0;
  if (registration.role == Role::kWorker) {
    if (registration.job != job_) {
      return {Code::kVersionMismatch, named(registration) + " was started with settings other than rank 0's: " +
                                          difference(registration.job, job_) + "; give all of them the same"};
    }
    const uint32_t worker_count = phase_ == Phase::kGathering ? workers_at_start(job_) : job_.worker_count;
    if (registration.rank < 0 || static_cast<uint32_t>(registration.rank) >= worker_count) {
      return {Code::kInvalidArgument, named(registration) + " is not one of " + std::to_string(worker_count)};
    }
  } else if (!colocated && job_.reducer_count == 0) {
    return {Code::kInvalidArgument, "this job was started without dedicated reducers"};
  } else if (!colocated && registration.number >= 0) {
    const auto number = static_cast<uint32_t>(registration.number);
    if (number >= job_.reducer_count) {
      return {Code::kInvalidArgument, named(registration) + " is not one of the " + std::to_string(job_.reducer_count) +
                                          " dedicated reducers of this job, which have the numbers from 0"};
    }
    if (const Guest* holder = find_reducer(number); holder != nullptr) {
      return {Code::kInvalidArgument, named(registration) + " is taken already, by " + holder->connection->peer() +
                                          "; give every reducer a number of its own, or none"};
    }
  } else if (colocated && static_cast<uint32_t>(registration.rank) >= job_.colocated_count) {
    return {Code::kInvalidArgument,
            "this job has reducers inside its first " + std::to_string(job_.colocated_count) + " workers only"};
  }
  for (const auto& [connection, guest] : guests_) {
    if (!guest.is_registered() || guest.registration.role != registration.role || registration.rank < 0) continue;
    if (guest.phase == Guest::Phase::kReleased) continue;
    if (may_join_later && guest.is_member()) continue;  // it waits until the rank is free
    if (guest.registration.rank == registration.rank) {
      return {Code::kInvalidArgument, named(registration) + " is taken already, by " + connection->peer() +
                                          "; give every worker a rank of its own"};
    }
  }
  if (registration.role == Role::kReducer && !colocated && dedicated_count() == job_.reducer_count) {
    return {Code::kInvalidArgument, "this job has its " + std::to_string(job_.reducer_count) + " reducers already"};
  }
  return {};
}

// The number that a dedicated reducer asks for, else the lowest free one. Those in workers come behind, by rank.
void Coordinator::give_number(Registration& reducer) const {
  if (reducer.number >= 0) return;
  if (reducer.rank >= 0) {
    reducer.number = static_cast<int32_t>(job_.reducer_count) + reducer.rank;
    return;
  }
  std::set<uint32_t> taken;
  for (const auto& [connection, guest] : guests_) {
    if (guest.is_reducer() && guest.is_member()) taken.insert(guest.number());
  }
  uint32_t number = 0;
  while (taken.contains(number)) ++number;
  reducer.number = static_cast<int32_t>(number);
}

size_t Coordinator::dedicated_count() const {
  return static_cast<size_t>(std::ranges::count_if(guests_, [](const auto& entry) {
    return entry.second.is_reducer() && entry.second.is_member() && entry.second.registration.rank < 0;
  }));
}

void Coordinator::tell_reducers() {
  phase_ = Phase::kReducersToldMembers;
  const Nonce random = fresh_nonce().value_or(Nonce{});
  std::memcpy(&view_.job_id, random.data(), sizeof view_.job_id);
  view_.job = job_;
  view_.worker_hosts.resize(job_.worker_count);
  view_.worker_endpoints.resize(job_.worker_count);
  view_.rail_count = rail_count();
  view_.strand_count = strand_count();
  for (auto& [connection, guest] : guests_) {
    if (guest.is_worker()) {
      const Registration& worker = guest.registration;
      view_.worker_hosts[static_cast<size_t>(worker.rank)] = worker.host_name;
      view_.worker_endpoints[static_cast<size_t>(worker.rank)] = {worker.address, worker.port};
    } else if (guest.is_reducer()) {
      give_number(guest.registration);
      add_to_view(guest, 0);
    }
  }
  note_members();
  for (auto& [connection, guest] : guests_) {
    if (!guest.is_reducer()) continue;
    view_.own_index = guest.number();
    view_.is_candidate = false;
    connection->send(OutFrame::control(FrameType::kView, encode(view_)));
  }
  if (view_.reducers.empty()) tell_view();
}

uint32_t Coordinator::rail_count() const {
  uint32_t most = 1;
  for (const auto& [connection, guest] : guests_) {
    if (guest.is_registered()) most = std::max(most, guest.registration.rail_count);
  }
  return most;
}

// As many as every process can run, if the job does not say how many; but the same number, and at least one, for each
// interface.
uint32_t Coordinator::strand_count() const {
  if (job_.strands > 0) return job_.strands;
  uint32_t least = kMaxStrands;
  for (const auto& [connection, guest] : guests_) {
    if (guest.is_registered()) least = std::min(least, guest.registration.strand_count);
  }
  return std::max(least / view_.rail_count, 1u) * view_.rail_count;
}

std::string Coordinator::missing() const {
  std::string text;
  if (job_.worker_count == 0) append_list(text, "every worker");  // nobody has told how many there are
  for (uint32_t rank = 0; rank < workers_at_start(job_); ++rank) {
    const auto has_rank = [rank](const auto& entry) {
      return entry.second.is_worker() && entry.second.registration.rank == static_cast<int32_t>(rank);
    };
    if (std::ranges::none_of(guests_, has_rank)) append_list(text, "rank " + std::to_string(rank));
  }
  const size_t reducers = count(Role::kReducer);
  const uint32_t wanted = reducers_at_start(job_);
  if (reducers < wanted) {
    append_list(text, std::to_string(wanted - reducers) + " of " + std::to_string(wanted) + " reducers");
  }
  if (text.empty()) {
    for (const auto& [connection, guest] : guests_) {
      const bool is_awaited = guest.is_reducer() && guest.phase != Guest::Phase::kReady;
      if (is_awaited) append_list(text, named(guest.registration) + " to get ready");
    }
  }
  if (!last_refusal_.empty()) text += " (" + last_refusal_ + ")";
  return text;
}

void Coordinator::report_missing() {
  if (phase_ > Phase::kReducersToldMembers) return;
  const std::string text = "waiting for " + missing();
  for (auto& [connection, guest] : guests_) {
    if (guest.is_registered()) connection->send(OutFrame::control(FrameType::kWaiting, encode(text)));
  }
  context_.loop.after(kMissingReportInterval, [this] { report_missing(); });
}

void Coordinator::give_up() {
  if (phase_ > Phase::kReducersToldMembers) return;
  refuse_all({Code::kStartTimeout,
              "the job did not start within " + std::to_string(patience_.count()) + " ms: missing " + missing()});
}

}  // namespace jaxhetero
