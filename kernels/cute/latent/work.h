// The work list of the latent kernel: which thread block attends which rows to which tokens, and what is merged after.
//
// The rows of a request (heads * queries) fall into tiles of 16, 32 or 64, its tokens into blocks of 64. One item is
// one row tile and a range of token blocks. A tile that one item covers is written as output; else its items write
// partial outputs into consecutive slots, in the order of the tokens, and the thread blocks that wrote them merge them
// when all have come to the end of their lists (merge_tiles.cuh). Thread block c takes the items from c * rounds on,
// until one with begin == end. The list is made on the host (work_plan.h) or, where lengths live on the device, there
// (plan_requests.cuh).
#pragma once

namespace hypermla::cute {

inline constexpr int kMaxParts = 160;  // of one tile

// A partial output is float16, also where the output is bfloat16, which has fewer bits in the same bytes. Each piece of
// a row is multiplied by a power of two of its own, so that its largest number comes near to float16's largest. A piece
// is half of the columns; in tiles of 16 and 32 rows it is the columns of one warp. The powers and the log-sum-exp are
// the floats of a row, the latter once for each piece where rows are on M; 64 rows on N leave one unused.
constexpr int part_pieces(int tile_rows) { return tile_rows == 64 ? 2 : 8; }
constexpr int part_row_floats(int tile_rows) { return tile_rows == 64 ? 4 : 1 + part_pieces(tile_rows); }

struct alignas(16) WorkItem {
  int request;
  int row_tile;
  int begin;      // first token block
  int end;        // behind the last token block; end == begin: no more work
  int tokens;     // of the request, in this cache
  int slot;       // of the partial output; -1: the item covers all tokens of its tile
  int first_row;  // of the request, among the rows of all requests
  int queries;    // of the request
  int part;       // of the tile: its slots are slot - part .. slot - part + parts - 1
  int parts;
  int whole = 0;  // tokens of the request in the caches of all shards (shards.h), where there are several
  int unused = 0;
};

// One for each slot; 0 when a list is new. Launches leave it as it was but for the highest bit of `arrived`.
struct alignas(16) MergeState {
  unsigned long long arrived;  // in the tile's first slot, see arrive() in merge_tiles.cuh
  int left;                    // 1: the part's thread block has left its share of the merge to the others
};

}  // namespace hypermla::cute
