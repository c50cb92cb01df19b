// The part of onnxruntime's C ABI that custom operators need, declared by hand because no package
// has its headers. The ABI is stable: an entry of OrtApi keeps its number, a later version only
// adds some, and CustomOp's layout goes by the version that its first field names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ort {
constexpr uint32_t VERSION = 17;  // of onnxruntime 1.17, the first with start and end versions

struct Status;
struct Value;
struct ShapeInfo;      // OrtTensorTypeAndShapeInfo
struct KernelInfo;     // attributes and constant inputs of a node
struct KernelContext;  // inputs and outputs of a run
struct Domain;         // OrtCustomOpDomain
struct SessionOptions;
using Api = void* const;  // a table of functions
struct ApiBase {
  Api* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

enum Type { FLOAT = 1, UINT8 = 2, INT8 = 3, INT64 = 7, BOOL = 9 };

struct CustomOp {
  uint32_t version;
  void* (*create)(const CustomOp*, Api*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  Type (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  Type (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  int (*input_characteristic)(const CustomOp*, size_t);  // 0: required, 1: optional
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);  // 0: where the provider computes
  int (*variadic[4])(const CustomOp*);
  Status* (*create_v2)(const CustomOp*, Api*, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
};

inline Api* api;

// An entry of OrtApi.
template <class Result, class... Parameters>
struct Function {
  size_t number;
  Result operator()(Parameters... parameters) const {
    return reinterpret_cast<Result (*)(Parameters...)>(api[number])(parameters...);
  }
};
constexpr Function<Status*, int, const char*> CreateStatus{0};
constexpr Function<const char*, const Status*> GetErrorMessage{2};
constexpr Function<void, Status*> ReleaseStatus{93};
constexpr Function<void, ShapeInfo*> ReleaseTensorTypeAndShapeInfo{99};

// An entry of OrtApi that returns a status; throws the status's message.
template <class... Parameters>
struct Entry : Function<Status*, Parameters...> {
  void operator()(Parameters... parameters) const {
    Status* status = Function<Status*, Parameters...>::operator()(parameters...);
    if (!status) return;
    const std::string message = GetErrorMessage(status);
    ReleaseStatus(status);
    throw std::runtime_error(message);
  }
};
using Info = const KernelInfo*;
constexpr Entry<const char*, Domain**> CreateCustomOpDomain{26};
constexpr Entry<Domain*, const CustomOp*> CustomOpDomain_Add{27};
constexpr Entry<SessionOptions*, Domain*> AddCustomOpDomain{28};
constexpr Entry<Value*, void**> GetTensorMutableData{51};
constexpr Entry<const ShapeInfo*, size_t*> GetDimensionsCount{61};
constexpr Entry<const ShapeInfo*, int64_t*, size_t> GetDimensions{62};
constexpr Entry<const Value*, ShapeInfo**> GetTensorTypeAndShape{65};
constexpr Entry<Info, const char*, float*> KernelInfoGetAttribute_float{85};
constexpr Entry<Info, const char*, int64_t*> KernelInfoGetAttribute_int64{86};
constexpr Entry<const KernelContext*, size_t, const Value**> KernelContext_GetInput{90};
constexpr Entry<KernelContext*, size_t, const int64_t*, size_t, Value**> KernelContext_GetOutput{
    91};
constexpr Entry<Info, size_t*> KernelInfo_GetInputCount{230};
constexpr Entry<Info, size_t, char*, size_t*> KernelInfo_GetInputName{232};
constexpr Entry<Info, size_t, int*, const Value**> KernelInfoGetConstantInput_tensor{249};
// Calls a function with 0, 1, ... in the threads of the session.
constexpr Entry<const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*>
    KernelContext_ParallelFor{274};

inline Status* failure(const char* message) {
  constexpr int FAIL = 1;
  return CreateStatus(FAIL, message);
}
}  // namespace ort
