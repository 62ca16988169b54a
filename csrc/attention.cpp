#include "attention.h"

#include <algorithm>
#include <atomic>
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

// Sequences by falling cost, so that no thread starts a long one when the others are done.
std::vector<AttentionItem> by_cost(const Sequences& s) {
  std::vector<AttentionItem> items(s.count);
  for (int64_t i = 0; i < s.count; ++i) items[i] = sequence(s, i);
  std::stable_sort(items.begin(), items.end(),
                   [](const auto& a, const auto& b) { return a.q_len * a.k_len > b.q_len * b.k_len; });
  return items;
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
  std::vector<AttentionItem> items;
  for (const AttentionItem& whole : by_cost(sequences))
    for (int64_t begin = 0; begin < whole.q_len; begin += block) {
      items.push_back(whole);
      items.back().begin = begin, items.back().end = std::min(begin + block, whole.q_len);
    }
  threads = int(std::min<int64_t>(threads, int64_t(items.size()) * job.heads));
  if (threads == 0) return;
  ThreadScratch scratch(kernels.attention_scratch(job.head_dim), threads);
  Forward forward{kernels, job, scratch, items};
  parallel(threads, [](void* arg) { static_cast<Forward*>(arg)->run(); }, &forward);
}

void attention_grad(const Kernels& kernels, const AttentionGrad& job, const Sequences& sequences, int threads) {
  std::vector<AttentionItem> items = by_cost(sequences);
  if (job.dbias)
    for (int64_t i = 0; i < sequences.count; ++i) items[i] = sequence(sequences, i);
  int64_t longest = 0;
  for (const AttentionItem& item : items) longest = std::max(longest, item.q_len);
  const int64_t units = job.forward.kv_heads * (job.dbias ? 1 : sequences.count);
  threads = int(std::min<int64_t>(threads, units));
  if (threads == 0) return;
  const int64_t group = job.forward.heads / job.forward.kv_heads;
  ThreadScratch scratch(kernels.attention_grad_scratch(job.forward.head_dim, group, longest), threads);
  Backward backward{kernels, job, scratch, items};
  parallel(threads, [](void* arg) { static_cast<Backward*>(arg)->run(); }, &backward);
}

}  // namespace weft
