// Implements gpus.h in a program that is built without CUDA.
#include "llmc/core/error.h"
#include "llmc/device/cuda/gpus.h"

namespace llmc {

void prepare_gpus() {}

Gpus find_gpus() { return {{}, "built without CUDA"}; }

std::unique_ptr<Device> make_cuda_device(const CudaOptions&) {
    programming_error("this program was built without CUDA, so it has no CUDA device");
}

}  // namespace llmc
