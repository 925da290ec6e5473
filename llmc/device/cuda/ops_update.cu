// Part of CudaOps: the classifier, the norm, and elementwise operations.
#include "llmc/device/cuda/classifier.cuh"
#include "llmc/device/cuda/classifier_parts.cuh"
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/elementwise.cuh"
#include "llmc/device/cuda/global_norm.cuh"

namespace llmc::cuda {

bool has_code_for_this_gpu() {
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(fill_kernel2<float>));
    if (error != cudaSuccess) cudaGetLastError();  // clear the error, which the caller reports
    return error == cudaSuccess;
}

void CudaOps::compute(const FusedClassifier& op, const RowSizes& s) {
    with_kernel_type(op.logits.dtype, [&]<class X>() {
        cuda::fused_classifier(on(), elements<X>(op.logits), elements<float>(op.losses),
                               elements<std::int32_t>(op.targets), s.rows, to_int(s.channels),
                               to_int(op.vocabulary), op.scale, op.write_dlogits, op.terms);
    });
}

void CudaOps::compute(const ClassifierStatistics& op, const RowSizes& s) {
    with_kernel_type(op.logits.dtype, [&]<class X>() {
        cuda::classifier_statistics(on(), elements<float>(op.statistics), elements<X>(op.logits),
                                    elements<std::int32_t>(op.targets), s.rows, to_int(s.channels),
                                    {op.first_column, to_int(op.columns)}, op.terms);
    });
}

void CudaOps::compute(const ClassifierFromStatistics& op, const ClassifierSizes& s) {
    with_kernel_type(op.logits.dtype, [&]<class X>() {
        cuda::classifier_from_statistics(
            on(), elements<X>(op.logits), elements<float>(op.losses), elements<float>(op.all_statistics),
            elements<std::int32_t>(op.targets), to_int(s.ranks), s.rows, to_int(s.channels),
            {op.first_column, to_int(op.columns)}, op.scale, op.write_dlogits, op.terms);
    });
}

void CudaOps::compute(const GlobalNormSquared& op, std::int64_t n) {
    with_gradient_type(op.x.dtype, [&]<class X>() {
        cuda::global_norm_squared(on(), elements<float>(op.partials), elements<X>(op.x), n);
    });
}

void CudaOps::compute(const llmc::Sum& op, std::int64_t n) {
    cuda::sum(on(), elements<double>(op.out), elements<float>(op.x), n, workspace(sum_workspace_bytes()));
}

void CudaOps::compute(const Cast& op, std::int64_t n) {
    if (op.in.dtype == op.out.dtype) return run(Copy{op.out, op.in});
    if (op.in.dtype == DType::fp32) {
        return with_kernel_type(op.out.dtype, [&]<class To>() {
            if constexpr (!std::is_same_v<To, float>)
                cuda::cast(on(), elements<To>(op.out), elements<float>(op.in), n);
        });
    }
    check(op.out.dtype == DType::fp32, "a cast is from or to fp32");
    with_kernel_type(op.in.dtype, [&]<class From>() {
        if constexpr (!std::is_same_v<From, float>)
            cuda::cast(on(), elements<float>(op.out), elements<From>(op.in), n);
    });
}

void CudaOps::compute(const Copy& op, std::int64_t) {
    check_cuda(cudaMemcpyAsync(op.out.data, op.in.data, op.out.bytes(), cudaMemcpyDeviceToDevice,
                               streams_.selected()),
               "cudaMemcpyAsync");
    wait_if_asked("cudaMemcpyAsync");
}

void CudaOps::compute(const Fill& op, std::int64_t n) {
    if (op.value == 0.0F) {
        check_cuda(cudaMemsetAsync(op.out.data, 0, op.out.bytes(), streams_.selected()), "cudaMemsetAsync");
        return;
    }
    const auto fill_as = [&]<class T>(T as_stored) { cuda::fill(on(), elements<T>(op.out), as_stored, n); };
    switch (op.out.dtype) {
        case DType::fp32:
            return fill_as(op.value);
        case DType::bf16:
            return fill_as(from_float<bf16>(op.value));
        case DType::fp16:
            return fill_as(from_float<fp16>(op.value));
        case DType::int32:
            return fill_as(static_cast<std::int32_t>(op.value));
        case DType::fp64:
        case DType::uint8:
            programming_error("on a GPU, fp64 and uint8 tensors are filled with 0 only");
    }
}

void CudaOps::compute(const Add& op, std::int64_t n) {
    with_kernel_type(op.out.dtype, [&]<class X>() {
        cuda::add(on(), elements<X>(op.out), elements<X>(op.a), elements<X>(op.b), n);
    });
}

void CudaOps::compute(const Accumulate& op, std::int64_t n) {
    with_gradient_type(op.in.dtype, [&]<class In>() {
        cuda::accumulate(on(), elements<bf16>(op.out), elements<In>(op.in), n, op.rounding, op.count);
    });
}

void CudaOps::compute(const AllFinite& op, std::int64_t n) {
    with_kernel_type(op.x.dtype, [&]<class X>() {
        cuda::all_finite(on(), elements<std::int32_t>(op.flag), elements<X>(op.x), n);
    });
}

}  // namespace llmc::cuda
