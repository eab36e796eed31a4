// Memory in huge pages. A simulation of hundreds of hosts jumps about in tens of megabytes, and spent an eighth of its
// time on looking up pages of 4 KiB.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>

namespace jaxhetero::simulator {

// An allocator for containers. What is smaller than a huge page lies in ordinary ones.
template <typename T>
struct HugePages {
  using value_type = T;

  HugePages() = default;
  template <typename U>
  explicit HugePages(const HugePages<U>& /*other*/) {}

  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    const bool is_large = bytes >= kPageBytes;
    const size_t whole_pages = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    void* const memory = is_large ? std::aligned_alloc(kPageBytes, whole_pages) : std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    if (is_large) madvise(memory, whole_pages, MADV_HUGEPAGE);  // a hint
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t /*count*/) { std::free(memory); }
  bool operator==(const HugePages& /*other*/) const { return true; }

 private:
  static constexpr size_t kPageBytes = size_t{2} << 20;
};

}  // namespace jaxhetero::simulator
