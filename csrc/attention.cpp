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
  const int64_t q = s.cu_q[i], k = s.cu_k[i];
  const int64_t q_len = s.cu_q[i + 1] - q;
  return {q, q_len, k, s.cu_k[i + 1] - k, 0, 0, q_len};
}

// The calling thread keeps its list for the next call, which then allocates nothing.
std::vector<AttentionItem>& kept_items() {
  static thread_local std::vector<AttentionItem> items;
  items.clear();
  return items;
}

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
  const std::vector<AttentionItem>& items;
  std::atomic<int64_t> next{0};

  void run() {
    float* mine = scratch.take();
    const int64_t count = int64_t(items.size()), heads = attention.heads;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count * heads;) {
      AttentionItem item = items[i / heads];
      item.head = i % heads;
      kernels.attention(attention, item, mine);
    }
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
  std::vector<AttentionItem>& items = kept_items();
  for (int64_t i = 0; i < sequences.count; ++i) {
    AttentionItem item = sequence(sequences, i);
    for (; item.begin < item.q_len; item.begin += block) {
      item.end = std::min(item.begin + block, item.q_len);
      items.push_back(item);
    }
  }
  sort_by_cost(items);
  threads = int(std::min<int64_t>(threads, int64_t(items.size()) * job.heads));
  if (threads == 0) return;
  ThreadScratch scratch(kernels.attention_scratch(job.head_dim), threads);
  Forward forward{kernels, job, scratch, items};
  parallel(threads, [](void* arg) { static_cast<Forward*>(arg)->run(); }, &forward);
}

void attention_grad(const Kernels& kernels, const AttentionGrad& job, const Sequences& sequences, int threads) {
  std::vector<AttentionItem>& items = kept_items();
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
