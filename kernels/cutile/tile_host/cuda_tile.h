// CUDA Tile C++ (namespace cuda::tiles) on the CPU: the subset that attention kernels use, in plain C++20.
//
// Goals: a kernel's .cuh compiles unchanged with the host compiler and gives the same answer; what is undefined on a
// GPU
//   (an unmasked access past an edge, a tile read before it is written, a misaligned pointer) is an exception here; the
//   kernel is fast enough to be used, not only to be debugged; a source that NVIDIA's header rejects for narrowing is
//   rejected here too.
// Non-goals: all of the language (no fp8, atomics, scans, strided or gather views), bitwise equality with a GPU,
// control
//   over rounding modes, the optimisation hints (attributes, which the compiler ignores).
//
// Operations are eager: each makes a tile in memory. Expression templates were rejected, because elementwise work is a
// fifth of an attention kernel and its buffers stay in the L2 cache, while compile time and a readable debugger matter.
// The language is NVIDIA's; see the "CUDA Tile C++ API reference". The code is ours. Link with -pthread.
//
// HYPERMLA_TILE_DEBUG: every tile is a malloc of its own, so that AddressSanitizer sees each one.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

// All of ours is hidden: two kernels loaded into one process, built with different flags, must not share a symbol. The
// system's headers come first, because theirs must not be.
#pragma GCC visibility push(hidden)

#define __tile__
#define __tile_global__

#include "host/elementwise.h"
#include "host/layout.h"
#include "host/math.h"
#include "host/mma.h"
#include "host/range.h"
#include "host/reduce.h"
#include "host/view.h"

#pragma GCC visibility pop
