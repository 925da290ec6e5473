// What the lab compares its matrix products with: that it is the same product, at the shape as the lab means it.
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

// got[i][j] = start(i, j) + sum_k a(i, k) b(k, j). As in dev/matmul_forward.cu, 3 u for each term.
template <class A, class B, class Start>
void expect_product(const Tensor& got, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                    const A& a, const B& b, const Start& start) {
    ASSERT_EQ(got.shape, (llmc::Shape{rows, columns}));
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
    EXPECT_TRUE(comparison.good()) << comparison.first_failure();
}

class MatmulRivals : public testing::TestWithParam<DType> {};

TEST_P(MatmulRivals, ComputeWhatTheLabDoes) {
    constexpr std::int64_t rows = 5, in_channels = 16, out_channels = 24;
    MatmulRival rival(GetParam(), MatmulShape({rows, in_channels, out_channels}));
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
    expect_product(rival.din(), rows, in_channels, out_channels, dout, weight, zero);
    // The first run adds as often as it tries algorithms.
    const auto first = matrix(rival.dweight());
    rival.backward();
    must(cudaStreamSynchronize(rival.stream()));
    expect_product(rival.dweight(), out_channels, in_channels, rows, transposed(dout), in, first);

    rival.forward();
    must(cudaStreamSynchronize(rival.stream()));
    expect_product(rival.out(), rows, out_channels, in_channels, in, transposed(weight),
                   [&](std::int64_t, std::int64_t j) { return bias(0, j); });
}

INSTANTIATE_TEST_SUITE_P(, MatmulRivals, testing::Values(DType::fp32, DType::bf16),
                         [](const auto& dtype) { return std::string(llmc::name_of(dtype.param)); });

TEST(Rivals, OfBothProductsInBothDtypes) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        for (const char* operation : {"matmul_forward", "matmul_backward"}) {
            const auto rivals = lab::rivals_of(operation, dtype, {8, 16, 24});
            ASSERT_EQ(rivals.size(), 1u) << operation;
            EXPECT_EQ(rivals[0].name, "cuBLASLt");
            rivals[0].run();
            must(cudaStreamSynchronize(rivals[0].stream));
        }
        EXPECT_TRUE(lab::rivals_of("gelu_forward", dtype, {8}).empty());
    }
}

}  // namespace
}  // namespace runtime_test
