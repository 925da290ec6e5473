// cuDNN's attention, of bf16; with nothing to run where the build or the machine has no cuDNN.
#pragma once

#include "dev/lab/rivals.h"

namespace lab {

// Of attention_forward and attention_backward at (B, T, NH, HS).
std::vector<Rival> cudnn_rivals(const std::string& operation, const std::vector<std::int64_t>& shape);

}  // namespace lab
