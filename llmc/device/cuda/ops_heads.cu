// Part of CudaOps: rotary positions.
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/rope.cuh"
#include "llmc/device/head_operands.h"

namespace llmc::cuda {

namespace {

template <class X>
HeadPlaces<X> places(const Heads& heads) {
    return {elements<std::remove_const_t<X>>(heads.rows) + heads.first, row_elements(heads)};
}

}  // namespace

void CudaOps::rope(const Heads& x, const Tensor& angles, std::int64_t position, bool inverse) {
    const RopeSizes s = rope_sizes(x, angles, position);
    with_kernel_type(x.rows.dtype, [&]<class X>() {
        cuda::rope(on(), places<X>(x), elements<float>(angles), s.rows, s.sequence, to_int(s.heads),
                   to_int(s.head_size), position, inverse);
    });
}

}  // namespace llmc::cuda
