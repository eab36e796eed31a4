// Every function that decodes what a peer sent. The first byte chooses one; the rest is for it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "xla_ffi/update/bucket_update.h"
#include "xla_ffi/wire/codec.h"
#include "xla_ffi/wire/elastic_messages.h"
#include "xla_ffi/wire/frame.h"
#include "xla_ffi/wire/messages.h"
#include "xla_ffi/wire/state_plan.h"

namespace jaxhetero {
namespace {

// What was accepted is written and read again: the second reading must be the first.
template <typename Value>
void expect_stable(Result<Value> value, Result<Value> (*decode_again)(std::span<const std::byte>)) {
  if (!value.ok()) return;
  const Bytes bytes = encode(*value);
  Result<Value> again = decode_again(bytes);
  if (!again.ok() || encode(*again) != bytes) std::abort();
}

template <typename Message>
void expect_stable(const Result<Message>& message, Result<Message> (*decode_again)(const FrameHeader&)) {
  if (!message.ok()) return;
  const Result<Message> again = decode_again(header_of(message.value()));
  if (!again.ok() || again.value() != message.value()) std::abort();
}

void decode_header(std::span<const std::byte> bytes) {
  EncodedHeader encoded{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), encoded.size()), encoded.begin());
  Result<FrameHeader> header = decode(encoded);
  if (!header.ok()) return;
  if (encode(*header) != encoded) std::abort();
  const size_t most = carries_data(header->type) ? kMaxChunkBytes : kMaxControlBytes;
  if (header->payload_bytes > most) std::abort();
  expect_stable(decode_idle(*header), &decode_idle);
  expect_stable(decode_settled(*header), &decode_settled);
  expect_stable(decode_hold(*header), &decode_hold);
  expect_stable(decode_late(*header), &decode_late);
  expect_stable(decode_presence(*header), &decode_presence);
  const Meeting meeting = decode_meeting(*header);
  if (decode_meeting(header_of(meeting)) != meeting) std::abort();
}

}  // namespace
}  // namespace jaxhetero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jaxhetero;
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  switch (data[0] % 24) {
    case 0:
      decode_header(bytes);
      break;
    case 1:
      expect_stable(decode_registration(bytes), &decode_registration);
      break;
    case 2:
      expect_stable(decode_view(bytes), &decode_view);
      break;
    case 3:
      expect_stable(decode_join(bytes), &decode_join);
      break;
    case 4:
      if (decode_fault(bytes).ok()) std::abort();
      break;
    case 5:
      expect_stable(decode_fabric_offer(bytes), &decode_fabric_offer);
      break;
    case 6:
      expect_stable(decode_lost(bytes), &decode_lost);
      break;
    case 7:
      expect_stable(decode_halt(bytes), &decode_halt);
      break;
    case 8:
      expect_stable(decode_progress(bytes), &decode_progress);
      break;
    case 9:
      expect_stable(decode_shared_offer(bytes), &decode_shared_offer);
      break;
    case 10:
      expect_stable(decode_op_description(bytes), &decode_op_description);
      break;
    case 11:
      expect_stable(decode_process_state(bytes), &decode_process_state);
      break;
    case 12:
      expect_stable(decode_job_state(bytes), &decode_job_state);
      break;
    case 13:
      expect_stable(decode_step_inputs(bytes), &decode_step_inputs);
      break;
    case 14:
      expect_stable(decode_step_totals(bytes), &decode_step_totals);
      break;
    case 15:
      expect_stable(decode_state_copy(bytes), &decode_state_copy);
      break;
    case 16:
      expect_stable(decode_state_plan(bytes), &decode_state_plan);
      break;
    case 17:
      expect_stable(decode_update(bytes), &decode_update);
      break;
    case 18:
      expect_stable(decode_report(bytes), &decode_report);
      break;
    case 19:
      expect_stable(decode_return(bytes), &decode_return);
      break;
    case 20:
      expect_stable(decode_accusation(bytes), &decode_accusation);
      break;
    case 21:
      expect_stable(decode_absent(bytes), &decode_absent);
      break;
    case 22:
      expect_stable(decode_goodput(bytes), &decode_goodput);
      break;
    case 23:
      expect_stable(decode_new_rates(bytes), &decode_new_rates);
      break;
    default:
      for (char c : decode_text(bytes)) {
        if (c < ' ' || c > '~') std::abort();
      }
  }
  return 0;
}
