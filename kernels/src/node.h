// A node of a graph, when onnxruntime creates its kernel and when it runs it. Everything that comes
// from the graph is checked here or in operators.cpp: the kernels trust their sizes.
#pragma once
#include <cmath>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels.h"
#include "ort.h"

// 16 of the vectors' lanes hold a size.
constexpr int LANES = 16;
constexpr int64_t ANY = -1;

[[noreturn]] inline void refuse(const std::string& message) { throw std::runtime_error(message); }

inline void require(bool condition, const char* message) {
  if (!condition) refuse(message);
}

// Sizes of a tensor: the first four, and their number.
struct Shape {
  size_t rank = 0;
  int64_t sizes[4] = {};

  explicit Shape(const ort::Value* value) {
    ort::ShapeInfo* info;
    ort::GetTensorTypeAndShape(value, &info);
    ort::GetDimensionsCount(info, &rank);
    ort::GetDimensions(info, sizes, rank < 4 ? rank : 4);
    ort::ReleaseTensorTypeAndShapeInfo(info);
    for (int64_t size : sizes) require(size <= INT32_MAX, "expected sizes below 2,147,483,648");
  }
  int operator[](size_t i) const { return int(sizes[i]); }

  // Refuses a tensor that has other sizes; ANY fits all.
  void expect(const std::string& name, std::initializer_list<int64_t> expected) const {
    bool fits = rank == expected.size();
    for (size_t i = 0; fits && i < rank; ++i) {
      const int64_t size = expected.begin()[i];
      fits = size == ANY || size == sizes[i];
    }
    if (fits) return;
    refuse("expected " + name + " of shape " + text(expected.begin(), expected.size()) +
           ", found " + text(sizes, rank));
  }
  // Refuses a tensor of several values: shapes [] and [1] are one.
  void expect_one(const std::string& name) const {
    if (rank != 1 || sizes[0] != 1) expect(name, {});
  }

 private:
  static std::string text(const int64_t* sizes, size_t rank) {
    std::string found = "[";
    for (size_t i = 0; i < rank; ++i) {
      if (i) found += ", ";
      found += i >= 4 ? "..." : sizes[i] == ANY ? "?" : std::to_string(sizes[i]);
    }
    return found + "]";
  }
};

template <class T>
T* data(const ort::Value* value) {
  void* found;
  ort::GetTensorMutableData(const_cast<ort::Value*>(value), &found);
  return static_cast<T*>(found);
}

// A size that fills the vectors of the kernels.
inline int checked(int64_t size, const std::string& name, int64_t largest) {
  if (size > 0 && size <= largest && size % LANES == 0) return int(size);
  refuse("expected " + name + " to be a multiple of 16 up to " + std::to_string(largest) +
         ", found " + std::to_string(size));
}

// Attributes and constant inputs of a node.
class Node {
 public:
  explicit Node(ort::Info info) : info_(info) {}

  // The name of an input in the graph; empty for an input that was left out.
  std::string name(size_t input) const {
    size_t count, size = 0;
    ort::KernelInfo_GetInputCount(info_, &count);
    if (input >= count) return "";
    ort::KernelInfo_GetInputName(info_, input, nullptr, &size);
    std::string found(size, '\0');
    ort::KernelInfo_GetInputName(info_, input, found.data(), &size);
    return found.c_str();  // without the zero at the end
  }
  Shape shape(size_t input) const { return Shape(constant(input)); }

  template <class T>
  const T* constant(size_t input, std::initializer_list<int64_t> sizes) const {
    const ort::Value* value = constant(input);
    Shape(value).expect(name(input), sizes);
    return data<const T>(value);
  }
  template <class T>
  T scalar(size_t input) const {
    const ort::Value* value = constant(input);
    Shape(value).expect_one(name(input));
    return *data<const T>(value);
  }
  int64_t integer(const char* attribute) const {
    int64_t value;
    ort::KernelInfoGetAttribute_int64(info_, attribute, &value);
    return value;
  }
  int head_width() const { return checked(integer("width"), "the heads' width", MAX_HEAD_WIDTH); }

  // LayerNormalization with gamma and beta from an input on.
  Norm norm(size_t gamma, int width) const {
    float epsilon;
    ort::KernelInfoGetAttribute_float(info_, "epsilon", &epsilon);
    checked(width, "the width of LayerNormalization", INT32_MAX);
    return {constant<float>(gamma, {width}), constant<float>(gamma + 1, {width}), epsilon};
  }

 private:
  const ort::Value* constant(size_t input) const {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    ort::KernelInfoGetConstantInput_tensor(info_, input, &is_constant, &value);
    if (is_constant) return value;
    refuse("expected a constant, found the computed value " + name(input) +
           "; choose another level of optimisation than disable, which computes constants at "
           "each run");
  }

  ort::Info info_;
};

// Inputs and outputs of a run.
class Context {
 public:
  explicit Context(ort::KernelContext* context) : context_(context) {}

  Shape shape(size_t input) const { return Shape(value(input)); }

  template <class T>
  const T* in(size_t input) const {
    return data<const T>(value(input));
  }
  template <class T>
  const T* in(size_t input, const char* name, std::initializer_list<int64_t> sizes) const {
    shape(input).expect(name, sizes);
    return in<T>(input);
  }
  // Rows of a matrix.
  int rows(size_t input, const char* name, int64_t width) const {
    const Shape found = shape(input);
    found.expect(name, {ANY, width});
    return found[0];
  }
  // Null for an output that the graph leaves out.
  template <class T>
  T* out(size_t output, std::initializer_list<int64_t> sizes) const {
    ort::Value* value = nullptr;
    ort::KernelContext_GetOutput(context_, output, sizes.begin(), sizes.size(), &value);
    return value ? data<T>(value) : nullptr;
  }
  // Calls function(0), function(1), ... in the threads of the session; it must not throw.
  template <class Function>
  void parallel(size_t count, Function function) const {
    if (count == 1) return function(0);
    auto call = [](void* data, size_t i) noexcept { (*static_cast<Function*>(data))(i); };
    ort::KernelContext_ParallelFor(context_, call, count, 0, &function);
  }

 private:
  const ort::Value* value(size_t input) const {
    const ort::Value* found = nullptr;
    ort::KernelContext_GetInput(context_, input, &found);
    if (!found) refuse("expected an input, found that it was left out");
    return found;
  }

  ort::KernelContext* context_;
};
