// Members of a thread block's shared memory by name. A kernel's shared memory is one struct; what the copy engine,
// wgmma and mbarriers work on are members of the types below, which turn into the 32-bit addresses that those
// instructions take. What threads read and write themselves are ordinary members.
//
// Why no plain arrays: an index into those is a 64-bit sum, which costs the loops of a kernel their uniform registers.
#pragma once

namespace hypermla::cute {

using u32 = unsigned;
using u64 = unsigned long long;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

template <u32 n>
struct Bytes {
  unsigned char bytes[n];
  __device__ __forceinline__ operator u32() const { return shared_address(this); }
};

template <class T, int n>
struct Array;

// A T in shared memory, by its address.
template <class T>
struct At {
  u32 address;
  __device__ __forceinline__ operator u32() const { return address; }
};
template <class T, int n>
struct At<Array<T, n>> {
  u32 address;
  __device__ __forceinline__ operator u32() const { return address; }
  __device__ __forceinline__ At<T> operator[](int i) const { return {address + i * static_cast<int>(sizeof(T))}; }
};

template <class T, int n>
struct Array {
  T elements[n];
  __device__ __forceinline__ operator u32() const { return shared_address(this); }
  __device__ __forceinline__ At<T> operator[](int i) const { return At<Array>{shared_address(this)}[i]; }
};

}  // namespace hypermla::cute
