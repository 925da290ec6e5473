// cudnn_attention.h in a program that was built without cuDNN.
#include "llmc/device/cuda/cudnn_attention.h"

namespace llmc::cuda {

std::unique_ptr<CudnnAttention> make_cudnn_attention() {
    user_error(
        "--attention cudnn: this program was built without cuDNN's frontend; `make deps-gpu` gets its "
        "headers (PyPI's nvidia-cudnn-frontend), with which and cudnn.h build again, or take --attention "
        "flash");
}

}  // namespace llmc::cuda
