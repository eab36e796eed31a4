#include "fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kNotReady = 600;

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;

  [[nodiscard]] bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
  [[nodiscard]] bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

Range range_of(const void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uint64_t>(memory);
  return {begin, begin + bytes};
}

// An event may be recorded anew, on another stream, while a stream still waits for what it stood for before.
struct Event {
  std::shared_ptr<bool> passed = std::make_shared<bool>(true);  // the latest record
};

struct Stream {
  struct Operation {
    std::string name;
    std::function<bool()> is_ready;  // null: at once
    std::function<void()> run;
  };
  std::deque<Operation> operations;
  bool busy = false;
  bool waits_for_value = false;
  bool closed = false;
  std::string failed;  // the first call that failed to add to it
};

// Something that a stream does to memory at the moment.
struct Access {
  const Stream* stream;
  Range range;
  bool writes;
  std::string name;
};

struct Driver {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, std::pair<Range, bool>> device;  // by address: range, whether it is alive
  std::map<void*, size_t> pinned;
  std::list<Access> accesses;
  std::list<Stream*> streams;
  std::deque<Event> events;  // all there ever were: a stream may look at one that is destroyed
  std::map<std::string, int64_t> calls;
  std::map<std::string, std::pair<int64_t, int>> failures;
  std::string violations;
  std::string told;
  int lost_context = kSuccess;
  double bytes_per_s = 0;
  microseconds latency{0};
};

Driver& driver() {
  static Driver& instance = *new Driver;  // outlives the streams' threads
  return instance;
}

char context_memory;
void* const kContext = &context_memory;
thread_local int context_depth = 0;

void note(const std::string& what) { driver().violations += what + "\n"; }

// Counts a call, and says whether it must fail. The mutex is held.
int enter(const std::string& name, bool needs_context = true) {
  Driver& d = driver();
  ++d.calls[name];
  if (d.lost_context != kSuccess) return d.lost_context;
  if (const auto failure = d.failures.find(name); failure != d.failures.end() && --failure->second.first == 0) {
    const int code = failure->second.second;
    d.failures.erase(failure);
    return code;
  }
  if (needs_context && context_depth == 0) {
    note(name + " was called on a thread without a context");
    return kInvalidContext;
  }
  return kSuccess;
}

// Of a call that adds work to a stream. A caller that was told of a failure knows no longer what the stream still does.
int enter_stream(void* stream, const std::string& name) {
  std::string& failed = static_cast<Stream*>(stream)->failed;
  if (!failed.empty()) note(name + " adds to a stream after " + failed + " had failed");
  const int code = enter(name);
  if (code != kSuccess && failed.empty()) failed = name;
  return code;
}

void check_device(const Range& range, const std::string& name) {
  const Driver& d = driver();
  if (d.device.empty()) return;
  for (const auto& [address, entry] : d.device) {
    if (!entry.first.holds(range)) continue;
    if (!entry.second) note(name + " uses device memory that was freed");
    return;
  }
  note(name + " uses what is not device memory");
}

void check_pinned(const Range& range, const std::string& name) {
  for (const auto& [memory, bytes] : driver().pinned) {
    if (range_of(memory, bytes).holds(range)) return;
  }
  note(name + " uses host memory that is not pinned");
}

// Runs the work of one operation with its accesses announced. The mutex is held before and after.
void access(std::unique_lock<std::mutex>& lock, const Stream* stream, const std::string& name,
            const std::vector<std::pair<Range, bool>>& ranges, size_t bytes, const std::function<void()>& work) {
  Driver& d = driver();
  std::vector<std::list<Access>::iterator> own;
  for (const auto& [range, writes] : ranges) {
    for (const Access& other : d.accesses) {
      if (other.stream != stream && (writes || other.writes) && other.range.overlaps(range)) {
        note(name + " meets " + other.name + " of another stream at the same memory");
      }
    }
    d.accesses.push_back({stream, range, writes, name});
    own.push_back(std::prev(d.accesses.end()));
  }
  microseconds delay = d.latency;
  if (d.bytes_per_s > 0) delay += microseconds(static_cast<int64_t>(1e6 * static_cast<double>(bytes) / d.bytes_per_s));
  lock.unlock();
  const steady_clock::time_point end = steady_clock::now() + delay;
  work();
  std::this_thread::sleep_until(end);
  lock.lock();
  for (const auto& entry : own) d.accesses.erase(entry);
}

void run_stream(Stream* stream) {
  Driver& d = driver();
  std::unique_lock lock(d.mutex);
  while (true) {
    while (stream->operations.empty() && !stream->closed) d.changed.wait(lock);
    if (stream->operations.empty()) break;
    const Stream::Operation operation = std::move(stream->operations.front());
    stream->operations.pop_front();
    stream->busy = true;
    // Hosts and streams write flags without telling us: look again now and then.
    while (operation.is_ready && d.lost_context == kSuccess && !operation.is_ready()) {
      stream->waits_for_value = operation.name == "cuStreamWaitValue32_v2";
      d.changed.wait_for(lock, microseconds(50));
    }
    stream->waits_for_value = false;
    if (const auto failure = d.failures.find("execution");
        failure != d.failures.end() && operation.name != "cuStreamWaitEvent" && --failure->second.first == 0) {
      d.lost_context = failure->second.second;
      d.failures.erase(failure);
    }
    if (d.lost_context == kSuccess) {
      lock.unlock();
      operation.run();
      lock.lock();
    }
    stream->busy = false;
    d.changed.notify_all();
  }
  d.streams.remove(stream);
  delete stream;
}

