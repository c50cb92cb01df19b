// Exports of the shared library: RegisterCustomOps for onnxruntime, and answers for
// transferry_kernels/__init__.py.
#include <cstdlib>
#include <new>
#include <stdexcept>
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

// TRANSFERRY_KERNELS_AVX2=1 takes AVX2 where AVX-512 with VNNI would do.
const Kernels& best_kernels() {
  const char* avx2 = getenv("TRANSFERRY_KERNELS_AVX2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  return avx512 && !(avx2 && avx2[0] == '1') ? avx512::kernels : avx2::kernels;
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
  static const Kernels& best = best_kernels();
  return best;
}

EXPORTED const char* TransferryKernelsObstacle() {
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs ? "" : "the CPU lacks AVX2 or FMA";
}

EXPORTED const char* TransferryKernelsInstructionSet() {
  return &kernels() == &avx2::kernels ? "AVX2" : "AVX-512 VNNI";
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
