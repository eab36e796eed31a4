// The traffic of an all-reduce through reducers, without sums, frames and checks. A reducer sends a worker's bytes back
// once as many bytes have come from every worker. See echo.py.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <span>
#include <vector>

namespace {

constexpr size_t kPieceBytes = size_t{256} << 10;
constexpr int kPatienceMs = 60'000;

// The bytes that a call of send() or recv() moved; 0 if it would block. Sets `failed` if the connection has ended.
size_t moved(ssize_t result, bool& failed) {
  if (result > 0) return static_cast<size_t>(result);
  failed = failed || result == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  return 0;
}

struct Worker {
  size_t received = 0;
  size_t returned = 0;
};

// A worker's transfer to and from one reducer.
struct Way {
  std::span<const std::byte> to_send;
  std::span<std::byte> to_receive;
  size_t sent = 0;
  size_t received = 0;
};

}  // namespace

// Serves `count` workers until the first of them closes its connection. Returns 0 or an error number.
extern "C" int echo_serve(const int* sockets, int count) {
  std::vector<std::byte> scratch(kPieceBytes);
  std::vector<Worker> workers(count);
  std::vector<pollfd> polled;
  for (int i = 0; i < count; ++i) polled.push_back({sockets[i], POLLIN, 0});
  for (bool failed = false;;) {
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return errno;
    for (int i = 0; i < count; ++i) {
      if ((polled[i].revents & ~POLLOUT) == 0) continue;
      workers[i].received += moved(recv(sockets[i], scratch.data(), scratch.size(), MSG_DONTWAIT), failed);
    }
    if (failed) return 0;
    const size_t complete = std::ranges::min(workers, {}, &Worker::received).received;
    for (int i = 0; i < count; ++i) {
      Worker& worker = workers[i];
      if (worker.returned < complete) {
        const size_t bytes = std::min(complete - worker.returned, scratch.size());
        worker.returned += moved(send(sockets[i], scratch.data(), bytes, MSG_DONTWAIT | MSG_NOSIGNAL), failed);
      }
      polled[i].events = static_cast<short>(POLLIN | (worker.returned < complete ? POLLOUT : 0));
    }
    if (failed) return 0;
  }
}

// Sends `bytes` bytes to `count` reducers, an equal part to each, until all have come back. At most `window` bytes to a
// reducer are in flight. Returns 0 or an error number.
extern "C" int echo_exchange(const int* sockets, int count, const std::byte* given, std::byte* result, size_t bytes,
                             size_t window) {
  std::vector<Way> ways(count);
  std::vector<pollfd> polled(count);
  for (int i = 0; i < count; ++i) {
    const size_t begin = bytes * i / count;
    const size_t size = bytes * (i + 1) / count - begin;
    ways[i] = {{given + begin, size}, {result + begin, size}};
    polled[i].fd = sockets[i];
  }
  for (bool failed = false;;) {
    bool is_done = true;
    for (int i = 0; i < count; ++i) {
      Way& way = ways[i];
      const size_t end = std::min(way.to_send.size(), way.received + window);
      if (way.sent < end) {
        const ssize_t taken = send(sockets[i], &way.to_send[way.sent], end - way.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        way.sent += moved(taken, failed);
      }
      const bool waits = way.received < way.to_receive.size();
      polled[i].events = static_cast<short>((waits ? POLLIN : 0) | (way.sent < end ? POLLOUT : 0));
      is_done = is_done && !waits;
    }
    if (failed) return ECONNRESET;
    if (is_done) return 0;
    const int ready = poll(polled.data(), polled.size(), kPatienceMs);
    if (ready == 0) return ETIMEDOUT;
    if (ready < 0 && errno != EINTR) return errno;
    for (int i = 0; i < count; ++i) {
      Way& way = ways[i];
      if ((polled[i].revents & ~POLLOUT) == 0 || way.received == way.to_receive.size()) continue;
      const std::span<std::byte> rest = way.to_receive.subspan(way.received);
      way.received += moved(recv(sockets[i], rest.data(), rest.size(), MSG_DONTWAIT), failed);
    }
    if (failed) return ECONNRESET;
  }
}
