// The work list of the latent kernel: which thread block attends which rows to which tokens, and what is merged after.
//
// The rows of a request (h * s) fall into tiles of 64, its tokens into blocks of 64. One item is one row tile and a
// range of token blocks. A tile that one item covers is written as output; else its items write partial outputs into
// consecutive slots, which combine_parts.cuh merges. Thread block c takes the items from c * rounds on, until one with
// begin == end. The list is made on the host (work_plan.h) or, where lengths live on the device, there
// (plan_requests.cuh).
#pragma once

namespace hypermla::cute {

struct WorkItem {
  int request;
  int row_tile;
  int begin;   // first token block
  int end;     // behind the last token block; end == begin: no more work
  int tokens;  // length of the request
  int slot;    // of the partial output; -1: the item covers all tokens of its tile
  int unused[2];
};

struct CombineItem {
  int request;
  int row_tile;
  int first_slot;
  int slots;
};

inline constexpr unsigned kCombineGroupBytes = 6144;  // of shared memory, for a group of threads that merges parts

}  // namespace hypermla::cute
