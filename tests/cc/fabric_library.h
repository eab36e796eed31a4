// The fabric of tests: the stand-in for libfabric, or the library that JAXHETERO_TEST_FABRIC_LIBRARY names.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "lab/fake_fabric/fake_fabric.h"

namespace jaxhetero {

// The provider that JAXHETERO_TEST_FABRIC names.
inline std::string test_provider() {
  const char* const provider = std::getenv("JAXHETERO_TEST_FABRIC");
  return provider == nullptr ? "fake" : provider;
}

// From the first call on, dlopen finds the library by the name that the core knows.
inline void* test_fabric_library() {
  static void* const library = [] {
    const char* const path = std::getenv("JAXHETERO_TEST_FABRIC_LIBRARY");
    void* const opened = dlopen(path == nullptr ? "lab/fake_fabric/libfake_fabric.so" : path, RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(opened, nullptr) << dlerror();
    return opened;
  }();
  return library;
}

// A function of the stand-in: fake_fabric<decltype(fake_fabric_lose)>("fake_fabric_lose").
template <typename Function>
Function* fake_fabric(const char* name) {
  auto* const function = reinterpret_cast<Function*>(dlsym(test_fabric_library(), name));
  EXPECT_NE(function, nullptr) << name;
  return function;
}

}  // namespace jaxhetero
