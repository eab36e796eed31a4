// What a test tells the stand-in for libfabric, and asks it. The functions of libfabric it has under their names.
//
// Its provider "fake" carries messages between the processes of this host, and behaves as badly as a fabric may: sends
// and receives complete late and in any order, messages overtake each other, calls return EAGAIN in storms, a message
// has at most two pieces, there is no descriptor to wait at, and nobody hears that a peer is gone. It reads a message's
// memory as late as it can, and ends the process where it finds memory that is not registered, or that was taken from
// an operation before this one was complete.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define FAKE_FABRIC_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// From now on every send of this process returns EAGAIN; or, with `is_full` false, no longer.
FAKE_FABRIC_EXPORT void fake_fabric_set_full(bool is_full);
// The send that is the `nth` from now fails, after it was accepted, with this error number.
FAKE_FABRIC_EXPORT void fake_fabric_fail(int64_t nth, int error);
// The next `count` messages are accepted and never arrive, nor complete.
FAKE_FABRIC_EXPORT void fake_fabric_lose(int64_t count);
// From now on no memory is registered; or, with `is_scarce` false, it is again.
FAKE_FABRIC_EXPORT void fake_fabric_set_scarce(bool is_scarce);
// How many endpoints, regions of memory and other objects are open.
FAKE_FABRIC_EXPORT int64_t fake_fabric_open_count();
// The endpoints that are opened from now on do by chance what follows from the seed.
FAKE_FABRIC_EXPORT void fake_fabric_seed(uint64_t seed);
