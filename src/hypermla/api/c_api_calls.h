// What the files of the C interface share: exceptions become a status and a sentence, and structs may be older or newer
// than the library.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "hypermla/base/error.h"
#include "hypermla/c_api.h"
#include "hypermla/hypermla.h"
#include "hypermla/mla_cache_format.h"
#include "hypermla/version.h"

namespace hypermla {

// Keeps the sentence for hypermla_last_error().
hypermla_status failed(hypermla_status status, const char* what) noexcept;

template <class Body>
hypermla_status guarded_call(Body&& body) noexcept {
  try {
    body();
    return HYPERMLA_OK;
  } catch (const Error& error) {
    return failed(HYPERMLA_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return failed(HYPERMLA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(HYPERMLA_INTERNAL, error.what());
  } catch (...) {
    return failed(HYPERMLA_INTERNAL, "an unknown exception");
  }
}

template <class T>
T& required(T* pointer, const char* name) {
  if (!pointer) fail("{} is NULL; give its address", name);
  return *pointer;
}

// Sets a struct of the caller's header: members that this library does not know are 0.
template <class T>
void initialise(T* to, T from, std::size_t size) {
  if (!to || size < sizeof(std::size_t)) return;
  from.size = size;
  std::memset(to, 0, size);
  std::memcpy(to, &from, std::min(size, sizeof from));
}

// A struct of the caller's header as one of this library's: members that an older header lacks have their defaults.
// `init`: the function that initialises it.
template <class T>
T of_caller(const T* given, T known, const char* name, const char* init) {
  const std::size_t size = required(given, name).size;
  if (size < sizeof(std::size_t) || size > 4096)
    fail("{}->size is {}; initialise the struct with {}()", name, size, init);
  const char* bytes = reinterpret_cast<const char*>(given);
  for (std::size_t i = sizeof known; i < size; ++i)
    if (bytes[i])
      fail(
          "{} has a member that HyperMLA {} does not know, as its size of {} bytes says; install the library of the "
          "header",
          name, HYPERMLA_VERSION, size);
  std::memcpy(&known, given, std::min(size, sizeof known));
  return known;
}

inline DType dtype_of(std::int32_t dtype) {
  if (dtype != HYPERMLA_BFLOAT16 && dtype != HYPERMLA_FLOAT16)
    fail("dtype={} is not supported: choose HYPERMLA_BFLOAT16 or HYPERMLA_FLOAT16", dtype);
  return DType(dtype);
}

inline MlaCacheFormat cache_format_of(std::int32_t format) {
  if (format < HYPERMLA_CACHE_AS_QUERIES || format > HYPERMLA_CACHE_FP8_576)
    fail("cache_format={} is not supported: choose HYPERMLA_CACHE_AS_QUERIES, _FP8_656 or _FP8_576", format);
  return MlaCacheFormat(format);
}

inline bool flag_of(const char* name, std::int32_t flag) {
  if (flag != 0 && flag != 1) fail("{}={} is not supported: it must be 0 or 1", name, flag);
  return flag == 1;
}

inline int count_of(const char* name, std::int64_t count) {
  if (count < 0 || count > std::numeric_limits<int>::max())
    fail("{}={} is not supported: it must be from 0 to 2^31 - 1", name, count);
  return int(count);
}

inline DeviceHandle device_of(const char* name) { return DeviceHandle(name ? name : "auto"); }

}  // namespace hypermla
