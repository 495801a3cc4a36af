// See races.h. This file itself is compiled without -fsanitize=thread.
#include "races.h"

#include <unistd.h>

#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "cuda_threads.h"

namespace races {
namespace {

unsigned at(const Clock& clock, int agent) { return std::size_t(agent) < clock.size() ? clock[std::size_t(agent)] : 0; }
void raise(Clock& clock, int agent, unsigned to) {
  if (clock.size() <= std::size_t(agent)) clock.resize(std::size_t(agent) + 1);
  clock[std::size_t(agent)] = std::max(clock[std::size_t(agent)], to);
}
void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}
bool covers(const Clock& clock, const Clock& other) {
  for (std::size_t i = 0; i < other.size(); ++i)
    if (other[i] > at(clock, int(i))) return false;
  return true;
}
void join(View& view, const View& other) {
  join(view.seen, other.seen);
  join(view.fenced, other.fenced);
}

struct Agent {
  Kind kind;
  int block, thread;
  unsigned clock = 1;
};
struct Access {
  const void* place = nullptr;
  unsigned clock = 0;  // 0: none
  unsigned short agent = 0;
  bool engine = false;  // not by an ordinary access
  unsigned char care = kAll;
};
struct Cell {
  Access write;
  std::vector<Access> reads;  // none of which is ordered before another
};
constexpr std::size_t kUnitBytes = 16, kPartBytes = 2;
struct Unit {
  Cell whole;
  std::vector<Cell> parts;  // where accesses were smaller than the unit
};
struct Region {
  const char *begin, *end;
  bool shared;  // by the threads of a block alone: it begins anew with each
  std::vector<Unit> units;
};

struct State {
  std::vector<Agent> agents;
  std::map<std::pair<Kind, unsigned long long>, int> async;  // of this block, by what is done and for whom
  std::vector<View> views;                                   // of this block's threads
  std::vector<View> released, acquired;                      // by a thread's last fence; by what it read since then
  std::unordered_map<const void*, View> words;               // that atomics change
  std::vector<Region> regions;
  int first = 0;  // agent of this block's thread 0
  int unwatched = 0;
  std::set<std::pair<const void*, const void*>> told;
  int found = 0;
};
State state;

int own_agent() { return state.first + emulated::thread.x; }
View& own_view() { return state.views[std::size_t(emulated::thread.x)]; }
Agent& agent(int number) { return state.agents[std::size_t(number)]; }
// What this thread does from here on comes after what others may learn of now.
void step() { raise(own_view().seen, own_agent(), ++agent(own_agent()).clock); }

// ---- Reports.

std::string name_of(const Agent& of) {
  static const char* const names[] = {"the copy engine for ", "a store of the copy engine for ", "wgmma of ",
                                      "cp.async of ", ""};
  return names[of.kind] + std::string("thread ") + std::to_string(of.thread) +
         (of.block == emulated::block.x ? "" : " of block " + std::to_string(of.block));
}
extern "C" char __executable_start;
// The lines of a place in the program, the innermost first.
std::string lines_of(const void* place) {
  char self[4096] = {}, line[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length < 0) return "";
  std::snprintf(line, sizeof line, "addr2line -Cips -e '%.3000s' %#zx 2>&1", self,
                std::size_t(static_cast<const char*>(place) - &__executable_start) - 1);
  std::string result;
  if (FILE* const lines = popen(line, "r")) {
    while (std::fgets(line, sizeof line, lines)) result += std::string("      ") + line;
    pclose(lines);
  }
  return result;
}
void tell(const std::string& what, const void* place, const void* other = nullptr) {
  if (!state.told.insert({place, other}).second || ++state.found > 40) return;
  const Unwatched emulation;
  std::fprintf(stderr, "%s\n%s%s%s", what.c_str(), lines_of(place).c_str(), other ? "    and\n" : "",
               other ? lines_of(other).c_str() : "");
}

// ---- Accesses.

Region* region_of(const char* data) {
  for (Region& of : state.regions)
    if (data >= of.begin && data < of.end) return &of;
  return nullptr;
}
enum class By { thread, copies, engine };  // an ordinary access, of the thread or beside it; or none
void access(Region& region, const char* data, std::size_t bytes, bool writes, int by_agent, By by, const void* place,
            Care care = kAll) {
  const View& view = own_view();
  const Access now = {place, agent(by_agent).clock, static_cast<unsigned short>(by_agent), by == By::engine,
                      static_cast<unsigned char>(care)};
  const auto ordered = [&](const Access& before) {
    return before.clock == 0 || before.agent == by_agent || at(view.seen, before.agent) >= before.clock ||
           before.care + care == kZeros + kScores;
  };
  const auto where = [&] {
    return name_of(agent(by_agent)) + (writes ? " writes " : " reads ") +
           (region.shared ? "shared memory at " : "global memory at ") + std::to_string(data - region.begin);
  };
  const auto report = [&](const char* how, const Access& before) {
    tell("race: " + where() + how + name_of(agent(before.agent)), place, before.place);
  };
  const auto look = [&](Cell& cell) {
    if (!ordered(cell.write)) report(", which nothing orders after the write by ", cell.write);
    if (region.shared && by == By::engine && !cell.write.engine && ordered(cell.write) &&
        cell.write.clock > at(view.fenced, cell.write.agent) && cell.write.care + care != kZeros + kScores)
      report(" without fence.proxy.async behind the write by ", cell.write);
    if (writes) {
      for (const Access& before : cell.reads)
        if (!ordered(before)) report(", which nothing orders after the read by ", before);
      cell.reads.clear();
      cell.write = now;
      return;
    }
    if (region.shared && by == By::thread && cell.write.clock == 0) tell("unwritten: " + where(), place);
    std::erase_if(cell.reads, ordered);
    cell.reads.push_back(now);
  };
  const std::size_t begin = std::size_t(data - region.begin), end = begin + bytes;
  for (std::size_t number = begin / kUnitBytes; number * kUnitBytes < end; ++number) {
    Unit& unit = region.units[number];
    const std::size_t first = std::max(begin, number * kUnitBytes) % kUnitBytes,
                      last = std::min(end - number * kUnitBytes, kUnitBytes);
    const bool of_all = first == 0 && last == kUnitBytes;
    if (of_all && unit.parts.empty()) {
      look(unit.whole);
      continue;
    }
    if (unit.parts.empty()) unit.parts.assign(kUnitBytes / kPartBytes, unit.whole);
    for (std::size_t part = first / kPartBytes; part * kPartBytes < last; ++part) look(unit.parts[part]);
    if (of_all && writes) {
      unit.whole = unit.parts[0];
      unit.parts.clear();
    }
  }
}
void of_thread(const void* data, std::size_t bytes, bool writes, const void* place, Care care = kAll) {
  if (state.unwatched > 0 || state.views.empty()) return;
  const char* const begin = static_cast<const char*>(data);
  if (std::size_t(begin - emulated::stack) < emulated::kStackBytes) return;
  if (Region* const region = region_of(begin)) {
    const Unwatched emulation;
    access(*region, begin, bytes, writes, own_agent(), By::thread, place, care);
  }
}
void beside(int by_agent, const void* data, std::size_t bytes, bool writes, By by, const void* place,
            Care care = kAll) {
  const char* const begin = static_cast<const char*>(data);
  if (Region* const region = region_of(begin)) access(*region, begin, bytes, writes, by_agent, by, place, care);
}

void look_for_phase_before(const Sync& sync, const char* what, unsigned which, const void* place) {
  if (covers(own_view().seen, sync.done.seen)) return;
  tell("phases: " + name_of(agent(own_agent())) + " arrives at " + what + " " + std::to_string(which) +
           ", which nothing orders after the end of the phase before: it may count there",
       place);
}

}  // namespace

