// Numbers that look random but follow from others, and so are the same on every worker.
#pragma once

#include <cstdint>

namespace jaxhetero {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): spreads numbers that are close to each other.
inline uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace jaxhetero
