// op_check DEVICE CASES.safetensors [RESULTS.safetensors]
//
// Runs operations on a device, "cpu" or "cuda", and compares their results with those in a file, which
// test/python/op_files.py writes. Case k of an operation in a dtype has the tensors OP.DTYPE.k/KIND/OPERAND:
//   input/x     a field of the operation (operands.h)
//   expected/x  a result
//   bound/x     the greatest error of each of its elements; without it the result must be exact
//   refused/1   chips below this architecture lack it (90: sm_90; the CPU counts as 0): the call must throw
//   misaligned/1 the operands may begin at any element
// A case is run twice, with misaligned operands if it may, without each optional result, and on the CPU with one and
// with three threads; the results have the same bits (those of products may depend on the threads). Each difference is
// a line. The last line is a checksum of all results; RESULTS receives them.
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <exception>
#include <memory>
#include <variant>

#include "llmc/device/cuda/gpus.h"
#include "test/probe/case_file.h"
#include "test/probe/operands.h"

namespace {

using namespace llmc;
using namespace llmc::probe;

// The bounds assume that all rounding errors of a sum add up. In the norm of a whole tensor they mostly cancel.
constexpr double norm_tolerance_fp32 = 1e-5;

// The operation of this name, without operands.
template <std::size_t I = 0>
Op operation_named(std::string_view name) {
    if constexpr (I == std::variant_size_v<Op>) {
        user_error("there is no operation {}", name);
    } else {
        using O = std::variant_alternative_t<I, Op>;
        return O::name == name ? Op(O{}) : operation_named<I + 1>(name);
    }
}

// The results that a call may leave out, and does not.
std::vector<std::string> optional_results(const Op& op) {
    std::vector<std::string> names;
    const auto add = [&](const auto& field) {
        if (field.is_optional && !field.is_of_variant && field.access != Access::read &&
            tensor_of(field.operand))
            names.emplace_back(field.name);
    };
    std::visit([&](const auto& of) { for_each_operand(of, add); }, op);
    return names;
}

// The device lacks a call.
class Refused : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct Name {
    std::string op;
    DType dtype;
};

DType dtype_named(std::string_view name) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64, DType::int32, DType::uint8})
        if (name == name_of(dtype)) return dtype;
    user_error("there is no dtype {}", name);
}

Name parse(const std::string& name) {
    const std::size_t first = name.find('.'), second = name.find('.', first + 1);
    if (second == std::string::npos) user_error("the case {} is not named OP.DTYPE.NUMBER", name);
    return {name.substr(0, first), dtype_named(name.substr(first + 1, second - first - 1))};
}

// The tensors of a case with the names KIND/OPERAND or KIND/OPERAND:DTYPE, by their operands.
HostTensors of_kind(const HostTensors& tensors, const std::string& kind) {
    HostTensors chosen;
    for (const auto& [name, tensor] : tensors) {
        if (!name.starts_with(kind + "/")) continue;
        const std::size_t begin = kind.size() + 1, colon = name.find(':');
        HostTensor& made = chosen[name.substr(begin, colon == std::string::npos ? colon : colon - begin)] =
            tensor;
        if (colon != std::string::npos) made.dtype = dtype_named(name.substr(colon + 1));
    }
    return chosen;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

bool same_bits(const HostTensors& a, const HostTensors& b) {
    const auto same_number = [](double x, double y) {
        return same(x, y) && (std::isnan(x) || std::signbit(x) == std::signbit(y));
    };
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const auto& x, const auto& y) {
        return x.first == y.first && std::ranges::equal(x.second.values, y.second.values, same_number);
    });
}

double norm(const std::vector<double>& values) {
    double squares = 0;
    for (const double x : values) squares += std::isfinite(x) ? x * x : 0;
    return std::sqrt(squares);
}

