#include "attention.h"

#include <algorithm>
#include <atomic>
#include <tuple>
#include <vector>

#include "scratch.h"
#include "threads.h"

namespace weft {

namespace {

AttentionItem sequence(const Sequences& s, int64_t i) {
  const int64_t q = s.cu_q[i], q_len = s.cu_q[i + 1] - q;
  if (!s.cu_k) return {q, q_len, s.k_start[i], s.k_len[i], 0, 0, q_len};
  return {q, q_len, s.cu_k[i], s.cu_k[i + 1] - s.cu_k[i], 0, 0, q_len};
}

// The calling thread keeps its lists for the next call, which then allocates nothing.
struct Items {
  std::vector<AttentionItem> blocks;  // blocks of queries, for each head
  std::vector<AttentionItem> few;     // all queries of a sequence where they are few, for each key head
};

Items& kept_items() {
  static thread_local Items items;
  items.blocks.clear(), items.few.clear();
  return items;
}

bool takes_few(const Attention& a) { return !a.slopes && !a.bias && !a.lse && !a.drop_below; }

// By falling cost of the sequence, so that no thread starts a long one when the others are done. Not stable_sort,
// which allocates: the order is total.
void sort_by_cost(std::vector<AttentionItem>& items) {
  std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
    return std::tuple(-a.q_len * a.k_len, a.q_start, a.begin) < std::tuple(-b.q_len * b.k_len, b.q_start, b.begin);
  });
}

struct Forward {
  const Kernels& kernels;
  const Attention& attention;
  ThreadScratch& scratch;
  const Items& items;
  std::atomic<int64_t> next{0};

  int64_t blocks() const { return int64_t(items.blocks.size()) * attention.heads; }
  int64_t total() const { return blocks() + int64_t(items.few.size()) * attention.kv_heads; }

  void compute(int64_t i, float* mine) {
    const bool few = i >= blocks();
    const int64_t at = few ? i - blocks() : i, heads = few ? attention.kv_heads : attention.heads;
    AttentionItem item = (few ? items.few : items.blocks)[at / heads];
    item.head = at % heads;
    (few ? kernels.attention_few : kernels.attention)(attention, item, mine);
  }

  void run() {
    float* mine = scratch.take();
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total();) compute(i, mine);
  }
};

struct Backward {
  const Kernels& kernels;
  const AttentionGrad& grad;
  ThreadScratch& scratch;
  const std::vector<AttentionItem>& items;
  std::atomic<int64_t> next{0};

  void compute(int64_t i, int64_t head, float* mine) {
    AttentionItem item = items[i];
    item.head = head;
    kernels.attention_grad(grad, item, mine);
  }

  void run() {
    float* mine = scratch.take();
    const int64_t count = int64_t(items.size()), heads = grad.forward.kv_heads;
    if (grad.dbias) {  // summed over sequences: one thread takes all of a head, in their order
      for (int64_t h; (h = next.fetch_add(1, std::memory_order_relaxed)) < heads;)
        for (int64_t i = 0; i < count; ++i) compute(i, h, mine);
      return;
    }
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count * heads;)
      compute(i / heads, i % heads, mine);
  }
};

}  // namespace

void attention(const Kernels& kernels, const Attention& job, const Sequences& sequences, int threads) {
  const int64_t block = kernels.attention_queries(job.head_dim);
  Items& items = kept_items();
  for (int64_t i = 0; i < sequences.count; ++i) {
    AttentionItem item = sequence(sequences, i);
    if (item.q_len == 0) continue;
    if (item.q_len <= kFewQueries && takes_few(job)) {
      items.few.push_back(item);
      continue;
    }
    for (; item.begin < item.q_len; item.begin += block) {
      item.end = std::min(item.begin + block, item.q_len);
      items.blocks.push_back(item);
    }
  }
  sort_by_cost(items.blocks);
  sort_by_cost(items.few);
  const int64_t for_blocks = items.blocks.empty() ? 0 : kernels.attention_scratch(job.head_dim);
  const int64_t for_few = kernels.attention_few_scratch(job.head_dim, job.heads / job.kv_heads);
  threads = int(std::min<int64_t>(
      threads, int64_t(items.blocks.size()) * job.heads + int64_t(items.few.size()) * job.kv_heads));
  if (threads == 0) return;
  ThreadScratch scratch(std::max(for_blocks, for_few), threads);
  Forward forward{kernels, job, scratch, items};
  parallel(threads, [](void* arg) { static_cast<Forward*>(arg)->run(); }, &forward);
}

void attention_grad(const Kernels& kernels, const AttentionGrad& job, const Sequences& sequences, int threads) {
  std::vector<AttentionItem>& items = kept_items().blocks;
  int64_t longest = 0;
  for (int64_t i = 0; i < sequences.count; ++i) {
    items.push_back(sequence(sequences, i));
    longest = std::max(longest, items.back().q_len);
  }
  if (!job.dbias) sort_by_cost(items);
  const int64_t units = job.forward.kv_heads * (job.dbias ? 1 : sequences.count);
  threads = int(std::min<int64_t>(threads, units));
  if (threads == 0) return;
  const int64_t group = job.forward.heads / job.forward.kv_heads;
  ThreadScratch scratch(kernels.attention_grad_scratch(job.forward.head_dim, group, longest), threads);
  Backward backward{kernels, job, scratch, items};
  parallel(threads, [](void* arg) { static_cast<Backward*>(arg)->run(); }, &backward);
}

}  // namespace weft
