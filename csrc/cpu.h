#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace weft {

std::vector<std::string> cpu_features();

// The fastest table that this CPU can run, or the one that is named; null when the name is unknown or cannot run here.
const Kernels* find_kernels(const std::string& name);
std::vector<std::string> available_isas();  // fastest first

}  // namespace weft
