#include "xla_ffi/wire/messages.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>
#include <utility>

#include "xla_ffi/wire/checksum.h"

namespace jaxhetero {
namespace {

constexpr size_t kMaxTextBytes = 8192;
constexpr size_t kMaxNameBytes = 255;
constexpr uint16_t kFrameMagic = 0x4a48;  // "HJ" on the wire
constexpr size_t kFlagsAt = 3;
constexpr size_t kChecksumAt = kHeaderBytes - sizeof(uint32_t);  // of what is lent, its place
constexpr uint8_t kLastFlag = 1;
constexpr uint8_t kChecksumFlag = 2;
constexpr uint8_t kLentFlag = 4;

class Writer {
 public:
  explicit Writer(Bytes& bytes) : bytes_(bytes) {}

  template <typename T>
    requires std::is_unsigned_v<T>
  void number(T value) {
    for (size_t i = 0; i < sizeof(T); ++i)
      bytes_.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
  }
  void text(std::string_view text) {
    text = text.substr(0, kMaxNameBytes);
    number(static_cast<uint16_t>(text.size()));
    for (char c : text) bytes_.push_back(static_cast<std::byte>(c));
  }

 private:
  Bytes& bytes_;
};

// Reads numbers until the bytes run out; after that everything is zero and ok() is false.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
    requires std::is_unsigned_v<T>
  T number() {
    if (bytes_.size() < sizeof(T)) {
      ok_ = false;
      return 0;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= std::to_integer<uint64_t>(bytes_[i]) << (8 * i);
    bytes_ = bytes_.subspan(sizeof(T));
    return static_cast<T>(value);
  }
  std::string text() {
    const size_t length = number<uint16_t>();
    if (length > kMaxNameBytes || length > bytes_.size()) {
      ok_ = false;
      return {};
    }
    std::string text = decode_text(bytes_.first(length));
    bytes_ = bytes_.subspan(length);
    return text;
  }
  [[nodiscard]] bool ok() const { return ok_; }
  [[nodiscard]] std::span<const std::byte> rest() const { return bytes_; }
  [[nodiscard]] bool finished() const { return ok_ && bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

Status malformed(std::string what) { return {Code::kProtocol, "malformed " + std::move(what)}; }

bool carries_chunk(FrameType type) { return type == FrameType::kPush || type == FrameType::kResult; }

Status check(const OpSpec& spec) {
  if (spec.kind < Kind::kSum || spec.kind > Kind::kMin) return malformed("op: unknown kind");
  if (item_bytes(spec.dtype) == 0) return malformed("op: unknown dtype");
  if (spec.root >= kMaxWorkers) return malformed("op: impossible root");
  if (spec.total_count > std::numeric_limits<uint64_t>::max() / 16) return malformed("op: impossible total count");
  return {};
}

void write(Writer& writer, const JobShape& job) {
  writer.number(job.worker_count);
  writer.number(job.reducer_count);
  writer.number(job.colocated_count);
  writer.number(job.chunk_bytes);
  writer.number(job.window_chunks);
  writer.number(static_cast<uint8_t>(job.checksums));
  writer.number(static_cast<uint8_t>(job.failover));
  writer.number(static_cast<uint8_t>(job.measure_rates));
}

JobShape read_job(Reader& reader) {
  JobShape job;
  job.worker_count = reader.number<uint32_t>();
  job.reducer_count = reader.number<uint32_t>();
  job.colocated_count = reader.number<uint32_t>();
  job.chunk_bytes = reader.number<uint32_t>();
  job.window_chunks = reader.number<uint32_t>();
  job.checksums = reader.number<uint8_t>() != 0;
  job.failover = reader.number<uint8_t>() != 0;
  job.measure_rates = reader.number<uint8_t>() != 0;
  return job;
}

}  // namespace

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::kSum:
      return "sum";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kMax:
      return "maximum";
    case Kind::kMin:
      return "minimum";
  }
  return "?";
}

std::string describe(const OpSpec& spec) {
  std::string text = std::string(kind_name(spec.kind)) + " of " + std::string(dtype_name(spec.dtype)) + "[" +
                     std::to_string(spec.total_count) + "]";
  if (spec.leaf_count != 1) text += " in " + std::to_string(spec.leaf_count) + " leaves";
  if (spec.kind == Kind::kBroadcast) text += " from rank " + std::to_string(spec.root);
  if (spec.call_bytes > spec.total_count * item_bytes(spec.dtype)) {
    text += " in a call of " + std::to_string(spec.call_bytes) + " bytes";
  }
  return text;
}

std::string difference(const JobShape& job, const JobShape& from) {
  std::string text;
  const auto compare = [&](const char* name, uint32_t own, uint32_t other) {
    if (own == other) return;
    text += (text.empty() ? "" : ", ") + (name + (" is " + std::to_string(own)) + ", not " + std::to_string(other));
  };
  compare("worker_count", job.worker_count, from.worker_count);
  compare("reducer_count", job.reducer_count, from.reducer_count);
  compare("colocated_count", job.colocated_count, from.colocated_count);
  compare("chunk_bytes", job.chunk_bytes, from.chunk_bytes);
  compare("window_chunks", job.window_chunks, from.window_chunks);
  compare("checksum", job.checksums ? 1 : 0, from.checksums ? 1 : 0);
  compare("failover", job.failover ? 1 : 0, from.failover ? 1 : 0);
  compare("measure_rates", job.measure_rates ? 1 : 0, from.measure_rates ? 1 : 0);
  return text;
}

uint32_t total_reducer_count(const JobShape& job) { return job.reducer_count + job.colocated_count; }

size_t most_chunk_bytes(const JobShape& job) { return job.chunk_bytes > 0 ? job.chunk_bytes : kMostAutoChunkBytes; }

size_t least_chunk_bytes(const JobShape& job) { return job.chunk_bytes > 0 ? job.chunk_bytes : kLeastAutoChunkBytes; }

uint64_t most_chunks_under_way(const JobShape& job, size_t chunk_bytes) {
  if (job.window_chunks > 0) return job.window_chunks;
  return std::max<uint64_t>(2, kMostWindowBytes / (kHeaderBytes + chunk_bytes));
}

EncodedHeader encode(const FrameHeader& header) {
  EncodedHeader encoded;
  size_t at = 0;
  const auto put = [&](auto value) {
    for (size_t i = 0; i < sizeof(value); ++i) {
      encoded[at++] = static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i));
    }
  };
  put(kFrameMagic);
  put(static_cast<uint8_t>(header.type));
  put(static_cast<uint8_t>((header.last ? kLastFlag : 0) | (header.has_checksum ? kChecksumFlag : 0) |
                           (header.is_lent ? kLentFlag : 0)));
  put(header.payload_bytes);
  put(header.count);
  put(header.op);
  put(header.round);
  put(header.offset);
  put(header.is_lent ? header.place : header.checksum);
  return encoded;
}

