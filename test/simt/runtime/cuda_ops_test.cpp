// The CUDA device's operations in parts, as pipeline and tensor parallelism call them, from the contract of
// ops.h down to kernels and cuBLASLt. Gradients computed one at a time have the same bits as together. Ranks'
// parts of a table or of the logits give the CPU device's results. (test/kernels tests the kernels alone.)
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

// Numbers that all compute dtypes can represent.
HostTensor normal(const std::string& name, const Shape& shape, double mean = 0.0) {
    HostTensor tensor{shape, {}};
    const RandomStream random(1, name);
    for (std::int64_t i = 0; i < shape.elements(); ++i) {
        const double x = mean + random.normal(static_cast<std::uint64_t>(i));
        tensor.values.push_back(to_float(to_bfloat16(static_cast<float>(x))));
    }
    return tensor;
}

HostTensor integers(const std::string& name, const Shape& shape, std::uint64_t below) {
    HostTensor tensor{shape, {}};
    const RandomStream random(1, name);
    for (std::int64_t i = 0; i < shape.elements(); ++i) {
        tensor.values.push_back(static_cast<double>(random.below(static_cast<std::uint64_t>(i), below)));
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

// Every result equals, bit by bit, the one of the same name among the others.
bool are_among(const HostTensors& results, const HostTensors& others) {
    for (const auto& [name, tensor] : results) {
        if (others.at(name).values != tensor.values) return complain(name + " differs");
    }
    return true;
}

// Each number is within `relative` times the greatest number in the tensor.
bool are_near(const HostTensors& results, const HostTensors& expected, double relative) {
    if (results.size() != expected.size()) return complain("other results");
    for (const auto& [name, tensor] : expected) {
        double greatest = 0;
        for (const double x : tensor.values) {
            if (std::isfinite(x)) greatest = std::max(greatest, std::fabs(x));
        }
        const std::vector<double>& got = results.at(name).values;
        for (std::size_t i = 0; i < got.size(); ++i) {
            const bool same = got[i] == tensor.values[i];
            if (!same && !(std::fabs(got[i] - tensor.values[i]) <= relative * greatest))
                return complain(fmt::format("{}[{}] is {}, not {}", name, i, got[i], tensor.values[i]));
        }
    }
    return true;
}

// Sums of up to 40 terms and exponentials in fp32, and one rounding to X on each device.
double tolerance(DType dtype) { return 200 * 0x1p-24 + 2 * probe::rounding_to(dtype); }

constexpr std::array compute_dtypes = {DType::fp32, DType::bf16, DType::fp16};

TEST(CudaOps, MatmulForwardWithAndWithoutBias) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        const auto cpu = make_cpu_device(1);
        for (const DType X : compute_dtypes) {
            for (const bool bias : {false, true}) {
                HostTensors inputs = {{"in", normal("in", {13, 24})}, {"weight", normal("weight", {40, 24})}};
                if (bias) inputs["bias"] = normal("bias", {40});
                const auto product = probe::run_op(*device, "matmul_forward", X, inputs);
                inputs["with_gelu"] = number(1);
                const auto results = probe::run_op(*device, "matmul_forward", X, inputs);
                const auto gelu = probe::run_op(*device, "gelu_forward", X, {{"in", results.at("pre_gelu")}});
                if (!are_among(product, {{"out", results.at("pre_gelu")}})) return false;
                if (results.size() != 2 || !are_among(gelu, results)) return complain("GELU");
                if (!are_near(results, probe::run_op(*cpu, "matmul_forward", X, inputs), 2 * tolerance(X)))
                    return false;
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaOps, MatmulBackwardHasTheSameBitsInParts) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        for (const DType X : compute_dtypes) {
            for (const bool gelu : {false, true}) {
                HostTensors inputs = {{"dout", normal("dout", {13, 40})},
                                      {"in", normal("in", {13, 24})},
                                      {"weight", normal("weight", {40, 24})},
                                      {"dweight", normal("dw", {40, 24})},
                                      {"dbias", normal("db", {40})}};
                if (gelu) inputs["pre_gelu"] = normal("pre_gelu", {13, 24});
                const auto run = [&](const HostTensors& some) {
                    return probe::run_op(*device, "matmul_backward", X, some);
                };
                const HostTensors whole = run(inputs);
                const HostTensors din = run(without(inputs, {"dweight", "dbias"}));
                HostTensors no_din = without(inputs, {"pre_gelu"});
                no_din["without_din"] = number(1);
                const HostTensors parameters = run(no_din);
                const HostTensors no_dbias = run(without(inputs, {"dbias"}));
                const HostTensors dweight = run(without(no_din, {"dbias"}));
                if (whole.size() != 3 || din.size() != 1 || parameters.size() != 2 || no_dbias.size() != 2 ||
                    dweight.size() != 1)
                    return complain("results");
                for (const HostTensors& part : {din, parameters, no_dbias, dweight}) {
                    if (!are_among(part, whole)) return false;
                }
                const auto cpu = make_cpu_device(1);
                if (!are_near(whole, probe::run_op(*cpu, "matmul_backward", X, inputs), 2 * tolerance(X)))
                    return false;
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaOps, LayernormBackwardHasTheSameBitsInParts) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        for (const DType X : compute_dtypes) {
            const HostTensors inputs = {
                {"dout", normal("dout", {33, 40})},    {"in", normal("in", {33, 40})},
                {"gamma", normal("gamma", {40}, 1.0)}, {"mean", normal("mean", {33})},
                {"rstd", normal("rstd", {33}, 4.0)},   {"din", normal("din", {33, 40})},
                {"dgamma", normal("dgamma", {40})},    {"dbeta", normal("dbeta", {40})}};
            const auto run = [&](const HostTensors& some) {
                return probe::run_op(*device, "layernorm_backward", X, some);
            };
            const HostTensors whole = run(inputs);
            const HostTensors din = run(without(inputs, {"dgamma", "dbeta"}));
            const HostTensors parameters = run(without(inputs, {"din"}));
            const HostTensors no_dbeta = run(without(inputs, {"dbeta"}));
            const HostTensors dgamma = run(without(inputs, {"din", "dbeta"}));
            if (whole.size() != 3 || din.size() != 1 || parameters.size() != 2 || no_dbeta.size() != 2 ||
                dgamma.size() != 1)
                return complain("results");
            for (const HostTensors& part : {din, parameters, no_dbeta, dgamma}) {
                if (!are_among(part, whole)) return false;
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaOps, LayernormForwardWithoutBetaIsThatOfZeros) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        const auto cpu = make_cpu_device(1);
        for (const DType X : compute_dtypes) {
            const HostTensors common = {{"gamma", normal("gamma", {40}, 1.0)},
                                        {"beta", {{40}, std::vector<double>(40)}}};
            HostTensors alone = common, fused = common;
            alone["in"] = fused["in1"] = normal("in1", {33, 40});
            fused["in2"] = normal("in2", {33, 40});
            for (const auto& [op, inputs] : {std::pair{"layernorm_forward", alone},
                                             std::pair{"fused_residual_layernorm_forward", fused}}) {
                const auto zeros = probe::run_op(*device, op, X, inputs);
                const auto results = probe::run_op(*device, op, X, without(inputs, {"beta"}));
                if (results.size() != zeros.size() || !are_among(results, zeros)) return complain(op);
                const auto expected = probe::run_op(*cpu, op, X, without(inputs, {"beta"}));
                if (!are_near(results, expected, tolerance(X))) return false;
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaOps, CopyEveryDtype) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64, DType::int32}) {
            const HostTensor in = integers("in", {3, 37}, 200);
            if (!are_among(probe::run_op(*device, "copy", dtype, {{"in", in}}), {{"out", in}})) return false;
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaOps, EmbeddingOfPartsOfTheTable) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        const auto cpu = make_cpu_device(1);
        const std::int64_t B = 3, T = 13, C = 24, rows = 19;
        for (const DType X : compute_dtypes) {
            for (const double first : {0.0, 19.0, 60.0}) {
                const HostTensors common = {{"tokens", integers("tokens", {B, T}, 38)},
                                            {"first_row", number(first)}};
                HostTensors forward = common, backward = common;
                forward["wte"] = normal("wte", {rows, C});
                if (first == 0.0) {
                    forward["wpe"] = normal("wpe", {T + 2, C});
                    backward["dwpe"] = normal("dwpe", {T + 2, C});
                }
                backward["dwte"] = normal("dwte", {rows, C});
                backward["dout"] = normal("dout", {B, T, C});
                const auto out = probe::run_op(*device, "encoder_forward", X, forward);
                if (!are_among(out, probe::run_op(*cpu, "encoder_forward", X, forward))) return false;
                const auto gradients = probe::run_op(*device, "encoder_backward", X, backward);
                const auto expected = probe::run_op(*cpu, "encoder_backward", X, backward);
                if (!are_near(gradients, expected, tolerance(DType::fp32))) return false;
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(CudaOps, ClassifierOfPartsOfTheLogits) {
    const Outcome outcome = run_process({{"SIMT_SEED", "1"}}, [] {
        const auto device = make_cuda_device({});
        const auto cpu = make_cpu_device(1);
        for (const DType X : compute_dtypes) {
            HostTensor targets = integers("targets", {7}, 38);
            targets.values[3] = ignored_target;
            HostTensor all{{2, 7, 3}, {}};
            const double columns[] = {30, 8}, firsts[] = {0, 30};
            HostTensors of_rank[2];
            for (std::size_t r = 0; r < 2; ++r) {
                of_rank[r] = {{"logits", normal(r == 0 ? "first" : "second", {7, 32})},
                              {"targets", targets},
                              {"columns", number(columns[r])},
                              {"first_column", number(firsts[r])}};
                const auto statistics = probe::run_op(*device, "classifier_statistics", X, of_rank[r]);
                const auto expected = probe::run_op(*cpu, "classifier_statistics", X, of_rank[r]);
                if (!are_near(statistics, expected, tolerance(DType::fp32))) return false;
                const auto& values = expected.at("statistics").values;
                all.values.insert(all.values.end(), values.begin(), values.end());
            }
            for (HostTensors& inputs : of_rank) {
                for (const double write : {0.0, 1.0}) {
                    inputs["all_statistics"] = all;
                    inputs["scale"] = number(0.25);
                    inputs["write_dlogits"] = number(write);
                    const auto results = probe::run_op(*device, "classifier_from_statistics", X, inputs);
                    const auto expected = probe::run_op(*cpu, "classifier_from_statistics", X, inputs);
                    if (!are_near(results, expected, tolerance(X))) return false;
                }
            }
        }
        return true;
    });
    EXPECT_TRUE(outcome.good()) << outcome;
}

}  // namespace
}  // namespace runtime_test
