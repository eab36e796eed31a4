// The loops that bench/codes.py times: the code of floats and a plain copy, on one core.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "xla_ffi/codec/float_code.h"

namespace {

using Clock = std::chrono::steady_clock;
using jaxhetero::internal::Vectors;

// Calls `work(i)` for every chunk, round and round, until `seconds` have passed. Returns chunks in a second.
template <typename Work>
double chunks_per_s(size_t count, double seconds, const Work& work) {
  const Clock::time_point start = Clock::now();
  double passed = 0;
  size_t chunks = 0;
  while (passed < seconds) {
    for (size_t i = 0; i < count; ++i, ++chunks) work(i);
    passed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(chunks) / passed;
}

}  // namespace

extern "C" {

struct Rates {
  double encoded_bytes_per_s;  // of values, as are the others
  double decoded_bytes_per_s;
  double copied_bytes_per_s;
  double coded_part;  // the code over the values
};

// Of `bytes` of values, a multiple of `chunk_bytes`, with vectors of this number; all 0 where the processor has none.
Rates measure(uint8_t dtype, int vectors, const std::byte* memory, size_t bytes, size_t chunk_bytes, double seconds) {
  const auto type = static_cast<jaxhetero::DType>(dtype);
  const auto unit = static_cast<Vectors>(vectors);
  if (!jaxhetero::internal::have(unit)) return {};
  const size_t count = bytes / chunk_bytes;
  const auto values = [&](size_t i) { return std::span(memory + i * chunk_bytes, chunk_bytes); };
  std::vector<std::vector<std::byte>> coded(count);
  std::vector<std::byte> out(jaxhetero::most_coded_bytes(type, chunk_bytes));
  size_t coded_bytes = 0;
  size_t shortened = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t length = jaxhetero::internal::encode(unit, type, values(i), out);
    coded[i].assign(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(length));
    coded_bytes += length > 0 ? length : chunk_bytes;
    shortened += length > 0 ? 1 : 0;
  }
  const auto size = static_cast<double>(chunk_bytes);
  Rates rates{};
  rates.coded_part = static_cast<double>(coded_bytes) / static_cast<double>(count * chunk_bytes);
  rates.encoded_bytes_per_s =
      size * chunks_per_s(count, seconds, [&](size_t i) { jaxhetero::internal::encode(unit, type, values(i), out); });
  rates.copied_bytes_per_s =
      size * chunks_per_s(count, seconds, [&](size_t i) { std::memcpy(out.data(), values(i).data(), chunk_bytes); });
  if (shortened == count) {
    rates.decoded_bytes_per_s = size * chunks_per_s(count, seconds, [&](size_t i) {
                                  jaxhetero::internal::decode(unit, type, coded[i], std::span(out).first(chunk_bytes));
                                });
  }
  return rates;
}
}