void watch(const void* data, std::size_t bytes, bool shared) {
  const char* const begin = static_cast<const char*>(data);
  state.regions.push_back({begin, begin + bytes, shared, std::vector<Unit>(bytes / kUnitBytes + 1)});
}
void forget(const void* data) {
  std::erase_if(state.regions, [&](const Region& of) { return of.begin == data; });
}
void begin_block(int threads) {
  const bool first = emulated::block.x == 0 || state.agents.size() > 6000;  // what was before is done, or forgotten
  if (first) {
    state.agents.clear();
    state.words.clear();
  }
  for (Region& of : state.regions)
    if (first || of.shared) of.units.assign(of.units.size(), {});
  state.first = int(state.agents.size());
  state.async.clear();
  state.views.assign(std::size_t(threads), {});
  state.released = state.acquired = state.views;
  for (int i = 0; i < threads; ++i) {
    state.agents.push_back({kThread, emulated::block.x, i});
    raise(state.views[std::size_t(i)].seen, state.first + i, 1);
  }
}
void end_block() { state.views.clear(); }
int found() { return state.found; }
void look_away(int more) { state.unwatched += more; }

void reads(const void* data, std::size_t bytes) { of_thread(data, bytes, false, __builtin_return_address(0)); }
void writes(const void* data, std::size_t bytes, Care care) {
  of_thread(data, bytes, true, __builtin_return_address(0), care);
}