class Check {
  public:
    explicit Check(std::string_view device) : is_cpu_(device == "cpu") {
        if (!is_cpu_ && device != "cuda") user_error("{} is neither cpu nor cuda", device);
        for (const int threads : {1, 3}) {
            if (is_cpu_) devices_.push_back(make_cpu_device(threads));
        }
        if (!is_cpu_) {
            const Gpus gpus = find_gpus();
            if (gpus.all.empty()) user_error("there is no GPU here, because {}", gpus.why_none);
            architecture_ = gpus.all.front().architecture;
            devices_.push_back(make_cuda_device({}));
        }
        for (const auto& made : devices_) workspaces_.emplace_back(*made);
    }

    void run_named(const std::string& name, const HostTensors& tensors) {
        name_ = name;
        try {
            run(name, tensors);
        } catch (const ProgrammingError& fault) {
            differs("", fault.what());
        }
    }

    const std::map<std::string, HostTensors>& results() const { return results_; }
    int differences() const { return differences_; }

  private:
    struct Case {
        const std::string& op;
        DType dtype;
        const HostTensors &inputs, &expected;
    };

    void run(const std::string& name, const HostTensors& tensors) {
        const auto [op, dtype] = parse(name);
        const HostTensors refused = of_kind(tensors, "refused");
        const auto least = refused.find("1");
        if (!refused.empty() && (least == refused.end() || least->second.values.size() != 1))
            user_error("refused/1 of {} is not one number", name);
        const bool is_refused = !refused.empty() && architecture_ < least->second.values[0];
        const HostTensors inputs = of_kind(tensors, "input"), expected = of_kind(tensors, "expected");
        const Case given{op, dtype, inputs, expected};
        HostTensors results;
        std::vector<std::string> optional;
        try {
            results = run(0, given, {}, &optional);
        } catch (const Refused& why) {
            if (!is_refused) differs("", fmt::format("is refused: {}", why.what()));
            return;
        }
        if (is_refused) return differs("", "is computed, though the table says that this device lacks it");
        compare(tensors, expected, results, dtype);
        if (!same_bits(results, run(0, given))) differs("", "has other bits the second time");
        // oneDNN chooses by the number of threads.
        if (is_cpu_ && op.find("matmul") == std::string::npos && !same_bits(results, run(1, given)))
            differs("", "has other bits with 3 threads");
        if (!of_kind(tensors, "misaligned").empty() && !same_bits(results, run(0, given, {}, nullptr, true)))
            differs("", "has other bits with misaligned operands");
        // ops_products.h: a tensor in 8 bits has one copy at least.
        if (op == "quantise_to_bytes" && optional.size() == 1) optional.clear();
        for (const std::string& result : optional) run_without(given, result, results);
        results_[name] = std::move(results);
    }

    // Compares the bits of the other results of a call that leaves one out.
    void run_without(const Case& given, const std::string& result, const HostTensors& whole) {
        std::vector<std::string> without = {result};
        if (result == "dgamma") without.emplace_back("dbeta");  // ops.h: none without dgamma
        if (std::ranges::all_of(whole, [&](const auto& other) {
                return std::ranges::find(without, other.first) != without.end();
            }))
            return;
        for (const auto& [name, tensor] : run(0, given, without)) {
            if (!whole.contains(name) || !same_bits({{name, whole.at(name)}}, {{name, tensor}}))
                differs(name, fmt::format("has other bits without {}", result));
        }
    }

