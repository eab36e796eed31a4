// A copy that goes past the caches, for memory that is not read again soon. Ordinary stores would first read the lines
// that they overwrite, and would take the place of what is needed next.
#pragma once

#include <cstddef>

namespace jaxhetero {

// Like memcpy(to, from, bytes). Pure, on any thread.
void stream_copy(const std::byte* from, std::byte* to, size_t bytes);

}  // namespace jaxhetero
