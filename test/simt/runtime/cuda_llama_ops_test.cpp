// The CUDA device's operations for Llama-like models, from the contract of ops.h down to kernels, against the
// CPU device. (test/kernels tests the kernels alone.)
#include <array>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <vector>

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

HostTensor number(double x) { return {{1}, {x}}; }

HostTensors without(HostTensors inputs, std::initializer_list<const char*> names) {
    for (const char* name : names) inputs.erase(name);
    return inputs;
}

bool complain(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    return false;
}

// Sums of up to 40 terms and exponentials in fp32, and one rounding to X on each device.
double tolerance(DType dtype) { return 200 * 0x1p-24 + 2 * probe::rounding_to(dtype); }

// The operation gives the same results on both devices: each number is within the tolerance, times the
// greatest number in the tensor.
bool are_alike(const char* op, const HostTensors& inputs) {
    const auto device = make_cuda_device({});
    const auto cpu = make_cpu_device(1);
    for (const DType X : {DType::fp32, DType::bf16, DType::fp16}) {
        const HostTensors results = probe::run_op(*device, op, X, inputs);
        const HostTensors expected = probe::run_op(*cpu, op, X, inputs);
        if (results.size() != expected.size()) return complain(std::string(op) + " gave other results");
        for (const auto& [name, tensor] : expected) {
            double greatest = 0;
            for (const double x : tensor.values) {
                if (std::isfinite(x)) greatest = std::max(greatest, std::fabs(x));
            }
            const std::vector<double>& got = results.at(name).values;
            for (std::size_t i = 0; i < got.size(); ++i) {
                if (got[i] != tensor.values[i] &&
                    !(std::fabs(got[i] - tensor.values[i]) <= tolerance(X) * greatest))
                    return complain(
                        fmt::format("{}: {}[{}] is {}, not {}", op, name, i, got[i], tensor.values[i]));
            }
        }
    }
    return true;
}

TEST(CudaLlamaOps, RmsNormWithAndWithoutWeight) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const HostTensors common = {{"weight", normal("weight", {40}, 1.0)}, {"eps", number(0x1p-17)}};
        HostTensors alone = common, fused = common, backward = without(common, {"eps"});
        alone["in"] = fused["in1"] = backward["in"] = normal("in", {33, 40});
        fused["in2"] = normal("in2", {33, 40});
        backward["dout"] = normal("dout", {33, 40});
        backward["din"] = normal("din", {33, 40});
        backward["dweight"] = normal("dweight", {40});
        backward["rstd"] = normal("rstd", {33}, 4.0);
        for (const bool weighted : {true, false}) {
            const auto given = [&](const HostTensors& inputs) {
                return weighted ? inputs : without(inputs, {"weight"});
            };
            if (!are_alike("rmsnorm_forward", given(alone))) return false;
            if (!are_alike("fused_residual_rmsnorm_forward", given(fused))) return false;
            for (const auto& omitted : {std::initializer_list<const char*>{}, {"din"}, {"dweight"}}) {
                if (!are_alike("rmsnorm_backward", without(given(backward), omitted))) return false;
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaLlamaOps, Activations) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const HostTensor pairs = normal("pairs", {3, 13, 80}), wide = normal("wide", {3, 13, 40});
        if (!are_alike("swiglu_forward", {{"in", pairs}})) return false;
        HostTensors backward = {{"in", pairs}, {"dout", wide}};
        if (!are_alike("swiglu_backward", backward)) return false;
        backward["in_place"] = number(1);
        if (!are_alike("swiglu_backward", backward)) return false;
        // Any number of elements.
        const HostTensor odd = normal("odd", {3, 13, 37});
        if (!are_alike("relu_squared_forward", {{"in", odd}})) return false;
        backward = {{"in", odd}, {"dout", normal("dout", {3, 13, 37})}};
        if (!are_alike("relu_squared_backward", backward)) return false;
        backward["in_place"] = number(1);
        return are_alike("relu_squared_backward", backward);
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaLlamaOps, ClassifierWithCapAndZLoss) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        HostTensor targets{{7}, {0, 37, 5, ignored_target, 29, 30, 12}};
        for (const auto& [cap, z] : {std::pair{2.0, 0.0}, {0.0, 0.125}, {2.0, 0.125}}) {
            const HostTensors common = {{"targets", targets}, {"cap", number(cap)}, {"z_loss", number(z)}};
            HostTensors whole = common;
            whole["logits"] = normal("logits", {7, 40});
            whole["vocabulary"] = number(38);
            whole["scale"] = number(0.25);
            whole["write_dlogits"] = number(1);
            if (!are_alike("fused_classifier", whole)) return false;
            HostTensors part = common;
            part["logits"] = normal("part", {7, 32});
            part["columns"] = number(30);
            part["first_column"] = number(0);
            if (!are_alike("classifier_statistics", part)) return false;
            const auto cpu = make_cpu_device(1);
            const auto statistics = probe::run_op(*cpu, "classifier_statistics", DType::fp32, part);
            part["all_statistics"] = {{1, 7, 3}, statistics.at("statistics").values};
            part["scale"] = number(0.25);
            part["write_dlogits"] = number(1);
            if (!are_alike("classifier_from_statistics", part)) return false;
        }
        return are_alike("soft_cap", {{"in", normal("in", {3, 37})}, {"cap", number(2.0)}});
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

}  // namespace
}  // namespace runtime_test