    // Everything that the call wrote; `optional` receives the results that it may leave out.
    HostTensors run(std::size_t device, const Case& given, const std::vector<std::string>& without = {},
                    std::vector<std::string>* optional = nullptr, bool misaligned = false) {
        Op op = operation_named(given.op);
        Operands operands(*devices_[device], given.dtype, given.inputs, given.expected, workspaces_[device],
                          misaligned);
        std::visit([&](auto& of) { operands.fill(of, without); }, op);
        if (optional) *optional = optional_results(op);
        std::visit([](const auto& of) { of.sizes(); }, op);  // a wrong operand is no refusal of the device
        try {
            devices_[device]->ops().run(op);
        } catch (const ProgrammingError& why) {
            throw Refused(why.what());
        }
        return operands.results();
    }
    void compare(const HostTensors& tensors, const HostTensors& expected, const HostTensors& results,
                 DType dtype) {
        const HostTensors bounds = of_kind(tensors, "bound");
        if (expected.empty()) differs("", "has no expected results");
        for (const auto& [operand, result] : results) {
            if (!expected.contains(operand)) differs(operand, "is a result, and is not expected");
        }
        for (const auto& [operand, exact] : expected) {
            const auto found = results.find(operand);
            if (found == results.end()) {
                differs(operand, "is expected, and is no result");
            } else if (found->second.shape != exact.shape) {
                differs(operand, fmt::format("has the shape {}, not {}", to_string(found->second.shape),
                                             to_string(exact.shape)));
            } else {
                const auto bound = bounds.find(operand);
                if (bound != bounds.end() && bound->second.shape != exact.shape)
                    user_error("the bounds of {}/{} have another shape", name_, operand);
                compare(
                    operand, found->second.values, exact.values,
                    bound == bounds.end() ? std::vector<double>(exact.values.size()) : bound->second.values,
                    dtype == DType::fp32 && found->second.dtype == DType::fp32);
            }
        }
    }

    void compare(const std::string& operand, const std::vector<double>& result,
                 const std::vector<double>& exact, const std::vector<double>& bound, bool is_fp32) {
        std::vector<double> errors(exact.size());
        std::size_t far = 0, first = 0;
        for (std::size_t i = errors.size(); i-- > 0;) {
            errors[i] = same(result[i], exact[i]) ? 0.0 : std::fabs(result[i] - exact[i]);
            if (errors[i] <= bound[i]) continue;  // false if the error is NaN
            ++far;
            first = i;
        }
        if (far > 0)
            differs(operand, fmt::format("element {} is {}, not {} within {:.3g}; {} of {} are off", first,
                                         result[first], exact[first], bound[first], far, exact.size()));
        for (double& error : errors) error = std::isfinite(error) ? error : 0;
        if (is_fp32 && norm(errors) > norm_tolerance_fp32 * norm(exact))
            differs(operand, fmt::format("the error's norm is {:.3g}, that of the exact result {:.3g}",
                                         norm(errors), norm(exact)));
    }

    void differs(const std::string& operand, const std::string& how) {
        fmt::print("{}{}{} {}\n", name_, operand.empty() ? "" : "/", operand, how);
        ++differences_;
    }

    bool is_cpu_;
    int architecture_ = 0;
    std::vector<std::unique_ptr<Device>> devices_;
    std::deque<Workspace> workspaces_;  // by device
    std::map<std::string, HostTensors> results_;
    std::string name_;  // of the case that runs
    int differences_ = 0;
};

std::uint64_t checksum(const std::map<std::string, HostTensors>& results) {
    std::uint64_t sum = 0;
    for (const auto& [name, tensors] : results) {
        for (const auto& [operand, tensor] : tensors)
            sum = XXH3_64bits_withSeed(tensor.values.data(), tensor.values.size() * sizeof(double), sum);
    }
    return sum;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) {
        fmt::print(stderr, "usage: op_check DEVICE CASES.safetensors [RESULTS.safetensors]\n");
        return 2;
    }
    try {
        Check check(argv[1]);
        const auto cases = read_cases(argv[2]);
        if (cases.empty()) user_error("{} has no cases", argv[2]);
        for (const auto& [name, tensors] : cases) check.run_named(name, tensors);
        if (argc == 4) write_cases(argv[3], check.results());
        fmt::print("checksum {:016x}\n", checksum(check.results()));
        return check.differences() > 0 ? 1 : 0;
    } catch (const std::exception& error) {
        fmt::print(stderr, "error: {}\n", error.what());
        return 2;
    }
}
