// The CPU device's operations give PyTorch's results. The expected values come only from the files in
// test/reference, which test/make_references.py makes. They hold operands, results in fp64, and a bound on
// each element's error. test/python/bounded.py derives the bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "test/probe/case_file.h"
#include "test/probe/run_op.h"

namespace llmc::probe {
namespace {

// As in test/python/cases.py: the bounds assume that all rounding errors of a sum add up. In the norm of a
// whole tensor they mostly cancel.
constexpr double norm_tolerance_fp32 = 1e-5;

std::filesystem::path reference_file(const std::string& op) {
    return std::filesystem::path(__FILE__).parent_path() / "../reference" / ("ops_" + op + ".safetensors");
}

// The name of a case is DTYPE.number.
DType dtype_of_case(const std::string& name) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64, DType::int32})
        if (name.starts_with(std::string(name_of(dtype)) + ".")) return dtype;
    user_error("the case {} begins with no dtype", name);
}

// The tensors of a case whose names begin with kind/, with this prefix removed.
HostTensors of_kind(const HostTensors& tensors, const std::string& kind) {
    HostTensors chosen;
    for (const auto& [name, tensor] : tensors)
        if (name.starts_with(kind + "/")) chosen[name.substr(kind.size() + 1)] = tensor;
    return chosen;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

double norm(const std::vector<double>& values) {
    double squares = 0;
    for (const double x : values) squares += std::isfinite(x) ? x * x : 0;
    return std::sqrt(squares);
}

// A `bound` without elements means that the result must be exact.
void expect_near(const HostTensor& result, const HostTensor& expected, const std::vector<double>& bound,
                 DType dtype) {
    ASSERT_EQ(result.shape, expected.shape);
    std::vector<double> errors(expected.values.size());
    for (std::size_t i = 0; i < errors.size(); ++i) {
        const double x = result.values[i], y = expected.values[i];
        errors[i] = same(x, y) ? 0.0 : std::fabs(x - y);
        EXPECT_TRUE(errors[i] <= (bound.empty() ? 0.0 : bound[i]))
            << "element " << i << " is " << x << ", not " << y << " within "
            << (bound.empty() ? 0.0 : bound[i]);
    }
    if (dtype != DType::fp32) return;
    EXPECT_LE(norm(errors), norm_tolerance_fp32 * norm(expected.values));
}

bool same_bits(const HostTensors& a, const HostTensors& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
        return x.first == y.first && std::ranges::equal(x.second.values, y.second.values, same);
    });
}

class ReferenceOps : public testing::TestWithParam<std::string> {};

TEST_P(ReferenceOps, EqualPyTorch) {
    const auto cases = read_cases(reference_file(GetParam()));
    ASSERT_FALSE(cases.empty());
    for (const int threads : {1, 3}) {
        const auto device = make_cpu_device(threads);
        for (const auto& [name, tensors] : cases) {
            SCOPED_TRACE(fmt::format("case {}, {} threads", name, threads));
            const DType dtype = dtype_of_case(name);
            const HostTensors inputs = of_kind(tensors, "input");
            const HostTensors bounds = of_kind(tensors, "bound");
            const HostTensors expected = of_kind(tensors, "expected");
            const HostTensors results = run_op(*device, GetParam(), dtype, inputs);
            ASSERT_EQ(results.size(), expected.size());
            ASSERT_FALSE(expected.empty());
            for (const auto& [operand, exact] : expected) {
                SCOPED_TRACE(operand);
                const auto bound = bounds.find(operand);
                ASSERT_TRUE(results.contains(operand));
                expect_near(results.at(operand), exact,
                            bound == bounds.end() ? std::vector<double>{} : bound->second.values, dtype);
            }
            EXPECT_TRUE(same_bits(results, run_op(*device, GetParam(), dtype, inputs)))
                << "the same call gave other bits";
        }
    }
}

std::vector<std::string> op_names() {
    std::vector<std::string> names;
    for (const auto& [name, call] : all_calls()) names.push_back(name);
    return names;
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceOps, testing::ValuesIn(op_names()),
                         [](const auto& instance) { return instance.param; });

// No test would use a file that no operation reads.
TEST(ReferenceFiles, BelongToOperations) {
    for (const auto& entry : std::filesystem::directory_iterator(
             std::filesystem::path(__FILE__).parent_path() / "../reference")) {
        const std::string name = entry.path().stem();
        EXPECT_TRUE(!name.starts_with("ops_") || all_calls().contains(name.substr(4))) << entry.path();
    }
}

}  // namespace
}  // namespace llmc::probe
