// gpus.h in a program that was built without CUDA.
#include "llmc/core/error.h"
#include "llmc/device/cuda/gpus.h"

namespace llmc {

Gpus find_gpus() { return {{}, "built without CUDA"}; }

std::unique_ptr<Device> make_cuda_device(const CudaOptions&) {
    programming_error("there is no CUDA device without CUDA");
}

}  // namespace llmc
