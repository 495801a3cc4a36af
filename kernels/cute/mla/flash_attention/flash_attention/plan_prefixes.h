// Which requests' queries make a tile where requests share prefixes: the problem and the tiling of the planning kernel,
// and what it makes.
#pragma once

namespace hypermla::cute {

inline constexpr int kMaxPrefixes = 1024, kMaxPrefixRequests = 8192;

// Of every head: the rows and the tokens of one tile.
struct alignas(16) Chunk {
  int prefix;
  int row;              // first query
  int tokens;           // length of the prefix
  int blocks;           // of 128 tokens, of this part of them
  int first, requests;  // requests order[first .. first + requests) share the prefix
  int first_block, part;
};
// Stands before the list.
struct alignas(16) ChunkCount {
  int chunks;
};

// A tile of 128 rows holds whole requests, or a part of one.
constexpr int requests_per_tile(int s) { return s > 128 ? 1 : 128 / s; }
constexpr int tiles_per_request(int s) { return s > 128 ? (s + 127) / 128 : 1; }

// The i-th chunk of `requests` requests that share a prefix and stand at order[first] on. Chunks that read the same
// tokens follow each other.
constexpr int chunk_count(int requests, int s, int parts) {
  return (requests + requests_per_tile(s) - 1) / requests_per_tile(s) * tiles_per_request(s) * parts;
}
constexpr Chunk chunk_at(int i, int prefix, int first, int requests, int tokens, int s, int parts) {
  const int per_part = chunk_count(requests, s, 1), part = i / per_part, tile = i - part * per_part;
  const int begin = tile / tiles_per_request(s) * requests_per_tile(s);
  const int row = tile % tiles_per_request(s) * 128, left = requests - begin;
  const int all = (tokens + 127) / 128, blocks = (all + parts - 1) / parts, first_block = part * blocks;
  const int own = first_block >= all ? 0 : all - first_block < blocks ? all - first_block : blocks;
  return {prefix,      row, tokens, own, first + begin, left < requests_per_tile(s) ? left : requests_per_tile(s),
          first_block, part};
}

struct PlanPrefixesProblem {  // all of it comes as arguments
  template <class Self, class Visitor>
  static constexpr void fields(Self&, Visitor&&) {}
};

struct PlanPrefixesTiling {
  int threads = 1024;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("threads", self.threads, "threads of the one block");
  }
};

struct PlanPrefixesArguments {
  const int* prefix = nullptr;   // [b], each from 0 to prefixes - 1
  const int* lengths = nullptr;  // [prefixes] tokens; null: t each
  int* order = nullptr;          // [b]: requests, sorted by prefix
  ChunkCount* count = nullptr;   // and the list of chunks behind it
  int b = 0, s = 0, t = 0;
  int prefixes = 0, parts = 0;
};

}  // namespace hypermla::cute
