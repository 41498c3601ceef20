// Products of groups of rows, each with its own matrix: the experts of a mixture.
#ifndef LOWBIT_GROUPS_H_
#define LOWBIT_GROUPS_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace lowbit {

// Consecutive rows of x that are multiplied by the same matrix.
struct Group {
  int64_t begin, rows;  // of all rows of the batch
  const int32_t* index;
};

constexpr int64_t kReadRows = 4;           // rows whose products take as long as reading the matrix once more
constexpr int64_t kGroupedAlone = 300000;  // multiplications that take less time than starting another thread

// The groups that have rows, the largest first. Rows beyond the last group of their x have none.
inline std::vector<Group> groups_of(const Matmul& p, int64_t count, const int32_t* sizes) {
  std::vector<Group> groups;
  for (int64_t b = 0; b < p.batch; ++b) {
    int64_t at = 0;
    for (int64_t g = 0; g < count; ++g) {
      const int64_t rows = std::clamp<int64_t>(sizes[b * count + g], 0, p.m - at);
      if (rows > 0) groups.push_back({b * p.m + at, rows, p.index + b * count + g});
      at += rows;
    }
  }
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.rows > b.rows; });
  return groups;
}

// y = 0 for the rows that are in no group.
inline void clear_rest(const Matmul& p, int64_t count, const int32_t* sizes) {
  const int64_t row = p.n * (p.y_type == Float::f32 ? 4 : 2);
  for (int64_t b = 0; b < p.batch; ++b) {
    int64_t used = 0;
    for (int64_t g = 0; g < count; ++g) used += std::clamp<int64_t>(sizes[b * count + g], 0, p.m - used);
    std::memset(static_cast<char*>(p.y) + (b * p.m + used) * row, 0, static_cast<size_t>((p.m - used) * row));
  }
}

// y[b, m, n] = sum_k x[b, m, k] * w[index[b, g(m)], k, n], where g(m) is the group of row m; sizes are [batch, count].
//
// Groups that take a large share of the time run one after the other, each on all threads. The others run one on each
// thread.
template <typename Multiply>
bool multiply_groups(const Matmul& p, int64_t count, const int32_t* sizes, const Parallel& parallel,
                     const Multiply& multiply) {
  clear_rest(p, count, sizes);
  const std::vector<Group> groups = groups_of(p, count, sizes);
  const int64_t x_row = p.k * (p.x_type == Float::f32 ? 4 : 2), y_row = p.n * (p.y_type == Float::f32 ? 4 : 2);
  std::atomic<bool> enough_memory = true;
  const auto run = [&](const Group& group, const Parallel& threads) {
    Matmul part = p;
    part.batch = 1;
    part.m = group.rows;
    part.index = group.index;
    part.x = static_cast<const char*>(p.x) + group.begin * x_row;
    part.y = static_cast<char*>(p.y) + group.begin * y_row;
    if (!multiply(part, threads)) enough_memory.store(false, std::memory_order_relaxed);
  };
  int64_t total = 0, large = 0;
  for (const Group& group : groups) total += group.rows + kReadRows;
  const int64_t many = static_cast<int64_t>(groups.size());
  for (; large < many && (groups[large].rows + kReadRows) * 2 * parallel.threads() > total; ++large) {
    run(groups[large], parallel);
  }
  const Parallel alone(1, nullptr, nullptr);
  const bool small = p.k * p.n * total < kGroupedAlone;
  (small ? alone : parallel).each(many - large, [&](int64_t i) { run(groups[large + i], alone); });
  return enough_memory;
}

}  // namespace lowbit

#endif  // LOWBIT_GROUPS_H_