Stream* new_stream() {
  auto* stream = new Stream;
  driver().streams.push_back(stream);
  std::thread(run_stream, stream).detach();
  return stream;
}

void enqueue(void* stream, Stream::Operation operation) {
  static_cast<Stream*>(stream)->operations.push_back(std::move(operation));
  driver().changed.notify_all();
}

void enqueue_copy(void* stream, const std::string& name, void* to, const void* from, size_t bytes, bool to_host) {
  auto run = [=] {
    Driver& d = driver();
    std::unique_lock lock(d.mutex);
    check_device(to_host ? range_of(from, bytes) : range_of(to, bytes), name);
    check_pinned(to_host ? range_of(to, bytes) : range_of(from, bytes), name);
    access(lock, static_cast<Stream*>(stream), name, {{range_of(from, bytes), false}, {range_of(to, bytes), true}},
           bytes, [=] { std::memcpy(to, from, bytes); });
  };
  enqueue(stream, {name, nullptr, run});
}

void* to_pointer(uint64_t address) { return reinterpret_cast<void*>(address); }
std::atomic_ref<uint32_t> to_flag(uint64_t address) {
  return std::atomic_ref<uint32_t>(*static_cast<uint32_t*>(to_pointer(address)));
}

}  // namespace

// --- What tests use.

uint64_t fake_cuda_alloc(size_t bytes) {
  void* memory = std::malloc(std::max<size_t>(bytes, 1));
  const std::lock_guard lock(driver().mutex);
  const Range range = range_of(memory, bytes);
  driver().device[range.begin] = {range, true};
  return range.begin;
}

void fake_cuda_free(uint64_t pointer) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  auto& [range, alive] = d.device.at(pointer);
  if (!alive) note("device memory was freed twice");
  alive = false;
  for (const Access& access : d.accesses) {
    if (access.range.overlaps(range)) note("device memory was freed under " + access.name);
  }
}

void* fake_cuda_stream() {
  const std::lock_guard lock(driver().mutex);
  return new_stream();
}

void fake_cuda_compute(void* stream, uint64_t pointer, size_t bytes, bool writes, void (*function)(void*), void* data) {
  const std::lock_guard lock(driver().mutex);
  auto run = [=] {
    std::unique_lock inner(driver().mutex);
    const Range range{pointer, pointer + bytes};
    check_device(range, "the program");
    access(inner, static_cast<Stream*>(stream), "the program", {{range, writes}}, 0, [=] {
      if (function != nullptr) function(data);
    });
  };
  enqueue(stream, {"the program", nullptr, run});
}

bool fake_cuda_wait(void* stream, int64_t patience_ms) {
  Driver& d = driver();
  std::unique_lock lock(d.mutex);
  const auto* s = static_cast<Stream*>(stream);
  return d.changed.wait_for(lock, std::chrono::milliseconds(patience_ms),
                            [s] { return s->operations.empty() && !s->busy; });
}

void fake_cuda_set_speed(double bytes_per_s, int64_t latency_us) {
  const std::lock_guard lock(driver().mutex);
  driver().bytes_per_s = bytes_per_s;
  driver().latency = microseconds(latency_us);
}

void fake_cuda_fail(const char* function, int64_t nth, int code) {
  const std::lock_guard lock(driver().mutex);
  driver().failures[function] = {nth, code};
}

int64_t fake_cuda_call_count(const char* function) {
  const std::lock_guard lock(driver().mutex);
  return driver().calls[function];
}

const char* fake_cuda_violations() {
  const std::lock_guard lock(driver().mutex);
  driver().told = driver().violations;
  return driver().told.c_str();
}

void fake_cuda_reset() {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  d.calls.clear();
  d.failures.clear();
  d.violations.clear();
  d.lost_context = kSuccess;
}

// --- The driver. Names and parameters as in the CUDA Driver API.

FAKE_CUDA_EXPORT int cuInit(unsigned) {
  const std::lock_guard lock(driver().mutex);
  return enter("cuInit", false);
}

FAKE_CUDA_EXPORT int cuGetErrorString(int, const char** text) {
  *text = "an error of the stand-in driver";
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
  const std::lock_guard lock(driver().mutex);
  *context = kContext;
  return enter("cuDevicePrimaryCtxRetain", false);
}

