#include "xla_ffi/reducer/partners.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "xla_ffi/base/buffers.h"

namespace jaxhetero {

void Partners::enter(const StatePlan& plan) {
  const StatePlan earlier = std::exchange(plan_, plan);
  for (auto link = links_.begin(); link != links_.end();) {
    const StatePlan::Member* const before = earlier.find(link->first);
    const StatePlan::Member* const now = plan_.find(link->first);
    const bool stays = before != nullptr && now != nullptr && now->is(*before);
    const std::shared_ptr<TcpConnection> connection = link->second.connection;
    link = stays ? std::next(link) : links_.erase(link);
    if (!stays && connection) connection->close();
  }
}

void Partners::enter(const StatePlan& plan, uint32_t view, const std::vector<uint32_t>& members) {
  enter(plan);
  own_.view = view;
  own_.members = members;
  for (auto& [number, link] : links_) {
    link.waiting.clear();
    link.is_announced = false;
    if (link.is_open) announce(number, link);
  }
}

void Partners::send(uint32_t partner, OutFrame frame) {
  if (closed_) return;
  const auto [found, is_new] = links_.try_emplace(partner);
  Link& link = found->second;
  if (is_new) {
    const StatePlan::Member* const at = plan_.find(partner);
    Result<TcpAddress> address =
        at == nullptr ? Status(Code::kInternal, "it is not in the plan") : resolve(at->address, at->port);
    // Not from here: the caller may be in the middle of something.
    if (!address.ok()) {
      context_.loop.post([this, partner, why = address.status().message()] { lose(partner, why); });
      return;
    }
    link.connection = TcpConnection::connect(context_, *address, *this, patience_);
    link.is_announced = own_.members.empty();
  }
  if (link.is_open) return link.connection->send(std::move(frame));
  link.waiting.push_back(std::move(frame));
}

void Partners::announce(uint32_t partner, const Link& link) {
  own_.to = partner;
  link.connection->send(OutFrame::control(FrameType::kPartner, encode(own_)));
}

std::map<uint32_t, Partners::Link>::iterator Partners::link_of(const Connection& connection) {
  return std::ranges::find_if(links_, [&](const auto& entry) { return entry.second.connection.get() == &connection; });
}

void Partners::on_open(Connection& connection) {
  const auto found = link_of(connection);
  if (found == links_.end()) return;
  Link& link = found->second;
  link.is_open = true;
  announce(found->first, link);
  for (OutFrame& frame : std::exchange(link.waiting, {})) link.connection->send(std::move(frame));
}

Status Partners::on_header(Connection& connection, const FrameHeader& header, std::vector<iovec>& into) {
  const auto found = link_of(connection);
  if (found == links_.end()) return {Code::kProtocol, "it was given up"};
  const bool is_reply = header.type == FrameType::kBackedUp || header.type == FrameType::kCopied;
  if (!is_reply && (header.type != FrameType::kPartner || own_.members.empty())) {
    return {Code::kProtocol, "it sent a frame of type " + std::to_string(int(header.type))};
  }
  found->second.control.resize(header.payload_bytes);
  into = as_pieces(found->second.control);
  return {};
}

Status Partners::on_frame(Connection& connection, const FrameHeader& header) {
  const auto found = link_of(connection);
  if (found == links_.end()) return {};
  if (header.type == FrameType::kPartner) {
    found->second.is_announced = header.round == own_.view;
  } else if (found->second.is_announced) {
    callbacks_.on_reply(found->first, header);
  }
  return {};
}

void Partners::on_close(Connection& connection, const Status& why) {
  if (const auto found = link_of(connection); found != links_.end()) lose(found->first, why.message());
}

void Partners::lose(uint32_t partner, const std::string& why) {
  if (closed_ || links_.erase(partner) == 0) return;
  callbacks_.on_lost(partner, why);
}

void Partners::close() {
  closed_ = true;
  for (auto& [number, link] : links_) {
    if (link.connection) link.connection->close();
  }
}

}  // namespace jaxhetero
