// How a product with activations in int8 is divided: blocks, slabs and tiles.
#ifndef LOWBIT_FAST_TILING_H_
#define LOWBIT_FAST_TILING_H_

#include "matmul_common.h"

namespace lowbit::LOWBIT_ISA {

constexpr int64_t kWholeRow = 65536;  // 128 * 127 * kWholeRow < 2^31
constexpr int64_t kShared = 256;      // of k that share a scale of x, if spans are shorter
constexpr int64_t kMostSpans = 32;    // in a slab: of 16 or more, in at most 512
constexpr int64_t kTileX = 1 << 21;   // bytes of x
constexpr int64_t kTileBytes = 64;    // of each stored row in a tile of columns: a line of the cache

// The register tile, the bytes that a value of x and a level of the panel take, the number of rows of x that need no
// panel, and the height of the first tile of rows, which leaves registers to decode the next panel (0: no such tile).
#if defined(LOWBIT_NEON)
constexpr int kFastVectors = 4, kBlockedVectors = 2;
constexpr int kFewRows = 1, kAheadRows = 0;
#if defined(LOWBIT_NEON_DOT)
constexpr int fast_rows(bool, bool) { return 6; }
#else
constexpr int fast_rows(bool, bool) { return 4; }  // products take registers, too
#endif
constexpr int value_bytes(bool) { return 1; }
#elif defined(LOWBIT_AVX512)
constexpr int kFastVectors = 4, kBlockedVectors = 2;
constexpr int kFewRows = 4, kAheadRows = 4;
constexpr int fast_rows(bool, bool) { return 6; }
constexpr int value_bytes(bool) { return 1; }
#elif defined(LOWBIT_AVX2)
constexpr int kFastVectors = 2, kBlockedVectors = 2;
constexpr int kFewRows = 4, kAheadRows = 0;
constexpr int fast_rows(bool small, bool blocked) { return !blocked ? 6 : small ? 2 : 4; }
constexpr int value_bytes(bool small) { return small ? 1 : 2; }
#else
constexpr int kFastVectors = 2, kBlockedVectors = 2;
constexpr int kAheadRows = 0;
constexpr int fast_rows(bool, bool) { return 4; }
constexpr int value_bytes(bool) { return 2; }
#endif
// The rows of x and the columns that one instruction multiplies, and how many k of each it adds up.
#if defined(LOWBIT_NEON_I8MM)
constexpr int kPair = 2;
#else
constexpr int kPair = 1;
#endif
constexpr int kGroup = 4 * kPair;
#if defined(LOWBIT_NEON)
constexpr bool kSignedPanel = true;
#else
constexpr bool kSignedPanel = false;
#endif
constexpr int kFastColumns = kFastVectors * kLanes;

// How a product is divided. All lengths along k are multiples of `unit`.
struct FastTiling {
  bool blocked;   // otherwise one block, whose integer sums are kept until the end
  int64_t unit;   // of k decoded at once: in a dword of stored bytes (last axis contracted) or kGroup rows
  int64_t block;  // of k that share a scale of x
  int64_t blocks;
  int64_t span;  // of k that share a scale of the weights, or less; divides the block
  int64_t spans;
  int64_t scale_spans;  // of each scale of the weights
  int64_t slab;         // of k in a panel; if blocked, it has whole spans of one block
  int64_t slabs;
  int64_t columns;               // in a tile
  int64_t tiles;                 // of all columns
  int64_t rows;                  // of x, with a row of zeros if the last one has no pair
  int64_t first_height, height;  // of the first tile of rows, and of the others but the last
  bool by_tile;                  // all slabs of a tile, then the next tile; otherwise all tiles of a slab
  bool decodes_ahead;            // the first tile of rows decodes the next panel

  int64_t row_tiles() const { return 1 + ceil_div(max(rows - first_height, 0), height); }
  int64_t row_of(int64_t tile) const { return tile == 0 ? 0 : first_height + (tile - 1) * height; }
  int64_t tile_of(int64_t row) const { return row < first_height ? 0 : 1 + (row - first_height) / height; }
  int64_t height_of(int64_t tile) const { return min(tile == 0 ? first_height : height, rows - row_of(tile)); }
  // How many tiles from this one on are of the same height, and follow each other.
  int64_t tiles_like(int64_t tile) const {
    if (tile == 0 && (decodes_ahead || first_height != height)) return 1;
    return max(row_tiles() - tile - (height_of(row_tiles() - 1) == height ? 0 : 1), 1);
  }
};

// Returns false if scales vary within an integer sum.
template <typename D>
bool make_tiling(const Matmul& p, FastTiling& tiling) {
  const int64_t across = p.contract_last ? p.w.row_span : p.w.col_span;
  const int64_t along = p.contract_last ? p.w.col_span : p.w.row_span;
  if (across != 1 || p.k == 0) return false;
  tiling.unit = p.contract_last ? max(4 * D::kPerByte, kGroup) : kGroup;
  tiling.blocked = along < p.k || p.k > kWholeRow;
  tiling.span = tiling.blocked ? along : round_up(p.k, tiling.unit);
  if (tiling.blocked && tiling.span > 512) {
    for (tiling.span = 512; along < p.k && along % tiling.span != 0; tiling.span /= 2) {
    }
  }
  if (tiling.span % tiling.unit != 0 || (tiling.blocked && tiling.span < 16)) return false;
  // Few bytes of each column, since the next slab is read into the same cache; more if there are more sums, which each
  // slab reads and writes.
  const int64_t few = min((p.m <= 8 ? 64 : p.m <= 32 ? 128 : 256) * D::kPerByte, 256);
  const int64_t rows = p.m > 64 && !tiling.blocked ? 512 : few;
  const int64_t depth = p.contract_last ? max(D::kPerByte == 1 ? 256 : 512, kBytes * D::kPerByte) : rows;
  // Several spans share a scale of x, so that it multiplies their sum.
  tiling.block = tiling.blocked ? max(kShared / tiling.span, 1) * tiling.span : tiling.span;
  tiling.blocks = ceil_div(p.k, tiling.block);
  tiling.spans = ceil_div(p.k, tiling.span);
  tiling.scale_spans = along < p.k ? along / tiling.span : tiling.spans;
  // A slab is a part of a block, and has whole spans.
  const bool divides = tiling.block % depth == 0 && (!tiling.blocked || depth % tiling.span == 0);
  tiling.slab = tiling.blocked && !divides ? tiling.block : min(depth, tiling.block);
  tiling.slabs = ceil_div(p.k, tiling.slab);
  tiling.columns = p.contract_last ? kTileBytes : kTileBytes * D::kPerByte;
  tiling.tiles = ceil_div(p.n, tiling.columns);
  tiling.rows = round_up(p.m, kPair);
  // All of a stored row before the next one, if x stays in L2 meanwhile.
  tiling.by_tile = p.contract_last && p.m * p.k <= kTileX;
  // Tiles of about the same height.
  tiling.decodes_ahead = !p.contract_last && kAheadRows > 0 && tiling.rows >= kAheadRows;
  const int64_t rest = tiling.rows - (tiling.decodes_ahead ? kAheadRows : 0),
                most = fast_rows(D::kSmall, tiling.blocked);
  tiling.height = rest > 0 ? round_up(ceil_div(rest, ceil_div(rest, most)), kPair) : most;
  tiling.first_height = tiling.decodes_ahead ? kAheadRows : tiling.height;
  return true;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_TILING_H_