uint32_t start_checksum(EncodedHeader& header) {
  header[kFlagsAt] |= std::byte{kChecksumFlag};
  return crc32c(0, std::span(header).first<kChecksumAt>());
}

void set_checksum(EncodedHeader& header, uint32_t checksum) {
  for (size_t i = 0; i < sizeof checksum; ++i) header[kChecksumAt + i] = static_cast<std::byte>(checksum >> (8 * i));
}

void set_place(EncodedHeader& header, uint32_t place) {
  header[kFlagsAt] |= std::byte{kLentFlag};
  set_checksum(header, place);
}

Result<FrameHeader> decode(std::span<const std::byte, kHeaderBytes> bytes) {
  Reader reader(bytes);
  if (reader.number<uint16_t>() != kFrameMagic) return malformed("frame: it does not start like one");
  FrameHeader header;
  const auto type = reader.number<uint8_t>();
  if (type < static_cast<uint8_t>(FrameType::kRegister) || type > static_cast<uint8_t>(kLastFrameType)) {
    return malformed("frame: unknown type " + std::to_string(type));
  }
  header.type = static_cast<FrameType>(type);
  const auto flags = reader.number<uint8_t>();
  if (flags > (kLastFlag | kLentFlag)) return malformed("frame: unknown flags");
  header.last = (flags & kLastFlag) != 0;
  header.has_checksum = (flags & kChecksumFlag) != 0;
  header.is_lent = (flags & kLentFlag) != 0;
  header.payload_bytes = reader.number<uint32_t>();
  header.count = reader.number<uint32_t>();
  header.op = reader.number<uint64_t>();
  header.round = reader.number<uint64_t>();
  header.offset = reader.number<uint64_t>();
  (header.is_lent ? header.place : header.checksum) = reader.number<uint32_t>();
  if (header.is_lent && !carries_chunk(header.type)) return malformed("frame: it lends what is no chunk");
  if (header.payload_bytes > (carries_chunk(header.type) ? kMaxChunkBytes : kMaxControlBytes)) {
    return malformed("frame: a payload of " + std::to_string(header.payload_bytes) + " bytes");
  }
  return header;
}

