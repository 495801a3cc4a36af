// The work list of the latent kernel: which thread block attends which rows to which tokens, and what is merged after.
//
// The rows of a request (heads * queries) fall into tiles of 16, 32 or 64, or one of 48, its tokens into blocks of 64.
// One item is one row tile and a range of token blocks. A tile that one item covers is written as output; else its
// items write partial outputs into consecutive slots, in the order of the tokens, and the thread blocks that wrote them
// merge them when all have come to the end of their lists (merge_tiles.cuh). Of two parts the thread block of the first
// tokens may take up the other while its own is still in registers (Join). Thread block c takes the items from
// c * rounds on, until one with begin == end. The list is made on the host (work_plan.h) or, where lengths live on the
// device, there (plan_requests.cuh).
#pragma once

namespace hypermla::cute {

inline constexpr int kMaxParts = 160;  // of one tile

// A partial output is float16, also where the output is bfloat16, which has fewer bits in the same bytes. Each piece of
// a row is multiplied by a power of two of its own, so that its largest number comes near to float16's largest. A piece
// is half of the columns; in tiles of fewer than 64 rows it is the columns of one warp. The powers and the log-sum-exp
// are the floats of a row, the latter once for each piece where rows are on M; 64 rows on N leave one unused, and what
// has one power for all of a row (rows_on_n_pairs.cuh) leaves the others.
constexpr int part_pieces(int tile_rows) { return tile_rows == 64 ? 2 : 8; }
constexpr int part_row_floats(int tile_rows) { return tile_rows == 64 ? 4 : 1 + part_pieces(tile_rows); }

// What a part has to do with the other one of its tile, where they are two and join: where the thread block that gives
// has other items behind, so that it wrote long before the other one asks. Who takes up waits for who gives, so that is
// a thread block before it, which started no later: none of them waits for one that has found no place.
enum Join : int { kJoinsNone = 0, kGives, kTakesUp };

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
  int join = kJoinsNone;
};

// One for each slot; 0 when a list is new. Launches leave it as it was but for the highest bit of `arrived`.
struct alignas(16) MergeState {
  // In the tile's first slot, see arrive() in merge_tiles.cuh. In that of a part that is given, the warps that have
  // written it and, 2^32 each, those that have read it; the last of these sets it back to 0.
  unsigned long long arrived;
  int left;  // 1: the part's thread block has left its share of the merge to the others
};

}  // namespace hypermla::cute