int agent_of(Kind kind, unsigned key) {
  const unsigned long long own = static_cast<unsigned long long>(emulated::thread.x) << 32 | key;
  const auto [at, made] = state.async.try_emplace({kind, own}, int(state.agents.size()));
  if (made) state.agents.push_back({kind, emulated::block.x, emulated::thread.x});
  return at->second;
}
unsigned begin(int number) { return ++agent(number).clock; }
void reads_beside(int number, const void* data, std::size_t bytes, Care care, bool engine) {
  beside(number, data, bytes, false, engine ? By::engine : By::copies, __builtin_return_address(0), care);
}
void writes_beside(int number, const void* data, std::size_t bytes, bool engine) {
  beside(number, data, bytes, true, engine ? By::engine : By::copies, __builtin_return_address(0));
}
void finish(int number, unsigned clock, int thread) { raise(state.views[std::size_t(thread)].seen, number, clock); }

void arrive(Sync& sync, const char* what, unsigned which) {
  look_for_phase_before(sync, what, which, __builtin_return_address(0));
  join(sync.coming, own_view());
  step();
}
void arrive_beside(Sync& sync, int number) {
  look_for_phase_before(sync, "a barrier with", unsigned(number), __builtin_return_address(0));
  raise(sync.coming.seen, number, agent(number).clock);
  join(sync.causes, own_view().seen);
}
void acquire_by_parity(Sync& sync) {
  acquire(sync, emulated::thread.x);
  sync.waits.push_back({own_agent(), agent(own_agent()).clock});
}
void complete(Sync& sync, unsigned which) {
  std::map<int, bool> in_time;  // of a warp, whose lanes wait together, one is enough
  for (const auto& [waited, clock] : sync.waits)
    in_time[agent(waited).thread / 32] |= at(sync.coming.seen, waited) >= clock || at(sync.causes, waited) >= clock;
  for (const auto& [warp, yes] : in_time)
    if (!yes)
      tell("phases: nothing orders the end of a phase of the barrier at " + std::to_string(which) +
               " after threads of warp " + std::to_string(warp) + " have seen the one before: they may miss it",
           __builtin_return_address(0));
  sync.waits.clear();
  sync.causes.clear();
  sync.done = std::move(sync.coming);
  sync.coming = {};
}
void acquire(const Sync& sync, int thread) { join(state.views[std::size_t(thread)], sync.done); }

void fence_proxy() {
  own_view().fenced = own_view().seen;
  step();
}
void fence_all() {
  join(own_view(), state.acquired[std::size_t(emulated::thread.x)]);
  state.released[std::size_t(emulated::thread.x)] = own_view();
  step();
}
void change_word(const void* word) {
  View& of = state.words[word];
  join(state.acquired[std::size_t(emulated::thread.x)], of);
  join(of, state.released[std::size_t(emulated::thread.x)]);
}
void acquire_word(const void* word) { join(own_view(), state.words[word]); }

}  // namespace races

// What the compiler calls.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
char __tsan_atomic8_load(const volatile char* of_static, int) { return *of_static; }
void __tsan_read_range(void* data, std::size_t bytes) {
  races::of_thread(data, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* data, std::size_t bytes) {
  races::of_thread(data, bytes, true, __builtin_return_address(0));
}
#define HYPERMLA_ACCESS(bytes)                                                                           \
  void __tsan_read##bytes(void* at) { races::of_thread(at, bytes, false, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* at) { races::of_thread(at, bytes, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##bytes(void* at) __attribute__((alias("__tsan_read" #bytes)));              \
  void __tsan_unaligned_write##bytes(void* at) __attribute__((alias("__tsan_write" #bytes)));
HYPERMLA_ACCESS(1)
HYPERMLA_ACCESS(2)
HYPERMLA_ACCESS(4)
HYPERMLA_ACCESS(8)
HYPERMLA_ACCESS(16)
#undef HYPERMLA_ACCESS
}
