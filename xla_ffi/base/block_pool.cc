#include "xla_ffi/base/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace jaxhetero {
namespace {

constexpr std::align_val_t kAlign{4096};  // that of pages, which madvise() asks for
constexpr size_t kLargeBytes = size_t{4} << 20;

}  // namespace

void BlockPool::Free::operator()(std::byte* memory) const { ::operator delete(memory, kAlign); }

std::shared_ptr<std::byte> BlockPool::allocate(size_t bytes) {
  Block block = take(*state_, bytes);
  return {block.release(), [state = state_, bytes](std::byte* memory) { give_back(*state, {bytes, Block(memory)}); }};
}

BlockPool::Block BlockPool::take(State& state, size_t bytes) {
  {
    const std::lock_guard lock(state.mutex);
    state.used_bytes += bytes;
    state.most_used_bytes = std::max(state.most_used_bytes, state.used_bytes);
    const auto same = std::ranges::find(state.kept, bytes, &Kept::bytes);
    if (same != state.kept.end()) {
      Block block = std::move(same->memory);
      state.kept.erase(same);
      state.kept_bytes -= bytes;
      return block;
    }
  }
  Block block(static_cast<std::byte*>(::operator new(bytes, kAlign)));
  if (bytes >= kLargeBytes) madvise(block.get(), bytes, MADV_HUGEPAGE);  // a hint
  return block;
}

void BlockPool::give_back(State& state, Kept block) {
  std::deque<Kept> dropped;  // freed without the mutex
  const std::lock_guard lock(state.mutex);
  state.used_bytes -= block.bytes;
  state.kept_bytes += block.bytes;
  state.kept.push_back(std::move(block));
  while (state.kept_bytes + state.used_bytes > state.most_used_bytes) {
    state.kept_bytes -= state.kept.front().bytes;
    dropped.push_back(std::move(state.kept.front()));
    state.kept.pop_front();
  }
}

}  // namespace jaxhetero