Bytes encode(const Registration& registration) {
  Bytes bytes;
  Writer writer(bytes);
  writer.number(static_cast<uint8_t>(registration.role));
  writer.number(static_cast<uint32_t>(registration.rank));
  write(writer, registration.job);
  writer.text(registration.version);
  writer.text(registration.host_name);
  writer.number(registration.port);
  writer.text(registration.address);
  return bytes;
}

Result<Registration> decode_registration(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Registration registration;
  registration.role = static_cast<Role>(reader.number<uint8_t>());
  registration.rank = static_cast<int32_t>(reader.number<uint32_t>());
  registration.job = read_job(reader);
  registration.version = reader.text();
  registration.host_name = reader.text();
  registration.port = reader.number<uint16_t>();
  registration.address = reader.text();
  const bool known_role = registration.role == Role::kWorker || registration.role == Role::kReducer;
  if (!reader.finished() || !known_role) return malformed("registration");
  return registration;
}

Bytes encode(const View& view) {
  Bytes bytes;
  Writer writer(bytes);
  writer.number(view.job_id);
  writer.number(view.number);
  write(writer, view.job);
  writer.number(view.own_index);
  writer.number(static_cast<uint32_t>(view.worker_hosts.size()));
  for (const std::string& host : view.worker_hosts) writer.text(host);
  writer.number(static_cast<uint32_t>(view.reducers.size()));
  for (const View::Reducer& reducer : view.reducers) {
    writer.number(reducer.number);
    writer.text(reducer.address);
    writer.number(reducer.port);
    writer.text(reducer.host_name);
    writer.number(static_cast<uint32_t>(reducer.colocated_rank));
  }
  writer.number(static_cast<uint32_t>(view.resume.size()));
  for (const View::Resume& resume : view.resume) {
    writer.number(resume.op);
    writer.number(resume.round);
  }
  return bytes;
}

Result<View> decode_view(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  View view;
  view.job_id = reader.number<uint64_t>();
  view.number = reader.number<uint32_t>();
  view.job = read_job(reader);
  view.own_index = reader.number<uint32_t>();
  const auto worker_count = reader.number<uint32_t>();
  if (worker_count == 0 || worker_count > kMaxWorkers || worker_count != view.job.worker_count) {
    return malformed("view");
  }
  for (uint32_t rank = 0; rank < worker_count && reader.ok(); ++rank) view.worker_hosts.push_back(reader.text());
  const auto reducer_count = reader.number<uint32_t>();
  if (reducer_count > kMaxReducers) return malformed("view");
  for (uint32_t index = 0; index < reducer_count && reader.ok(); ++index) {
    View::Reducer reducer;
    reducer.number = reader.number<uint32_t>();
    reducer.address = reader.text();
    reducer.port = reader.number<uint16_t>();
    reducer.host_name = reader.text();
    reducer.colocated_rank = static_cast<int32_t>(reader.number<uint32_t>());
    view.reducers.push_back(std::move(reducer));
  }
  const auto resume_count = reader.number<uint32_t>();
  if (resume_count > kMaxOps) return malformed("view");
  for (uint32_t i = 0; i < resume_count && reader.ok(); ++i) {
    const auto op = reader.number<uint64_t>();
    view.resume.push_back({op, reader.number<uint64_t>()});
  }
  const bool sane = view.job.chunk_bytes <= kMaxChunkBytes && view.job.chunk_bytes % 64 == 0;
  if (!reader.finished() || !sane) return malformed("view");
  return view;
}

Bytes encode(const OpDescription& description) {
  Bytes bytes;
  Writer writer(bytes);
  const OpSpec& spec = description.spec;
  writer.number(static_cast<uint8_t>(spec.kind));
  writer.number(static_cast<uint8_t>(spec.dtype));
  writer.number(spec.root);
  writer.number(spec.leaf_count);
  writer.number(spec.total_count);
  writer.number(spec.signature);
  writer.number(spec.call_bytes);
  const Bytes text = encode(description.text);
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}

