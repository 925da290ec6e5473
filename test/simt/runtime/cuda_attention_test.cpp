// Attention of the CUDA device, from the contract of ops.h down to the kernels: heads in one tensor or in
// several, shared key heads, and windows.
#include <algorithm>
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

constexpr std::int64_t B = 2, T = 37, H = 4, K = 2, D = 24;
constexpr double beside = 77;

// Numbers that all compute dtypes can represent.
HostTensor normal(const std::string& name, const Shape& shape) {
    HostTensor tensor{shape, {}};
    const RandomStream random(1, name);
    for (std::int64_t i = 0; i < shape.elements(); ++i) {
        const double x = random.normal(static_cast<std::uint64_t>(i));
        tensor.values.push_back(to_float(to_bfloat16(static_cast<float>(x))));
    }
    return tensor;
}

// `count` columns of a tensor of rows, between `before` and `after` other elements.
HostTensor columns(const HostTensor& from, std::int64_t first, std::int64_t count, std::int64_t before,
                   std::int64_t after) {
    Shape shape = from.shape;
    shape.resize(shape.dimensions() - 1, before + count + after);
    HostTensor to{shape, std::vector<double>(static_cast<std::size_t>(shape.elements()), beside)};
    const std::int64_t rows = shape.elements() / shape.last();
    for (std::int64_t n = 0; n < rows; ++n) {
        const auto source = from.values.begin() + n * from.shape.last() + first;
        std::copy_n(source, count, to.values.begin() + n * shape.last() + before);
    }
    return to;
}

// Moves q, k and v, or their gradients, from the rows of one tensor to tensors of their own.
HostTensors apart(HostTensors inputs) {
    for (const std::string prefix : {"", "d"}) {
        const auto packed = inputs.find(prefix + "q");
        if (packed == inputs.end()) continue;
        const HostTensor rows = packed->second;
        inputs[prefix + "q"] = columns(rows, 0, H * D, 16, 0);
        inputs[prefix + "k"] = columns(rows, H * D, K * D, 0, 8);
        inputs[prefix + "v"] = columns(rows, (H + K) * D, K * D, 8, 24);
    }
    inputs["firsts"] = {{3}, {16, 0, 8}};
    return inputs;
}

HostTensors with_heads(HostTensors inputs, double window) {
    inputs["heads"] = {{3}, {H, K, D}};
    inputs["firsts"] = {{3}, {0, H * D, (H + K) * D}};
    inputs["window"] = {{1}, {window}};
    return inputs;
}

bool complain(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    return false;
}

bool same(const HostTensors& results, const HostTensors& expected) {
    for (const auto& [name, tensor] : expected) {
        if (!results.contains(name) || results.at(name).values != tensor.values)
            return complain(name + " differs");
    }
    return true;
}

// Each number is within `relative` times the greatest number in the tensor.
bool near(const HostTensors& results, const HostTensors& expected, double relative) {
    for (const auto& [name, tensor] : expected) {
        double greatest = 0;
        for (const double x : tensor.values) greatest = std::max(greatest, std::fabs(x));
        for (std::size_t i = 0; i < tensor.values.size(); ++i) {
            const double error = std::fabs(results.at(name).values[i] - tensor.values[i]);
            if (!(error <= relative * greatest))
                return complain(fmt::format("{}[{}] is off by {}", name, i, error));
        }
    }
    return true;
}

// A result is a sum of up to T H/K products with weights, of which each has an error of up to (2 D + 10) u:
// about 160 roundings. The terms' magnitudes add up to less than 10 times the greatest sum. In 16 bits each weight
// may be rounded on one device, and results are rounded on both.
double tolerance(DType dtype) { return 10 * 160 * 0x1p-24 + (10 + 2) * probe::rounding_to(dtype); }

// Both ways to lay out the heads give the same bits, near those of the CPU device.
bool check_operation(const char* op, DType X, const HostTensors& inputs) {
    const auto device = make_cuda_device({});
    const auto cpu = make_cpu_device(1);
    const HostTensors packed = probe::run_op(*device, op, X, inputs);
    if (!near(packed, probe::run_op(*cpu, op, X, inputs), tolerance(X))) return complain(op);
    HostTensors expected = packed;
    const bool has_gradients = expected.contains("dq");
    if (has_gradients) {
        expected = apart(expected);
        expected.erase("firsts");
    }
    return same(probe::run_op(*device, op, X, apart(inputs)), expected) || complain(op);
}

bool check_all(DType X, double window) {
    const std::int64_t row = (H + 2 * K) * D, position = 20, n = 3;
    HostTensors forward = with_heads({{"q", normal("q", {B, T, row})}}, window);
    if (!check_operation("attention_forward", X, forward)) return false;
    HostTensors backward = forward;
    for (auto& [name, tensor] : probe::run_op(*make_cpu_device(1), "attention_forward", X, forward))
        backward[name] = tensor;
    backward["dout"] = normal("dout", {B, T, H, D});
    backward["dq"] = normal("before", {B, T, row});
    if (!check_operation("attention_backward", X, backward)) return false;
    const HostTensors rows =
        with_heads({{"q", normal("new", {n, row})}, {"cache", normal("cache", {T, 2, K, D})}}, window);
    HostTensors cached = rows;
    cached["position"] = {{1}, {position}};
    return check_operation("attention_cached_forward", X, cached);
}

TEST(CudaAttention, SharedKeysWindowsAndPlaces) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        for (const DType X : {DType::fp32, DType::bf16, DType::fp16}) {
            for (const double window : {0.0, 15.0, 100.0}) {
                if (!check_all(X, window)) return complain(fmt::format("window {}", window));
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

// The kernels read 16 bytes at a time.
TEST(CudaAttention, HeadsAtOtherAddressesAreRefused) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        HostTensors inputs = with_heads({{"q", normal("q", {B, T, (H + 2 * K) * D + 2})}}, 0);
        inputs["firsts"] = {{3}, {2, H * D, (H + K) * D}};
        try {
            probe::run_op(*device, "attention_forward", DType::fp32, inputs);
        } catch (const ProgrammingError& refused) {
            return std::string(refused.what()).find("multiples of 16 bytes") != std::string::npos;
        }
        return complain("was not refused");
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

}  // namespace
}  // namespace runtime_test
