// A fingerprint of a few cache lines of each of many buffers: has a weight been written to behind everybody's back?
#pragma once

#include <cstdint>

namespace weft {

// 64 bits of `count` buffers: buffer i is `bytes[i]` long and starts at the address `starts[i]`. Short buffers are read
// whole, long ones in 8 lines of 64 bytes, at places that depend on the length only.
uint64_t sample(const int64_t* starts, const int64_t* bytes, int64_t count);

}  // namespace weft
