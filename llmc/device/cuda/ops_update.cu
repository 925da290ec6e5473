// Part of CudaOps: the classifier, the norm, the update, and elementwise operations.
#include "llmc/device/cuda/adamw.cuh"
#include "llmc/device/cuda/classifier.cuh"
#include "llmc/device/cuda/classifier_parts.cuh"
#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_tensors.h"
#include "llmc/device/cuda/elementwise.cuh"
#include "llmc/device/cuda/global_norm.cuh"
#include "llmc/device/operands.h"

namespace llmc::cuda {

bool has_code_for_this_gpu() {
    cudaFuncAttributes attributes;
    const cudaError_t error =
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(store_kernel<AdamWCoefficients>));
    if (error != cudaSuccess) cudaGetLastError();  // clear the error, which the caller reports
    return error == cudaSuccess;
}

void CudaOps::fused_classifier(const Tensor& logits, const Tensor& losses, const Tensor& targets,
                               std::int64_t vocabulary, float scale, bool write_dlogits,
                               const ClassifierTerms& terms) {
    check_terms(terms);
    const RowSizes s = classifier_sizes(logits, losses, targets, vocabulary);
    with_kernel_type(logits.dtype, [&]<class X>() {
        cuda::fused_classifier(on(), elements<X>(logits), elements<float>(losses),
                               elements<std::int32_t>(targets), s.rows, to_int(s.channels),
                               to_int(vocabulary), scale, write_dlogits, terms);
    });
}

void CudaOps::classifier_statistics(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                                    std::int64_t columns, std::int64_t first_column,
                                    const ClassifierTerms& terms) {
    check_terms(terms);
    const RowSizes s = classifier_statistics_sizes(statistics, logits, targets, columns, first_column);
    with_kernel_type(logits.dtype, [&]<class X>() {
        cuda::classifier_statistics(on(), elements<float>(statistics), elements<X>(logits),
                                    elements<std::int32_t>(targets), s.rows, to_int(s.channels),
                                    {first_column, to_int(columns)}, terms);
    });
}

void CudaOps::classifier_from_statistics(const Tensor& logits, const Tensor& losses,
                                         const Tensor& all_statistics, const Tensor& targets,
                                         std::int64_t columns, std::int64_t first_column, float scale,
                                         bool write_dlogits, const ClassifierTerms& terms) {
    check_terms(terms);
    const ClassifierSizes s =
        classifier_from_statistics_sizes(logits, losses, all_statistics, targets, columns, first_column);
    with_kernel_type(logits.dtype, [&]<class X>() {
        cuda::classifier_from_statistics(on(), elements<X>(logits), elements<float>(losses),
                                         elements<float>(all_statistics), elements<std::int32_t>(targets),
                                         to_int(s.ranks), s.rows, to_int(s.channels),
                                         {first_column, to_int(columns)}, scale, write_dlogits, terms);
    });
}

void CudaOps::global_norm_squared(const Tensor& partials, const Tensor& x) {
    check_dtype(x, x.dtype, "x");
    check_elements(partials, DType::fp32, x.elements() / norm_block_elements, "partials");
    with_kernel_type(x.dtype, [&]<class X>() {
        cuda::global_norm_squared(on(), elements<float>(partials), elements<X>(x), x.elements());
    });
}

void CudaOps::sum(const Tensor& out, const Tensor& x) {
    check_elements(out, DType::fp64, 1, "out");
    check_dtype(x, DType::fp32, "x");
    cuda::sum(on(), elements<double>(out), elements<float>(x), x.elements(),
              workspace(sum_workspace_bytes()));
}

void CudaOps::adamw(const Tensor& parameters, const Tensor& master, const Tensor& m, const Tensor& v,
                    const Tensor& gradients, const Tensor& norm_squared,
                    std::span<const AdamWSegment> segments, const AdamWStep& step,
                    const std::optional<StochasticRounding>& rounding,
                    const std::optional<StochasticRounding>& rounding_of_moments) {
    const AdamWOperands operands{parameters, master, m, v, gradients, norm_squared};
    check_adamw(operands, segments, step, rounding, rounding_of_moments);
    check(m.dtype == DType::fp32 && master.dtype == DType::fp32, "the kernel's state is fp32");
    auto* const coefficients = static_cast<AdamWCoefficients*>(workspace(sizeof(AdamWCoefficients)));
    store_coefficients(on(), coefficients, step);
    with_kernel_type(parameters.dtype, [&]<class X>() {
        const auto update = [&]<class Gradient>() {
            cuda::adamw(on(), elements<X>(parameters), elements<float>(master), elements<float>(m),
                        elements<float>(v), elements<Gradient>(gradients), elements<double>(norm_squared),
                        coefficients, segments, rounding);
        };
        if (gradients.dtype == DType::fp32) return update.template operator()<float>();
        update.template operator()<X>();
    });
}

void CudaOps::cast(const Tensor& out, const Tensor& in) {
    check_dtype(in, in.dtype, "in");
    check_elements(out, out.dtype, in.elements(), "out");
    with_kernel_type(out.dtype, [&]<class To>() {
        with_kernel_type(in.dtype, [&]<class From>() {
            cuda::cast(on(), elements<To>(out), elements<From>(in), in.elements());
        });
    });
}

void CudaOps::copy(const Tensor& out, const Tensor& in) {
    check_dtype(out, out.dtype, "out");
    check_elements(in, out.dtype, out.elements(), "in");
    check_cuda(cudaMemcpyAsync(out.data, in.data, out.bytes(), cudaMemcpyDeviceToDevice, streams_.selected()),
               "cudaMemcpyAsync");
    wait_if_asked("cudaMemcpyAsync");
}

void CudaOps::fill(const Tensor& out, float value) {
    check_dtype(out, out.dtype, "out");
    if (value == 0.0F) {
        check_cuda(cudaMemsetAsync(out.data, 0, out.bytes(), streams_.selected()), "cudaMemsetAsync");
        return;
    }
    const auto fill_as = [&]<class T>(T as_stored) {
        cuda::fill(on(), elements<T>(out), as_stored, out.elements());
    };
    switch (out.dtype) {
        case DType::fp32:
            return fill_as(value);
        case DType::bf16:
            return fill_as(from_float<bf16>(value));
        case DType::int32:
            return fill_as(static_cast<std::int32_t>(value));
        case DType::fp16:
        case DType::fp64:
            programming_error("on a GPU, fp16 and fp64 tensors are filled with 0 only");
    }
}

void CudaOps::add(const Tensor& out, const Tensor& a, const Tensor& b) {
    check_dtype(out, out.dtype, "out");
    check_elements(a, out.dtype, out.elements(), "a");
    check_elements(b, out.dtype, out.elements(), "b");
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::add(on(), elements<X>(out), elements<X>(a), elements<X>(b), out.elements());
    });
}

void CudaOps::accumulate(const Tensor& out, const Tensor& in) {
    check_dtype(out, out.dtype, "out");
    check_elements(in, DType::fp32, out.elements(), "in");
    with_kernel_type(out.dtype, [&]<class X>() {
        cuda::accumulate(on(), elements<X>(out), elements<float>(in), out.elements());
    });
}

void CudaOps::all_finite(const Tensor& flag, const Tensor& x) {
    check_elements(flag, DType::int32, 1, "flag");
    with_kernel_type(x.dtype, [&]<class X>() {
        cuda::all_finite(on(), elements<std::int32_t>(flag), elements<X>(x), x.elements());
    });
}

}  // namespace llmc::cuda