Result<OpDescription> decode_op_description(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  OpDescription description;
  OpSpec& spec = description.spec;
  spec.kind = static_cast<Kind>(reader.number<uint8_t>());
  spec.dtype = static_cast<DType>(reader.number<uint8_t>());
  spec.root = reader.number<uint32_t>();
  spec.leaf_count = reader.number<uint32_t>();
  spec.total_count = reader.number<uint64_t>();
  spec.signature = reader.number<uint32_t>();
  spec.call_bytes = reader.number<uint64_t>();
  if (!reader.ok()) return malformed("description of an op");
  if (Status status = check(spec); !status.ok()) return status;
  description.text = decode_text(reader.rest());
  return description;
}

Bytes encode(const Join& join) {
  Bytes bytes;
  Writer writer(bytes);
  writer.number(join.job_id);
  writer.number(join.rank);
  writer.number(join.view);
  writer.number(join.plan);
  return bytes;
}

Result<Join> decode_join(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Join join;
  join.job_id = reader.number<uint64_t>();
  join.rank = reader.number<uint32_t>();
  join.view = reader.number<uint32_t>();
  join.plan = reader.number<uint64_t>();
  if (!reader.finished()) return malformed("join");
  return join;
}

Bytes encode(const SharedOffer& offer) {
  Bytes bytes;
  Writer writer(bytes);
  writer.number(offer.process);
  writer.number(offer.descriptor);
  bytes.insert(bytes.end(), offer.key.begin(), offer.key.end());
  return bytes;
}

Result<SharedOffer> decode_shared_offer(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  SharedOffer offer;
  offer.process = reader.number<uint32_t>();
  offer.descriptor = reader.number<uint32_t>();
  for (std::byte& byte : offer.key) byte = std::byte{reader.number<uint8_t>()};
  if (!reader.finished()) return malformed("offer of shared memory");
  return offer;
}

Bytes encode(const Lost& lost) {
  Bytes bytes;
  Writer writer(bytes);
  writer.number(lost.view);
  writer.number(lost.reducer);
  writer.text(lost.why);
  return bytes;
}

Result<Lost> decode_lost(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Lost lost;
  lost.view = reader.number<uint32_t>();
  lost.reducer = reader.number<uint32_t>();
  lost.why = reader.text();
  if (!reader.finished()) return malformed("report of a lost reducer");
  return lost;
}

Bytes encode(const Halt& halt) {
  Bytes bytes;
  Writer writer(bytes);
  writer.number(halt.view);
  writer.text(halt.why);
  return bytes;
}

Result<Halt> decode_halt(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Halt halt;
  halt.view = reader.number<uint32_t>();
  halt.why = reader.text();
  if (!reader.finished()) return malformed("halt");
  return halt;
}

Bytes encode(const Progress& progress) {
  Bytes bytes;
  Writer writer(bytes);
  writer.number(progress.view);
  writer.number(static_cast<uint32_t>(progress.ops.size()));
  for (const Progress::OpProgress& op : progress.ops) {
    writer.number(op.op);
    writer.number(op.completed_count);
  }
  return bytes;
}

Result<Progress> decode_progress(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Progress progress;
  progress.view = reader.number<uint32_t>();
  const auto count = reader.number<uint32_t>();
  if (count > kMaxOps) return malformed("progress");
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    const auto op = reader.number<uint64_t>();
    progress.ops.push_back({op, reader.number<uint64_t>()});
  }
  if (!reader.finished()) return malformed("progress");
  return progress;
}

Bytes encode(const Status& fault) {
  Bytes bytes = encode(fault.message());
  bytes.insert(bytes.begin(), static_cast<std::byte>(fault.code()));
  return bytes;
}

Status decode_fault(std::span<const std::byte> bytes) {
  if (bytes.empty()) return malformed("fault");
  const auto code = std::to_integer<uint8_t>(bytes[0]);
  if (code == 0 || code >= kCodeCount) return malformed("fault");
  return {static_cast<Code>(code), decode_text(bytes.subspan(1))};
}

Bytes encode(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text.substr(0, kMaxTextBytes)));
  return {bytes.begin(), bytes.end()};
}

std::string decode_text(std::span<const std::byte> bytes) {
  std::string text;
  for (std::byte byte : bytes.first(std::min(bytes.size(), kMaxTextBytes))) {
    const char c = static_cast<char>(byte);
    text.push_back(c >= ' ' && c <= '~' ? c : '?');
  }
  return text;
}

}  // namespace jaxhetero
