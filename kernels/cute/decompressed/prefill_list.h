// The work of a prefill step: which requests there are, and which tiles they make. The planner (plan_prefill.cuh)
// writes the list, the attention (prefill.cuh) draws from it.
//
// The tiles of the list are numbered through. Requests follow each other by falling number of tokens, so that the last
// wave is made of short tiles; causal tiles of a head likewise. The heads of a request form sections whose keys and
// values fit L2 together; a section's tiles follow each other. Where there are fewer tiles than would keep all
// multiprocessors busy, the tokens of tiles are cut into parts, which are numbered as tiles are.
#pragma once

#include "attend_tiles.h"
#include "hypermla/tensor_map.h"
#include "mla/decompressed/prefill.h"

namespace hypermla::cute {

// A request that has queries.
struct alignas(16) PrefillItem {
  int first_tile;      // its first one among those of all requests
  int section;         // heads that are walked together
  int query, queries;  // its first one among all, and how many
  int token, tokens;   // likewise
  int parts;           // of each tile's tokens
  int first_slot;      // for parts: of its first tile's first one
};
enum PrefillStatus : int { kWrongTokenStarts = 1, kWrongQueryStarts = 2 };

// Stands before the items.
struct alignas(256) PrefillList {
  int drawn;  // tiles of a launch: 0 before it, and 0 after it
  int tiles;  // of all requests, or their parts: less than 2^28 within the limits of MlaPrefillOptions
  int items;
  int status;  // bits of PrefillStatus, of the last plan
};

// As the scheduler hands it over. A part counts tokens from its own first one.
struct alignas(16) PrefillTile {
  int head;      // -1: no more tiles
  int tokens;    // of the request
  int blocks;    // of 128 tokens that some query sees, in a part its own
  int rows;      // queries
  int query;     // the first one among those of all requests
  int token;     // the request's first one among those of all requests
  int diagonal;  // causal: row r sees the first diagonal + r + 1 tokens, at most all
  // Which one of the tile's parts, whether every part of the list has a thread block of its own, and the slot of the
  // tile's first part.
  unsigned part : 6, parts : 6, together : 1, first_slot : 19;
};

// Where parts are stored, in slots of a tile each.
struct PrefillParts {
  float* o = nullptr;    // [slots, kRows, kPartColumns]
  float* lse = nullptr;  // [slots, kRows], in log2
  // [slots]: that of a tile's first slot is of its first kGroupRows rows, the next one of its others: see
  // prefill_arrival.cuh. 0 behind a plan, and a launch.
  unsigned long long* arrived = nullptr;
};
constexpr int kPartColumns = 128;
constexpr int kMaxPrefillParts = 32;  // of a tile
// The slots of a grid of so many thread blocks: 66 KB each, 26 MB for 132 thread blocks.
constexpr int prefill_slots(int processors) { return 3 * processors; }

constexpr int prefill_row_tiles(int queries) { return (queries + kRows - 1) / kRows; }

// The tile of that number of an item, from 0 to heads * prefill_row_tiles(queries) - 1.
constexpr PrefillTile prefill_tile(const PrefillItem& item, int number, int heads, bool causal) {
  const int row_tiles = prefill_row_tiles(item.queries), of_section = item.section * row_tiles;
  const int first_head = number / of_section * item.section, within = number - first_head * row_tiles;
  const int section = heads - first_head < item.section ? heads - first_head : item.section;
  const int step = within / section, row = (causal ? row_tiles - 1 - step : step) * kRows;
  const int diagonal = item.tokens - item.queries + row;
  const int seen = causal && diagonal + kRows < item.tokens ? diagonal + kRows : item.tokens;
  return {.head = first_head + within - step * section,
          .tokens = item.tokens,
          .blocks = seen > 0 ? (seen + kBlock - 1) / kBlock : 0,
          .rows = item.queries - row < kRows ? item.queries - row : kRows,
          .query = item.query + row,
          .token = item.token,
          .diagonal = diagonal,
          .part = 0,
          .parts = 1,
          .together = 0,
          .first_slot = 0};
}

// Leaves one of its parts of the tile of that number.
constexpr void cut_tile(PrefillTile& tile, const PrefillItem& item, int number, unsigned part, bool together) {
  const unsigned blocks = tile.blocks, parts = item.parts, each = blocks / parts, more = blocks - each * parts;
  const int first = part * each + (part < more ? part : more);  // the first `more` parts have a block more
  tile.tokens -= first * kBlock;
  tile.blocks = each + (part < more);
  tile.token += first * kBlock;
  tile.diagonal -= first * kBlock;
  tile.part = part;
  tile.parts = item.parts;
  tile.together = together;
  tile.first_slot = item.first_slot + number * item.parts;
}

struct PrefillArguments {
  // Queries, keys and values [tokens, heads, 128] and [tokens, heads, 64], boxes of 128 rows and all columns.
  TensorMap q_map = {}, qpe_map = {}, k_map = {}, kpe_map = {}, v_map = {};
  PrefillList* list = nullptr;                 // and the items behind it
  PrefillParts parts;
  void* o = nullptr;     // [query_tokens, heads, 128]
  float* lse = nullptr;  // [query_tokens, heads]
  long long o_token_stride = 0, o_head_stride = 0, lse_token_stride = 0, lse_head_stride = 0;
  float scale_log2 = 0;  // of the scores, times log2(e); positive
  float lse_unit = 0;    // of lse per log2: ln 2 for natural logarithms
  float empty_lse = 0;   // of rows that see no token
  int heads = 0;
  int rope_heads = 0;               // of the RoPE keys: heads, or 1 for all
  int query_tokens = 0;             // of the tensors
  // With problem.rows: the row of each query of the plan, and boxes of one row and 64 columns.
  const int* query_rows = nullptr;
  TensorMap q_row_map = {}, qpe_row_map = {};
};

struct PlanPrefillTiling {
  int threads = 512;
  int section = 32;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("threads", self.threads, "threads of the one block");
    field("section", self.section, "MiB of keys and values whose heads are walked together, to stay in L2");
  }
};

struct PlanPrefillArguments {
  const int* query_starts = nullptr;      // [requests + 1]
  const int* token_starts = nullptr;      // [requests + 1]
  const int* query_rows = nullptr;        // [query_starts[requests]], or none
  int* planned_rows = nullptr;            // [all_queries]: where they are kept for the attention
  PrefillList* list = nullptr;            // and the items behind it
  unsigned long long* arrived = nullptr;  // of PrefillParts
  int requests = 0;
  int heads = 0;
  int all_queries = 0;  // of all requests, at most
  int max_tokens = 0;   // of a request
  int causal = 0;
  int processors = 1;  // thread blocks of the attention
  int slots = 0;       // for parts; 0: tiles are not cut
};

}  // namespace hypermla::cute
