// Implements cudnn_attention.h in a program that is built without cuDNN.
#include "llmc/device/cuda/cudnn_attention.h"

namespace llmc::cuda {

std::unique_ptr<CudnnAttention> make_cudnn_attention() {
    user_error(
        "--attention cudnn: this program was built without cuDNN; install cudnn.h and cuDNN's frontend (with "
        "`make deps-gpu`) and build again, or use --attention flash");
}

}  // namespace llmc::cuda
