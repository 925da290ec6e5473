// The kernel lab. A file dev/X.cu tells how the kernel of one operation gets fast: numbered variants from naive
// to best, checked against a plain CPU reference and, on a GPU, timed. It registers an Operation; the rest is
// here, and the same for all: `./dev/X 5`.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"
#include "llmc/core/dtype.h"

namespace lab {

using llmc::cuda::LaunchContext;

struct Variant {
    int number;
    std::string story;             // a few words: what is new in it
    std::vector<int> block_sizes;  // threads a block that it is tried with; one where its tiling fixes them
};

using Shape = std::vector<std::int64_t>;

// An operation at one shape, with its inputs and outputs.
class Problem {
  public:
    virtual ~Problem() = default;
    // Launches what the variant launches, nothing else: this is what is timed.
    virtual void run(int variant, int block_size, const LaunchContext& on) = 0;
    // Before a checked run: outputs cleared, and inputs restored that a run overwrites.
    virtual void reset() = 0;
    // Outputs against the reference, which is computed by the first call.
    virtual void compare(Comparison& comparison) = 0;
    // What has to be read and written at least, and computed: time is compared with these.
    virtual double bytes() const = 0;
    virtual double flops() const { return 0; }  // 0: bound by memory alone
};

struct Operation {
    std::string name;
    std::vector<std::string> sizes;  // what the numbers of a shape are
    std::vector<Variant> variants;
    std::vector<Shape> checked;  // small, since the executor runs them, and odd; the smallest first
    std::vector<Shape> timed;
    std::vector<llmc::DType> dtypes;
    // Whether a variant takes the dtype and shape; all do without.
    std::function<bool(int variant, llmc::DType, const Shape&)> takes;
    std::function<std::unique_ptr<Problem>(llmc::DType, const Shape&, Draw&)> make;
    // Under ThreadSanitizer, which is slow: small ones that run every kernel in two blocks or more, with two turns of a loop
    // that has barriers. Without, the first of `checked`.
    std::vector<Shape> checked_for_races = {};
};

// All operations of the program: one in ./dev/X, all in the tests.
std::vector<Operation>& operations();

struct Registration {
    explicit Registration(Operation operation) { operations().push_back(std::move(operation)); }
};

// Makes a Problem<float> or Problem<bf16>.
template <template <class> class ProblemOf>
std::unique_ptr<Problem> make_problem(llmc::DType dtype, const Shape& shape, Draw& draw) {
    if (dtype == llmc::DType::fp32) return std::make_unique<ProblemOf<float>>(shape, draw);
    return std::make_unique<ProblemOf<bf16>>(shape, draw);
}

// Whether the variant takes one of the checked shapes in this dtype.
bool has_variant(const Operation& operation, const Variant& variant, llmc::DType dtype);

// One variant at all its block sizes, on the checked shapes.
Comparison check_variant(const Operation& operation, const Variant& variant, llmc::DType dtype,
                         const LaunchContext& on, std::uint64_t seed);

}  // namespace lab
