#pragma once
#include <cstddef>

namespace weft {

// Asks for huge pages under a large new buffer. Otherwise touching a fresh output of 32 MB for the first time costs
// 8,192 page faults, about a sixth of the matmul that fills it. A hint: a kernel without them ignores it.
void advise_huge(void* start, size_t bytes);

}  // namespace weft
