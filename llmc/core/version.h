// The program's version and the commit it was built from.
#pragma once

#include <string_view>

namespace llmc {

std::string_view version();  // "0.1.0"
std::string_view commit();   // "1f93a20", "1f93a20-dirty" with uncommitted changes, "unknown" outside git
// The GPU support of the trainer: "CUDA 13.0 for sm_80 sm_89 sm_90a and later, NCCL, no cuDNN", or why there is
// none.
std::string_view gpu_part();

}  // namespace llmc
