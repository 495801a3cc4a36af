// The work list of the latent kernel: which thread block attends which rows to which tokens, and what is merged after.
//
// The rows of a request (heads * queries) fall into tiles of 16, 32 or 64, its tokens into blocks of 64. One item is
// one row tile and a range of token blocks. A tile that one item covers is written as output; else its items write
// partial outputs into consecutive slots, which combine_parts.cuh or combine_rows.cuh merges. Thread block c takes the
// items from c * rounds on, until one with begin == end. The list is made on the host (work_plan.h) or, where lengths
// live on the device, there (plan_requests.cuh).
#pragma once

namespace hypermla::cute {

struct alignas(16) WorkItem {
  int request;
  int row_tile;
  int begin;      // first token block
  int end;        // behind the last token block; end == begin: no more work
  int tokens;     // length of the request
  int slot;       // of the partial output; -1: the item covers all tokens of its tile
  int first_row;  // of the request, among the rows of all requests
  int queries;    // of the request
};

struct alignas(16) CombineItem {
  int request;
  int row_tile;
  int first_slot;
  int slots;      // 0: nothing to merge
  int first_row;  // as in WorkItem
  int queries;
  int unused[2];
};

// Groups of 128 threads of a block that merges parts, at most; how many of them merge so many parts, a power of two;
// and the block's dynamic shared memory: a place for each group but the first.
inline constexpr int kCombineGroups = 8;
constexpr int groups_for(int parts) { return parts <= 8 ? 1 : parts <= 16 ? 4 : kCombineGroups; }
constexpr unsigned combine_shared_bytes(int groups) { return (groups - 1) * 6144; }

}  // namespace hypermla::cute
