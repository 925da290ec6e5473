// Part of CudaOps: the classifier, the norm, the update, and elementwise operations.
#include "llmc/device/cuda/adamw.cuh"
#include "llmc/device/cuda/adamw_8bit.cuh"
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
    with_gradient_type(x.dtype, [&]<class X>() {
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
                    const std::optional<StochasticRounding>& rounding_of_moments,
                    const EightBitMoments& in_8_bits) {
    const AdamWOperands operands{parameters, master, m, v, gradients, norm_squared};
    check_adamw(operands, segments, step, rounding, rounding_of_moments, in_8_bits);
    auto* const coefficients = static_cast<AdamWCoefficients*>(workspace(sizeof(AdamWCoefficients)));
    store_coefficients(on(), coefficients, step);
    const auto update = [&]<class X, class Master, class Moment, class Gradient>() {
        const AdamWBuffers<X, Master, Moment, Gradient> buffers{
            elements<X>(parameters), elements<Master>(master), elements<Moment>(m), elements<Moment>(v),
            elements<Gradient>(gradients)};
        cuda::adamw(on(), buffers, elements<double>(norm_squared), coefficients, segments, rounding,
                    rounding_of_moments);
    };
    const auto update_8_bits = [&]<class X, class Master, class Gradient>() {
        const EightBitBuffers<X, Master, Gradient> buffers{
            elements<X>(parameters),           elements<Master>(master),
            elements<std::uint8_t>(m),         elements<std::uint8_t>(v),
            elements<float>(in_8_bits.m_amax), elements<float>(in_8_bits.v_amax),
            elements<float>(in_8_bits.m),      elements<float>(in_8_bits.v),
            elements<Gradient>(gradients)};
        cuda::adamw_8bit(on(), buffers, m.elements(), elements<double>(norm_squared), coefficients, segments,
                         rounding);
    };
    const auto with_moments = [&]<class X, class Master, class Gradient>() {
        if (m.dtype == DType::uint8) return update_8_bits.template operator()<X, Master, Gradient>();
        if (m.dtype == DType::bf16) return update.template operator()<X, Master, bf16, Gradient>();
        update.template operator()<X, Master, float, Gradient>();
    };
    with_kernel_type(parameters.dtype, [&]<class X>() {
        if constexpr (std::is_same_v<X, bf16>) {
            with_gradient_type(gradients.dtype, [&]<class Gradient>() {
                if (master.dtype == DType::bf16) return with_moments.template operator()<X, X, Gradient>();
                with_moments.template operator()<X, float, Gradient>();
            });
        } else {
            check(gradients.dtype == DType::fp32, "adamw: gradients in bf16 are of parameters in bf16");
            with_moments.template operator()<X, float, float>();
        }
    });
}

void CudaOps::cast(const Tensor& out, const Tensor& in) {
    check_dtype(in, in.dtype, "in");
    check_elements(out, out.dtype, in.elements(), "out");
    if (in.dtype == out.dtype) return copy(out, in);
    if (in.dtype == DType::fp32) {
        return with_kernel_type(out.dtype, [&]<class To>() {
            if constexpr (!std::is_same_v<To, float>)
                cuda::cast(on(), elements<To>(out), elements<float>(in), in.elements());
        });
    }
    check(out.dtype == DType::fp32, "a cast is from or to fp32");
    with_kernel_type(in.dtype, [&]<class From>() {
        if constexpr (!std::is_same_v<From, float>)
            cuda::cast(on(), elements<float>(out), elements<From>(in), in.elements());
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
        case DType::fp16:
            return fill_as(from_float<fp16>(value));
        case DType::int32:
            return fill_as(static_cast<std::int32_t>(value));
        case DType::fp64:
        case DType::uint8:
            programming_error("on a GPU, fp64 and uint8 tensors are filled with 0 only");
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

void CudaOps::accumulate(const Tensor& out, const Tensor& in, const StochasticRounding& rounding,
                         std::int64_t count) {
    check_accumulate(out, in, rounding);
    with_gradient_type(in.dtype, [&]<class In>() {
        cuda::accumulate(on(), elements<bf16>(out), elements<In>(in), out.elements(), rounding, count);
    });
}

void CudaOps::all_finite(const Tensor& flag, const Tensor& x) {
    check_elements(flag, DType::int32, 1, "flag");
    with_kernel_type(x.dtype, [&]<class X>() {
        cuda::all_finite(on(), elements<std::int32_t>(flag), elements<X>(x), x.elements());
    });
}

}  // namespace llmc::cuda
