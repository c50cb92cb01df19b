// Operators of the domain transferry.kernels.
#pragma once
#include <vector>

#include "kernels.h"
#include "ort.h"

// Descriptions of all operators, for onnxruntime; they live as long as the process.
const std::vector<ort::CustomOp>& operators();

// The kernels of this CPU; throws where it has no AVX2.
const Kernels& kernels();
