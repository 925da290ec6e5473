// Implements rivals.h: cuBLASLt as the trainer uses it, and cuDNN by rivals_cudnn.cu.
#include "dev/lab/rivals.h"

#include <memory>

#include "dev/lab/matmul_rival.h"
#include "dev/lab/rivals_cudnn.h"

namespace lab {

std::vector<Rival> rivals_of(const std::string& operation, llmc::DType dtype,
                             const std::vector<std::int64_t>& shape) {
    const bool backward = operation == "matmul_backward";
    if (backward || operation == "matmul_forward") {
        const auto product = std::make_shared<MatmulRival>(dtype, MatmulShape(shape));
        return {{"cuBLASLt", [product, backward] { backward ? product->backward() : product->forward(); },
                 product->stream()}};
    }
    return dtype == llmc::DType::bf16 ? cudnn_rivals(operation, shape) : std::vector<Rival>{};
}

}  // namespace lab
