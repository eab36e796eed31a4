#include "xla_ffi/ffi/exchange_handler.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla_ffi/base/buffers.h"
#include "xla_ffi/base/status.h"
#include "xla_ffi/channel/channels.h"
#include "xla_ffi/channel/transfer.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/worker/communicator.h"
#include "xla_ffi/worker/round.h"

namespace jaxhetero {
namespace {

namespace ffi = xla::ffi;
using Direction = Transfer::Direction;

struct ExchangeSite : CallSite {
  static ffi::TypeId id;
  std::string shapes;
  std::vector<int64_t> ranks;
  size_t group_size = 0;
};
ffi::TypeId ExchangeSite::id = {};

ffi::ErrorOr<std::unique_ptr<ExchangeSite>> instantiate_exchange(ffi::Dictionary dictionary) {
  ffi::ErrorOr<std::unique_ptr<ExchangeSite>> site = instantiate<ExchangeSite>(dictionary);
  if (!site.has_value()) return site;
  ExchangeAttributes attributes;
  bool is_complete = true;
  for_each_exchange_attribute([&]<typename T>(const char* name, T ExchangeAttributes::* member) {
    const ffi::ErrorOr<T> value = dictionary.get<T>(name);
    if (value.has_value()) attributes.*member = *value;
    is_complete = is_complete && value.has_value();
  });
  const auto group_size = static_cast<size_t>(attributes.group_size);
  if (!is_complete || attributes.ranks.size() != static_cast<size_t>((*site)->worker_count) ||
      (group_size > 0 && attributes.ranks.size() % group_size != 0)) {
    return ffi::Unexpected(to_error({Code::kInternal, "the custom call of an exchange lacks attributes of its own"}));
  }
  (*site)->shapes = attributes.shapes;
  (*site)->ranks.assign(attributes.ranks.begin(), attributes.ranks.end());
  (*site)->group_size = group_size;
  return site;
}

// One message of a call: a row of the operands that goes to `rank`, or of the results that comes from there.
struct Message {
  Direction direction;
  int64_t rank;
  size_t row;
};

std::vector<Message> messages_of(const ExchangeSite& site, int64_t own) {
  std::vector<Message> messages;
  if (site.group_size == 0) {
    for (size_t rank = 0; rank < site.ranks.size(); ++rank) {
      if (site.ranks[rank] == own) messages.push_back({Direction::kSend, static_cast<int64_t>(rank), 0});
    }
    if (const int64_t source = site.ranks[own]; source >= 0) messages.push_back({Direction::kReceive, source, 0});
    return messages;
  }
  const auto place = static_cast<size_t>(std::ranges::find(site.ranks, own) - site.ranks.begin());
  const size_t first = place - place % site.group_size;
  for (size_t row = 0; row < site.group_size && first + row < site.ranks.size(); ++row) {
    messages.push_back({Direction::kSend, site.ranks[first + row], row});
    messages.push_back({Direction::kReceive, site.ranks[first + row], row});
  }
  return messages;
}

// The operands or the results of one run of a call.
struct Arrays {
  std::vector<iovec> buffers;

  // Row `row` of so many in each.
  [[nodiscard]] Leaves row(size_t row, size_t row_count) const {
    Leaves leaves;
    for (const iovec& buffer : buffers) {
      const size_t bytes = buffer.iov_len / row_count;
      leaves.append(static_cast<std::byte*>(buffer.iov_base) + row * bytes, bytes);
    }
    return leaves;
  }
};

struct Memory {
  Arrays operands;
  Arrays results;
};

Result<Memory> memory_of(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, size_t row_count) {
  Memory memory;
  if (args.size() != rets.size()) return Status(Code::kInternal, "an exchange without a result for each operand");
  for (size_t i = 0; i < args.size(); ++i) {
    const auto operand = args.get<ffi::AnyBuffer>(i);
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (!operand.has_value() || !result.has_value() || operand->size_bytes() != (*result)->size_bytes() ||
        operand->size_bytes() % row_count != 0) {
      return Status(Code::kInternal, "XLA passed an operand or a result of another size than the exchange has");
    }
    memory.operands.buffers.push_back({operand->untyped_data(), operand->size_bytes()});
    memory.results.buffers.push_back({(*result)->untyped_data(), (*result)->size_bytes()});
  }
  return memory;
}

// The promise of one run of a call. It is set once all messages have ended: the network touches the program's memory
// until then.
class OpenExchange {
 public:
  OpenExchange(Communicator& communicator, ffi::Promise promise, size_t message_count)
      : communicator_(communicator), promise_(std::move(promise)), open_count_(message_count) {}

