// What a library that shares our process may have told its thread: to round upwards and to flush subnormals.
#pragma once

#include <cfenv>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxhetero {

class StrangeRounding {
 public:
  StrangeRounding() {
    std::fegetenv(&usual_);
    std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
    constexpr unsigned kFlushSubnormals = 0x8040;
    _mm_setcsr(_mm_getcsr() | kFlushSubnormals);
#endif
    mode_ = current();
  }
  ~StrangeRounding() { std::fesetenv(&usual_); }
  StrangeRounding(const StrangeRounding&) = delete;
  StrangeRounding& operator=(const StrangeRounding&) = delete;

  // The thread's mode is as this object made it.
  [[nodiscard]] bool is_untouched() const { return std::fegetround() == FE_UPWARD && current() == mode_; }

 private:
  static unsigned current() {
#if defined(__x86_64__)
    constexpr unsigned kExceptions = 0x3f;
    return _mm_getcsr() & ~kExceptions;
#else
    return 0;
#endif
  }

  std::fenv_t usual_;
  unsigned mode_;
};

}  // namespace jaxhetero
