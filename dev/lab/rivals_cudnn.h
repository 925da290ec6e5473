// cuDNN's attention in bf16. If the build or the machine has no cuDNN, `run` is empty.
#pragma once

#include "dev/lab/rivals.h"

namespace lab {

// For attention_forward and attention_backward at (B, T, H, D, K, window); window 0 is none.
std::vector<Rival> cudnn_rivals(const std::string& operation, const std::vector<std::int64_t>& shape);

}  // namespace lab
