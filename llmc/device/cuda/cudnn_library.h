// cuDNN's library, which is looked for when it is first needed: a program that can use it starts without it too.
#pragma once

namespace llmc::cuda {

// UserError where this machine has none.
void require_cudnn();

}  // namespace llmc::cuda