  // On a thread that XLA may use: it goes on with the program where the promise is set.
  void end(const Status& how) {
    if (how.ok()) {
      promise_.SetAvailable();
    } else {
      promise_.SetError(to_error(how));
    }
  }

  static void end_message(const std::shared_ptr<OpenExchange>& self, const Status& how) {
    {
      const std::lock_guard lock(self->mutex_);
      if (self->status_.ok()) self->status_ = how;
      if (--self->open_count_ > 0) return;
    }
    self->communicator_.call_back([self] { self->end(self->status_); });
  }

 private:
  Communicator& communicator_;  // the owner of the channels, which end the messages
  ffi::Promise promise_;
  std::mutex mutex_;
  size_t open_count_;  // guarded by mutex_
  Status status_;      // guarded by mutex_ while messages are open
};

void copy_rows(const Arrays& from, const Arrays& to, size_t row, size_t row_count) {
  for (size_t i = 0; i < from.buffers.size(); ++i) {
    const size_t bytes = from.buffers[i].iov_len / row_count;
    if (bytes == 0) continue;
    std::memcpy(static_cast<std::byte*>(to.buffers[i].iov_base) + row * bytes,
                static_cast<const std::byte*>(from.buffers[i].iov_base) + row * bytes, bytes);
  }
}

void fill_with_zeros(const Arrays& arrays) {
  for (const iovec& buffer : arrays.buffers) {
    if (buffer.iov_len > 0) std::memset(buffer.iov_base, 0, buffer.iov_len);
  }
}

// Where workers run ops in different orders, as XLA may, each finds its own messages.
uint32_t channel_of(uint64_t op) {
  Hash hash;
  hash.add(op);
  return kFirstExchangeChannel | hash.folded();
}

// What both ends of a message must agree about.
uint64_t tag_of(const ExchangeSite& site, std::string_view text) {
  Hash hash;
  hash.add(text);
  hash.add(uint64_t{site.group_size});
  for (const int64_t rank : site.ranks) hash.add(static_cast<uint64_t>(rank));
  return hash.value();
}

ffi::Future execute(ExchangeSite* site, ffi::RunId run, int32_t device, ffi::Dictionary, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  Result<std::shared_ptr<Communicator>> communicator = communicator_for(*site);
  if (!communicator.ok()) return failed(communicator.status());
  const size_t row_count = std::max<size_t>(site->group_size, 1);
  Result<Memory> memory = memory_of(args, rets, row_count);
  if (!memory.ok()) return failed(memory.status());

  const int64_t own = (*communicator)->rank();
  std::vector<Message> messages = messages_of(*site, own);
  if (site->group_size == 0 && site->ranks[own] < 0) fill_with_zeros(memory->results);
  for (const Message& message : messages) {
    if (message.rank == own) copy_rows(memory->operands, memory->results, message.row, row_count);
  }
  std::erase_if(messages, [own](const Message& message) { return message.rank == own; });
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto open = std::make_shared<OpenExchange>(**communicator, std::move(promise), messages.size());
  if (messages.empty()) {
    open->end({});
    return future;
  }
  RoundRequest request;
  request.op = op_of_device(*site, device);
  request.sequence = site->sequence;
  request.device = device;
  request.run = run.run_id;
  request.description = site->label + " (" + site->shapes + ")";
  request.done = [open](const Status& refusal) { open->end(refusal); };
  // XLA keeps the program, and the call site with it, until the future is set.
  request.exchange = [site, open, text = request.description, messages = std::move(messages),
                      memory = std::move(*memory), row_count, &owner = **communicator](uint64_t op) {
    const uint64_t tag = tag_of(*site, text);
    for (const Message& message : messages) {
      const Arrays& arrays = message.direction == Direction::kSend ? memory.operands : memory.results;
      owner.post(message.direction,
                 {static_cast<uint32_t>(message.rank), channel_of(op), tag, text, arrays.row(message.row, row_count)},
                 [open](const Status& how) { OpenExchange::end_message(open, how); });
    }
  };
  (*communicator)->start_round(std::move(request));
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInstantiateExchange, instantiate_exchange, bind_instantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kExecuteExchange, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<ExchangeSite>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attrs()
                                  .RemainingArgs()
                                  .RemainingRets());

}  // namespace

FfiTarget exchange_target() {
  static XLA_FFI_TypeInfo type_info = ffi::MakeTypeInfo<ExchangeSite>();
  return {reinterpret_cast<void*>(&kInstantiateExchange), reinterpret_cast<void*>(&kExecuteExchange), &ExchangeSite::id,
          &type_info};
}

}  // namespace jaxhetero
