// Dropout of attention weights without storing a mask: whether (head, query, key) is dropped is a hash of these three
// and a seed, so that the backward, and the plain twin in reference.py, find the same mask again. The query counts from
// the start of the batch, so that no two sequences share a mask; the key counts from the start of its sequence.
#pragma once
#include "strip.h"

namespace weft {
namespace WEFT_ISA {

// Two multiplications and three shifts mix all 32 bits; works on numbers and on vectors of them.
template <class U>
inline U mixed(U x, U between) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= (x >> 15) ^ between;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// What is hashed of a panel of queries. Two numbers, as one alone would let the masks of two queries be each other's,
// shifted, in every batch of a few thousand tokens.
struct Dropped {
  uint32_t first[kPanel], second[kPanel];

  Dropped(const Attention& a, int64_t head, int64_t token) {
    const uint32_t low = uint32_t(a.seed), high = uint32_t(a.seed >> 32);
    const uint32_t of_head = mixed(low ^ (uint32_t(head) * 0x9e3779b1u), high);
    for (int lane = 0; lane < kPanel; ++lane) {
      first[lane] = mixed(of_head + uint32_t(token + lane) * 0x85ebca77u, high);
      second[lane] = mixed(first[lane] ^ high, of_head);
    }
  }

  // All bits set where the weight of vector v's queries and the key stays.
  ivec stays(const Attention& a, int v, int64_t key) const {
    const uvec x = load<uvec>(first + v * kLanes) + uint32_t(key) * 0x9e3779b1u;
    return (ivec)(mixed(x, load<uvec>(second + v * kLanes)) >= (uvec{} + a.drop_below));
  }
};

// Makes dropped weights zero; row j is key `begin` + j.
inline void drop(const Attention& a, const Dropped& dropped, int64_t begin, int64_t count, float* weights, int64_t ld) {
  for (int64_t j = 0; j < count; ++j)
    for (int v = 0; v < kVectors; ++v) {
      float* at = weights + j * ld + v * kLanes;
      store(at, dropped.stays(a, v, begin + j) ? load<vec>(at) : splat(0.0f));
    }
}

}  // namespace WEFT_ISA
}  // namespace weft
