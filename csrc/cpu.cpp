#include "cpu.h"

namespace weft {

namespace {

#if WEFT_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> out;
#if WEFT_X86
  if (has_avx512()) out.push_back(&kernels_avx512);
  if (has_avx2()) out.push_back(&kernels_avx2);
#endif
  out.push_back(&kernels_portable);
  return out;
}

}  // namespace

std::vector<std::string> cpu_features() {
  std::vector<std::string> out;
#if WEFT_X86
#define WEFT_FEATURE(name) \
  if (__builtin_cpu_supports(name)) out.emplace_back(name)
  WEFT_FEATURE("sse4.2");
  WEFT_FEATURE("avx");
  WEFT_FEATURE("avx2");
  WEFT_FEATURE("fma");
  WEFT_FEATURE("avx512f");
  WEFT_FEATURE("avx512bw");
  WEFT_FEATURE("avx512dq");
  WEFT_FEATURE("avx512vl");
  WEFT_FEATURE("avx512bf16");
#undef WEFT_FEATURE
#endif
  return out;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> out;
  for (const Kernels* k : runnable()) out.emplace_back(k->name);
  return out;
}

const Kernels* find_kernels(const std::string& name) {
  static const std::vector<const Kernels*> tables = runnable();
  if (name.empty()) return tables.front();
  for (const Kernels* k : tables)
    if (name == k->name) return k;
  return nullptr;
}

}  // namespace weft
