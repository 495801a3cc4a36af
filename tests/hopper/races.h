// Finds accesses of a thread block that nothing orders. A file compiled with -fsanitize=thread, and linked with
// races.cpp in place of the sanitizer's library, tells of its ordinary accesses; the wrappers of emulated_hopper.h tell
// of theirs, and of what orders accesses on a device: barriers, fences, atomics. Nothing else orders them, however the
// threads happen to run: shuffles and votes do not.
//
// An agent is a thread, or what the copy engine, wgmma or cp.async do on behalf of one: those go on beside it until it
// waits for them. Every thread has a clock for each agent: what of it the thread knows to have happened. A second set
// of clocks is what of that is fenced (fence.proxy.async), without which wgmma and the copy engine may not see what
// threads have stored.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace races {

using Clock = std::vector<unsigned>;  // by agent; what is behind the end is 0

// What a thread knows to have happened, and to be fenced.
struct View {
  Clock seen, fenced;
};
// A barrier: what those knew who have arrived in this phase, and in the last that is over.
struct Sync {
  View coming, done;
  Clock causes;                                 // of arrivals beside threads: what these knew when they asked for them
  std::vector<std::pair<int, unsigned>> waits;  // for the last phase: agents, and their clocks
};
// Zeros in the place of tokens behind the end may come before or after the products that make scores of them, one for
// each row of the operand: those are hidden.
enum Care { kAll, kZeros, kScores };
enum Kind { kCopyEngine, kStores, kMma, kCopies, kThread };

#ifdef HYPERMLA_RACES
#define HYPERMLA_IF_WATCHED(declaration, otherwise) declaration;
#else
#define HYPERMLA_IF_WATCHED(declaration, otherwise) inline declaration otherwise
#endif

HYPERMLA_IF_WATCHED(void watch(const void*, std::size_t, bool), {})
HYPERMLA_IF_WATCHED(void forget(const void*), {})
// Memory that is looked at. `shared`: memory of a thread block, which finds nothing in it.
struct Watched {
  const void* data;
  Watched(const void* data, std::size_t bytes, bool shared = false) : data(data) { watch(data, bytes, shared); }
  ~Watched() { forget(data); }
  Watched(const Watched&) = delete;
};
// Thread blocks of a launch, one after the other; what the launches before did is done.
HYPERMLA_IF_WATCHED(void begin_block(int), {})
HYPERMLA_IF_WATCHED(void end_block(), {})
HYPERMLA_IF_WATCHED(int found(), { return 0; })  // since the program began
// What the emulation itself does is not looked at.
HYPERMLA_IF_WATCHED(void look_away(int), {})
struct Unwatched {
  Unwatched() { look_away(1); }
  ~Unwatched() { look_away(-1); }
};

// Accesses of this thread.
HYPERMLA_IF_WATCHED(void reads(const void*, std::size_t), {})
HYPERMLA_IF_WATCHED(void writes(const void*, std::size_t, Care = kAll), {})
// What goes on beside this thread. `key` tells apart what is not waited for at once.
HYPERMLA_IF_WATCHED(int agent_of(Kind, unsigned = 0), { return 0; })
// It begins something new, which is waited for apart from what was before: its clock from here on.
HYPERMLA_IF_WATCHED(unsigned begin(int), { return 0; })
// The last says whether it sees what threads have stored only behind a fence.
HYPERMLA_IF_WATCHED(void reads_beside(int, const void*, std::size_t, Care = kAll, bool = true), {})
HYPERMLA_IF_WATCHED(void writes_beside(int, const void*, std::size_t, bool = true), {})
// A thread of the block knows that what an agent did up to a clock is done.
HYPERMLA_IF_WATCHED(void finish(int, unsigned, int), {})

// An arrival must not be able to come in the phase before: it has to be ordered after the end of that.
HYPERMLA_IF_WATCHED(void arrive(Sync&, const char*, unsigned), {})
HYPERMLA_IF_WATCHED(void arrive_beside(Sync&, int), {})
HYPERMLA_IF_WATCHED(void complete(Sync&, unsigned = 0), {})
HYPERMLA_IF_WATCHED(void acquire(const Sync&, int), {})
// This thread found a phase over by its parity: the next may not end before, or it would wait for ever.
HYPERMLA_IF_WATCHED(void acquire_by_parity(Sync&), {})
HYPERMLA_IF_WATCHED(void fence_proxy(), {})
// A fence before an atomic releases, one behind it acquires.
HYPERMLA_IF_WATCHED(void fence_all(), {})
HYPERMLA_IF_WATCHED(void change_word(const void*), {})
HYPERMLA_IF_WATCHED(void acquire_word(const void*), {})
#undef HYPERMLA_IF_WATCHED

}  // namespace races
