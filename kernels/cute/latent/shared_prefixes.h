// What the kernels are told that attend to shared prefixes once (prefix_plan.h), by value.
#pragma once

#include "work.h"

namespace hypermla::cute {

inline constexpr int kFindThreads = 512;
inline constexpr int kMergePrefixThreads = 256, kMergePrefixHeads = 16;  // of a block of merge_prefixes

// Neighbouring requests whose tables begin with the same pages: a request of the planner of the prefixes.
struct PrefixGroup {
  int request;  // its first, by whose row of the table the prefix is read
  int query;    // its first, among those of all requests
};

// The request of a query, and which of its queries it is. Request -1: no prefix is shared.
struct QueryPlace {
  int request, query;
};

struct FindPrefixesArguments {
  const int* lengths = nullptr;       // [requests]
  const int* query_starts = nullptr;  // [requests + 1]; null: `queries` of each
  const int* block_table = nullptr;   // [requests] rows
  long long table_stride = 0;
  int* own_lengths = nullptr;     // [requests] tokens behind the prefix; all, where none is shared
  int* prefix_blocks = nullptr;   // [requests] token blocks of the prefix
  int* prefix_lengths = nullptr;  // [groups] tokens; 0 behind the last group
  int* prefix_starts = nullptr;   // [groups + 1] queries of all groups before one
  PrefixGroup* group = nullptr;   // [groups]
  QueryPlace* places = nullptr;   // [all_queries]
  int requests = 0, groups = 0;   // groups: half of the requests
  int heads = 0, page = 0;
  int queries = 0, max_tokens = 0, all_queries = 0;  // as PlanRequestsArguments has them
  int own_rows = 0, prefix_rows = 0;                 // of a row tile, in the attention to own tokens and to prefixes
  // What decides, in token blocks against one row tile: the shortest prefix; what a row tile of a group costs beside
  // its blocks; what all groups must save together.
  int least_blocks = 0, tile_cost = 0, least_gain = 0;
};

// The lists of two planners, and where their items belong.
struct MoveItemsArguments {
  WorkItem* own = nullptr;       // [own_workers, own_rounds]
  WorkItem* prefixes = nullptr;  // [.., prefix_rounds]
  const int* prefix_blocks = nullptr;
  const PrefixGroup* group = nullptr;
  int own_workers = 0, own_rounds = 0, prefix_rounds = 0, heads = 0;
};

struct MergePrefixesArguments {
  const void* prefix_o = nullptr;     // [queries, heads, 512]
  const float* prefix_lse = nullptr;  // [queries, heads], in log2
  const QueryPlace* places = nullptr;
  void* o = nullptr;  // of the own tokens, and of all
  long long o_token_stride = 0, o_head_stride = 0;
  float* lse = nullptr;
  long long lse_token_stride = 0, lse_head_stride = 0, lse_request_stride = 0;  // as MlaDecodeTensors has them
  float to_log2 = 0, from_log2 = 0, empty_lse = 0;
  int heads = 0;
  int blocks = 0;  // of a query
};

}  // namespace hypermla::cute
