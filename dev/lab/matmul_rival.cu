#include "dev/lab/matmul_rival.h"

#include "dev/lab/memory.h"

namespace lab {

using llmc::DType;
using llmc::Tensor;
using llmc::cuda::check_cuda;

MatmulRival::MatmulRival(DType dtype, const MatmulShape& shape)
    : shape_(shape), products_(streams_, "the lab's GPU", llmc::cuda::sm_80, false, false) {
    const auto [rows, in_channels, out_channels] = shape;
    in_ = draw(dtype, {rows, in_channels});
    weight_ = draw(dtype, {out_channels, in_channels});
    bias_ = draw(dtype, {out_channels});
    out_ = draw(dtype, {rows, out_channels});
    din_ = draw(dtype, {rows, in_channels});
    dweight_ = draw(DType::fp32, {out_channels, in_channels});
    products_.set_workspace(allocate(llmc::cuda::LtProducts::workspace_bytes));
    products_.set_autotuning(true);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void MatmulRival::forward() {
    products_.overwrite(out_, {in_, shape_.rows, shape_.in_channels},
                        {weight_, shape_.out_channels, shape_.in_channels, true}, bias_);
}

void MatmulRival::backward() {
    products_.accumulate(dweight_, {out_, shape_.rows, shape_.out_channels, true},
                         {in_, shape_.rows, shape_.in_channels});
    products_.overwrite(din_, {out_, shape_.rows, shape_.out_channels},
                        {weight_, shape_.out_channels, shape_.in_channels}, {});
}

std::byte* MatmulRival::allocate(std::size_t bytes) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    memory_.emplace_back(static_cast<std::byte*>(memory));
    return memory_.back().get();
}

Tensor MatmulRival::draw(DType dtype, const llmc::Shape& shape) {
    Tensor tensor{nullptr, dtype, shape};
    tensor.data = allocate(tensor.bytes());
    const auto fill = [&]<class X>(Array<X>&& host) {
        Draw draw(memory_.size());
        draw.normal(host, 1);
        check_cuda(cudaMemcpy(tensor.data, host.data(), host.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    };
    if (dtype == DType::fp32) {
        fill(Array<float>(tensor.elements()));
    } else {
        fill(Array<bf16>(tensor.elements()));
    }
    return tensor;
}

}  // namespace lab
