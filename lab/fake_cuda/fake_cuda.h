// What a test tells the stand-in for the CUDA driver, and asks it. The driver's own functions it has under their names.
//
// Streams are threads, copies take time, and the stand-in notes what a real GPU would pass over in silence: memory that
// is used after it was freed, host memory that is not pinned, two streams at the same memory at once, calls without a
// context, pinned memory taken while a stream waits for a flag.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__GNUC__)
#define FAKE_CUDA_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// "Device memory". Until the first call, all memory counts as such, and none as freed.
FAKE_CUDA_EXPORT uint64_t fake_cuda_alloc(size_t bytes);
// At once, whatever the streams do. Memory is never given out twice, so late uses are seen.
FAKE_CUDA_EXPORT void fake_cuda_free(uint64_t pointer);

// A stream as XLA has one, and work on it that reads or writes memory for a while, then calls `function`, if any.
FAKE_CUDA_EXPORT void* fake_cuda_stream();
FAKE_CUDA_EXPORT void fake_cuda_compute(void* stream, uint64_t pointer, size_t bytes, bool writes,
                                        void (*function)(void*), void* data);
// Whether the stream ran dry within that time.
FAKE_CUDA_EXPORT bool fake_cuda_wait(void* stream, int64_t patience_ms);

// How long operations take.
FAKE_CUDA_EXPORT void fake_cuda_set_speed(double bytes_per_s, int64_t latency_us);

// The `nth` call from now of a function of the driver fails with `code`, and does nothing. "execution": an operation on
// a stream fails, and takes the context with it: no stream goes on, and every call returns `code`.
FAKE_CUDA_EXPORT void fake_cuda_fail(const char* function, int64_t nth, int code);

// How often a function of the driver was called since the last reset.
FAKE_CUDA_EXPORT int64_t fake_cuda_call_count(const char* function);
// What went wrong, one per line; the text is valid until the next call.
FAKE_CUDA_EXPORT const char* fake_cuda_violations();
// Forgets counts, failures and violations, and that the context was lost.
FAKE_CUDA_EXPORT void fake_cuda_reset();
