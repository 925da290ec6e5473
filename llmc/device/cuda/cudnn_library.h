// cuDNN's library, which is loaded when first needed. A program that can use it also starts without it.
#pragma once

namespace llmc::cuda {

// Throws a UserError if this machine has no cuDNN.
void require_cudnn();

}  // namespace llmc::cuda
