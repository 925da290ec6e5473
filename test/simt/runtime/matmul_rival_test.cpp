// The products that the lab compares its own with: they are the same products, at the shape that the lab
// intends.
#include "dev/lab/matmul_rival.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dev/lab/comparison.h"
#include "dev/lab/rivals.h"
#include "simt/runtime/device_memory.h"

namespace runtime_test {
namespace {

using lab::MatmulRival;
using lab::MatmulShape;
using llmc::DType;
using llmc::Tensor;
using llmc::cuda::bf16;

std::vector<double> download(const Tensor& tensor) {
    std::vector<std::byte> bytes(tensor.bytes());
    must(cudaMemcpy(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost));
    std::vector<double> values;
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
        if (tensor.dtype == DType::fp32) {
            values.push_back(reinterpret_cast<const float*>(bytes.data())[i]);
        } else {
            values.push_back(__bfloat162float(reinterpret_cast<const bf16*>(bytes.data())[i]));
        }
    }
    return values;
}

// got[i][j] = start(i, j) + sum_k a(i, k) b(k, j). The bound is 3 u for each term, as in
// dev/matmul_forward.cu.
template <class A, class B, class Start>
bool is_product(const Tensor& got, std::int64_t rows, std::int64_t columns, std::int64_t depth, const A& a,
                const B& b, const Start& start) {
    if (got.shape != llmc::Shape{rows, columns}) return false;
    const std::vector<double> values = download(got);
    lab::Comparison comparison;
    for (std::int64_t i = 0; i < rows * columns; ++i) {
        double sum = start(i / columns, i % columns), magnitude = std::fabs(sum);
        for (std::int64_t k = 0; k < depth; ++k) {
            const double term = a(i / columns, k) * b(k, i % columns);
            sum += term;
            magnitude += std::fabs(term);
        }
        const double error = 3 * static_cast<double>(depth + 2) * lab::unit_roundoff<float> * magnitude;
        comparison.see("product", i, values[static_cast<std::size_t>(i)], sum,
                       got.dtype == DType::fp32 ? error : lab::rounded<bf16>(sum, error));
    }
    if (!comparison.good()) std::fprintf(stderr, "%s\n", comparison.first_failure().c_str());
    return comparison.good();
}

bool computes_what_the_lab_does(DType dtype) {
    constexpr std::int64_t rows = 5, in_channels = 16, out_channels = 24;
    MatmulRival rival(dtype, MatmulShape({rows, in_channels, out_channels}));
    const auto matrix = [](const Tensor& tensor) {
        return [values = download(tensor), columns = tensor.shape.last()](std::int64_t i, std::int64_t j) {
            return values[static_cast<std::size_t>(i * columns + j)];
        };
    };
    const auto transposed = [](const auto& of) {
        return [&of](std::int64_t i, std::int64_t j) { return of(j, i); };
    };
    const auto in = matrix(rival.in()), weight = matrix(rival.weight()), dout = matrix(rival.out()),
               bias = matrix(rival.bias());

    rival.backward();
    must(cudaStreamSynchronize(rival.stream()));
    const auto zero = [](std::int64_t, std::int64_t) { return 0.0; };
    bool good = is_product(rival.din(), rows, in_channels, out_channels, dout, weight, zero);
    // The first run accumulates once for each algorithm that it tries.
    const auto first = matrix(rival.dweight());
    rival.backward();
    must(cudaStreamSynchronize(rival.stream()));
    good = is_product(rival.dweight(), out_channels, in_channels, rows, transposed(dout), in, first) && good;

    rival.forward();
    must(cudaStreamSynchronize(rival.stream()));
    return is_product(rival.out(), rows, out_channels, in_channels, in, transposed(weight),
                      [&](std::int64_t, std::int64_t j) { return bias(0, j); }) &&
           good;
}

TEST(Rivals, ComputeWhatTheLabDoes) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        EXPECT_TRUE(is_right_in_any_order([=] { return computes_what_the_lab_does(dtype); }));
    }
}

TEST(Rivals, OfBothProductsInBothDtypes) {
    const auto outcome = run_process({}, [] {
        bool good = true;
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            for (const char* operation : {"matmul_forward", "matmul_backward"}) {
                const auto rivals = lab::rivals_of(operation, dtype, {8, 16, 24});
                good = good && rivals.size() == 1 && rivals[0].name == "cuBLASLt";
                if (!good) break;
                rivals[0].run();
                must(cudaStreamSynchronize(rivals[0].stream));
            }
            good = good && lab::rivals_of("gelu_forward", dtype, {8}).empty();
        }
        return good;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

}  // namespace
}  // namespace runtime_test
