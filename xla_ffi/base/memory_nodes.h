// A host's memory nodes (NUMA), and on which of them the threads of this process's strands run.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "xla_ffi/base/cores.h"

namespace jaxhetero {

// Linux takes memory from the node of the thread that touches it first. A strand that stays on one node therefore has
// its memory beside its core.
class MemoryNodes {
 public:
  MemoryNodes() = default;
  // The cores of each node. The first strand gets the node on which the caller runs, the others take turns from there,
  // so that processes of one strand do not all crowd on one node.
  explicit MemoryNodes(std::vector<Cores> nodes) : nodes_(std::move(nodes)) {
    const auto core = static_cast<uint32_t>(sched_getcpu());
    const auto is_here = [core](const Cores& cores) { return std::ranges::count(cores, core) > 0; };
    const auto here = std::ranges::find_if(nodes_, is_here);
    if (here != nodes_.end()) first_ = static_cast<size_t>(here - nodes_.begin());
  }

  // For the thread of this strand. With fewer than two nodes it stays free.
  void settle(size_t strand) const {
    if (nodes_.size() > 1) keep_to(nodes_[(first_ + strand) % nodes_.size()]);
  }

 private:
  std::vector<Cores> nodes_;
  size_t first_ = 0;
};

}  // namespace jaxhetero
