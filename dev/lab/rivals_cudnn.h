// cuDNN's attention, of bf16: rivals_cudnn.cu where the build has cuDNN and its frontend's headers, nothing
// otherwise.
#pragma once

#include "dev/lab/rivals.h"

namespace lab {

// Of attention_forward and attention_backward at (B, T, NH, HS).
std::vector<Rival> cudnn_rivals(const std::string& operation, const std::vector<std::int64_t>& shape);

}  // namespace lab