FAKE_CUDA_EXPORT int cuCtxPushCurrent_v2(void* context) {
  const std::lock_guard lock(driver().mutex);
  ++driver().calls["cuCtxPushCurrent_v2"];
  if (context != kContext) return kInvalidContext;
  ++context_depth;
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuCtxPopCurrent_v2(void** context) {
  --context_depth;
  *context = kContext;
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  const std::lock_guard lock(driver().mutex);
  *least = 0;
  *greatest = -5;
  return enter("cuCtxGetStreamPriorityRange");
}

FAKE_CUDA_EXPORT int cuStreamGetCtx(void*, void** context) {
  const std::lock_guard lock(driver().mutex);
  *context = kContext;
  return enter("cuStreamGetCtx", false);
}

FAKE_CUDA_EXPORT int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter("cuStreamCreateWithPriority"); code != kSuccess) return code;
  *stream = new_stream();
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuStreamDestroy_v2(void* stream) {
  const std::lock_guard lock(driver().mutex);
  ++driver().calls["cuStreamDestroy_v2"];
  static_cast<Stream*>(stream)->closed = true;
  driver().changed.notify_all();
  return driver().lost_context;
}

FAKE_CUDA_EXPORT int cuStreamQuery(void* stream) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter("cuStreamQuery"); code != kSuccess) return code;
  const auto* s = static_cast<Stream*>(stream);
  return s->operations.empty() && !s->busy ? kSuccess : kNotReady;
}

FAKE_CUDA_EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuStreamWaitEvent"); code != kSuccess) return code;
  enqueue(stream, {"cuStreamWaitEvent", [passed = static_cast<Event*>(event)->passed] { return *passed; }, [] {}});
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuStreamWaitValue32_v2"); code != kSuccess) return code;
  check_pinned({address, address + 4}, "cuStreamWaitValue32_v2");
  enqueue(stream, {"cuStreamWaitValue32_v2",
                   [address, value] {
                     return static_cast<int32_t>(to_flag(address).load(std::memory_order_acquire) - value) >= 0;
                   },
                   [] {}});
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuStreamWriteValue32_v2"); code != kSuccess) return code;
  check_pinned({address, address + 4}, "cuStreamWriteValue32_v2");
  enqueue(stream, {"cuStreamWriteValue32_v2", nullptr,
                   [address, value] { to_flag(address).store(value, std::memory_order_release); }});
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuEventCreate(void** event, unsigned) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter("cuEventCreate"); code != kSuccess) return code;
  *event = &driver().events.emplace_back();
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuEventRecord(void* event, void* stream) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuEventRecord"); code != kSuccess) return code;
  const auto passed = std::make_shared<bool>(false);
  static_cast<Event*>(event)->passed = passed;
  enqueue(stream, {"cuEventRecord", nullptr, [passed] {
                     const std::lock_guard inner(driver().mutex);
                     *passed = true;
                   }});
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuEventDestroy_v2(void*) {
  const std::lock_guard lock(driver().mutex);
  return enter("cuEventDestroy_v2");
}

FAKE_CUDA_EXPORT int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  if (const int code = enter("cuMemHostAlloc"); code != kSuccess) return code;
  for (const Stream* stream : d.streams) {
    if (stream->waits_for_value) note("pinned memory is taken while a stream waits for a flag");
  }
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) return kInvalidValue;
  d.pinned[*memory] = bytes;
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuMemFreeHost(void* memory) {
  Driver& d = driver();
  const std::lock_guard lock(d.mutex);
  ++d.calls["cuMemFreeHost"];
  const auto entry = d.pinned.find(memory);
  if (entry == d.pinned.end()) {
    note("what is freed is not pinned memory");
    return kInvalidValue;
  }
  for (const Access& access : d.accesses) {
    if (access.range.overlaps(range_of(memory, entry->second))) note("pinned memory was freed under " + access.name);
  }
  d.pinned.erase(entry);
  std::free(memory);
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* pointer, void* memory, unsigned) {
  const std::lock_guard lock(driver().mutex);
  *pointer = reinterpret_cast<uint64_t>(memory);
  return enter("cuMemHostGetDevicePointer_v2");
}

FAKE_CUDA_EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuMemcpyDtoHAsync_v2"); code != kSuccess) return code;
  enqueue_copy(stream, "cuMemcpyDtoHAsync_v2", to, to_pointer(from), bytes, /*to_host=*/true);
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuMemcpyHtoDAsync_v2"); code != kSuccess) return code;
  enqueue_copy(stream, "cuMemcpyHtoDAsync_v2", to_pointer(to), from, bytes, /*to_host=*/false);
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuMemsetD8Async"); code != kSuccess) return code;
  auto run = [=] {
    std::unique_lock inner(driver().mutex);
    const Range range{to, to + bytes};
    check_device(range, "cuMemsetD8Async");
    access(inner, static_cast<Stream*>(stream), "cuMemsetD8Async", {{range, true}}, bytes,
           [=] { std::memset(to_pointer(to), value, bytes); });
  };
  enqueue(stream, {"cuMemsetD8Async", nullptr, run});
  return kSuccess;
}

FAKE_CUDA_EXPORT int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  const std::lock_guard lock(driver().mutex);
  if (const int code = enter_stream(stream, "cuLaunchHostFunc"); code != kSuccess) return code;
  enqueue(stream, {"cuLaunchHostFunc", nullptr, [=] { function(data); }});
  return kSuccess;
}
