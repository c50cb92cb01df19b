// Exports of the shared library: RegisterCustomOps for onnxruntime, and answers for
// transferry_kernels/__init__.py.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "operators.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {
constexpr size_t KEPT = 4 << 20;

// A block of memory that this thread keeps for its next call.
struct Block {
  void* data = nullptr;
  size_t size = 0;
  ~Block() { free(data); }
};
thread_local Block kept;

// The kernels for AMX, or null. Linux lets a process use the tiles once it has requested them.
const Kernels* amx_kernels() {
#ifdef HAS_AMX
  constexpr unsigned TILE_AND_INT8 = 3 << 24;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILE_AND_INT8) == TILE_AND_INT8 &&
      syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0) {
    return &amx::kernels;
  }
#endif
  return nullptr;
}

// TRANSFERRY_KERNELS_ISA=avx2 or avx512 takes no later instruction set.
const Kernels* best_kernels() {
  const char* named = getenv("TRANSFERRY_KERNELS_ISA");
  const std::string latest = named ? named : "";
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!avx512 || latest == "avx2") return &avx2::kernels;
  const Kernels* amx = latest == "avx512" ? nullptr : amx_kernels();
  return amx ? amx : &avx512::kernels;
}
}  // namespace

Scratch::Scratch(size_t bytes) : data_(std::exchange(kept.data, nullptr)), size_(kept.size) {
  if (data_ && size_ >= bytes) return;
  free(data_);
  size_ = (bytes + 63) / 64 * 64;
  data_ = aligned_alloc(64, size_);
  if (!data_ && bytes) throw std::bad_alloc();
}

Scratch::~Scratch() {
  if (kept.data || size_ > KEPT) {
    free(data_);
  } else {
    kept.data = data_;
    kept.size = size_;
  }
}

const Kernels& kernels() {
  static const Kernels* const best = best_kernels();
  return *best;
}

EXPORTED const char* TransferryKernelsObstacle() {
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs ? "" : "the CPU lacks AVX2 or FMA";
}

EXPORTED const char* TransferryKernelsInstructionSet() {
  const Kernels* used = &kernels();
  return used == &avx2::kernels ? "AVX2" : used == &avx512::kernels ? "AVX-512 VNNI" : "AMX";
}

// Called by SessionOptions.register_custom_ops_library, from several threads at once.
EXPORTED ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  static const bool is_known = [&] {
    ort::api = base->get_api(ort::VERSION);
    if (ort::api) return true;
    ort::api = base->get_api(1);  // whose only use is `failure`
    return false;
  }();
  if (!is_known) return ort::failure("transferry.kernels: expected onnxruntime 1.17 or later");
  try {
    if (const char* obstacle = TransferryKernelsObstacle(); *obstacle) {
      const std::string told = std::string("transferry.kernels: ") + obstacle;
      return ort::failure((told + "; use another variant, such as cpu-int8").c_str());
    }
    static ort::Domain* const domain = [] {
      ort::Domain* made;
      ort::CreateCustomOpDomain("transferry.kernels", &made);
      for (const ort::CustomOp& op : operators()) ort::CustomOpDomain_Add(made, &op);
      return made;
    }();
    ort::AddCustomOpDomain(options, domain);
    return nullptr;
  } catch (const std::exception& error) {
    return ort::failure(error.what());
  }
}
