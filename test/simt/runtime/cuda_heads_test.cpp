// The CUDA device's operations on heads, from the contract of ops.h down to kernels: they give the CPU
// device's results, also for rows that ranks share. (test/kernels tests the kernels alone.)
#include <array>
#include <cmath>
#include <cstdio>

#include "llmc/core/random.h"
#include "llmc/device/cuda/gpus.h"
#include "simt/runtime/child.h"
#include "test/probe/run_op.h"

namespace runtime_test {
namespace {

using namespace llmc;
using probe::HostTensor;
using probe::HostTensors;

// Numbers that both compute dtypes can represent.
HostTensor normal(const std::string& name, const Shape& shape, double mean = 0.0) {
    HostTensor tensor{shape, {}};
    const RandomStream random(1, name);
    for (std::int64_t i = 0; i < shape.elements(); ++i) {
        const double x = mean + random.normal(static_cast<std::uint64_t>(i));
        tensor.values.push_back(to_float(to_bfloat16(static_cast<float>(x))));
    }
    return tensor;
}

HostTensor numbers(const std::vector<double>& values) {
    return {{static_cast<std::int64_t>(values.size())}, values};
}

// The same results, each number within `relative` times the greatest of its tensor.
bool are_near(const HostTensors& results, const HostTensors& expected, double relative) {
    if (results.size() != expected.size()) return false;
    for (const auto& [name, tensor] : expected) {
        double greatest = 0;
        for (const double x : tensor.values) greatest = std::max(greatest, std::fabs(x));
        for (std::size_t i = 0; i < tensor.values.size(); ++i) {
            if (std::fabs(results.at(name).values[i] - tensor.values[i]) <= relative * greatest) continue;
            std::fprintf(stderr, "%s[%zu] is %g, not %g\n", name.c_str(), i, results.at(name).values[i],
                         tensor.values[i]);
            return false;
        }
    }
    return true;
}

// Each device has at most 64 roundings in sums of up to 48 terms, whose magnitudes may add up to 8 times the
// greatest result; then it rounds to X.
double tolerance(DType dtype) { return 2 * (8 * 64 * 0x1p-24 + probe::rounding_to(dtype)); }

bool is_like_the_cpu(const char* op, const HostTensors& inputs) {
    const auto device = make_cuda_device({});
    const auto cpu = make_cpu_device(1);
    for (const DType X : {DType::fp32, DType::bf16, DType::fp16}) {
        if (are_near(probe::run_op(*device, op, X, inputs), probe::run_op(*cpu, op, X, inputs), tolerance(X)))
            continue;
        std::fprintf(stderr, "%s differs\n", op);
        return false;
    }
    return true;
}

TEST(CudaHeads, RopeInBothDirections) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        for (const double inverse : {0.0, 1.0}) {
            for (const double size : {16.0, 24.0}) {
                const auto half = static_cast<std::int64_t>(size) / 2;
                if (!is_like_the_cpu("rope", {{"x", normal("x", {2, 5, 136})},
                                              {"x_heads", numbers({8, 5, size})},
                                              {"angles", normal("angles", {9, half, 2})},
                                              {"position", numbers({3})},
                                              {"inverse", numbers({inverse})}}))
                    return false;
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaHeads, NormOfEachHead) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        HostTensors inputs = {{"in", normal("in", {2, 13, 96})},
                              {"in_heads", numbers({16, 3, 24})},
                              {"out", normal("out", {2, 13, 80})},
                              {"out_heads", numbers({8, 3, 24})},
                              {"eps", numbers({0.125})}};
        if (!is_like_the_cpu("head_norm_forward", inputs)) return false;
        inputs["weight"] = normal("weight", {24}, 1.0);
        if (!is_like_the_cpu("head_norm_forward", inputs)) return false;
        for (const char* name : {"out", "out_heads", "eps"}) inputs.erase(name);
        inputs["dout"] = normal("dout", {2, 13, 88});
        inputs["dout_heads"] = numbers({0, 3, 24});
        inputs["rstd"] = normal("rstd", {26, 3}, 4.0);
        inputs["dweight"] = normal("dweight", {24});
        inputs["din"] = normal("din", {2, 13, 72});
        inputs["din_heads"] = numbers({0, 3, 24});
        if (!is_like_the_cpu("head_norm_backward", inputs)) return false;
        inputs["in_place"] = numbers({1});
        inputs.erase("din");
        inputs.erase("dweight");
        return is_like_the_cpu("head_norm_backward", inputs);
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaHeads, NormOfRowsThatRanksShare) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        HostTensors inputs = {{"in", normal("in", {13, 64})}, {"in_heads", numbers({16, 1, 48})}};
        if (!is_like_the_cpu("head_norm_sums", inputs)) return false;
        HostTensors forward = inputs;
        forward["out"] = normal("out", {13, 48});
        forward["out_heads"] = numbers({0, 1, 48});
        forward["eps"] = numbers({0.125});
        forward["sums"] = normal("sums", {3, 13}, 40.0);
        forward["whole"] = numbers({144});
        if (!is_like_the_cpu("head_norm_forward", forward)) return false;
        inputs["dout"] = normal("dout", {13, 48});
        inputs["dout_heads"] = numbers({0, 1, 48});
        inputs["weight"] = normal("weight", {48}, 1.0);
        inputs["rstd"] = normal("rstd", {13}, 4.0);
        if (!is_like_the_cpu("head_norm_backward_sums", inputs)) return false;
        inputs["sums"] = normal("sums", {3, 13});
        inputs["whole"] = numbers({144});
        inputs["dweight"] = normal("dweight", {48});
        inputs["din"] = normal("din", {13, 56});
        inputs["din_heads"] = numbers({8, 1, 48});
        return is_like_the_cpu("head_norm_backward", inputs);
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

}  // namespace
}  // namespace runtime_test
