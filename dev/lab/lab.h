// The kernel lab. A file dev/X.cu shows how the kernel of one operation becomes fast: numbered variants from
// naive to best. They are checked against a plain CPU reference and, on a GPU, timed. The file registers an
// Operation; all else is here and the same for all operations: `./dev/X 5`.
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
    std::string story;             // a few words: what is new in this variant
    std::vector<int> block_sizes;  // threads per block to try; a single size if the variant's tiling fixes it
};

using Shape = std::vector<std::int64_t>;

// An operation at one shape, with its inputs and outputs.
class Problem {
  public:
    virtual ~Problem() = default;
    // Launches the variant's kernels and nothing else: this is what is timed.
    virtual void run(int variant, int block_size, const LaunchContext& on) = 0;
    // Called before a checked run: clears outputs, and restores inputs that a run overwrites.
    virtual void reset() = 0;
    // Compares the outputs with the reference, which the first call computes.
    virtual void compare(Comparison& comparison) = 0;
    // The least bytes to read and write, and the operations to compute. Times are compared with these.
    virtual double bytes() const = 0;
    virtual double flops() const { return 0; }  // 0: memory alone is the limit
};

struct Operation {
    std::string name;
    std::vector<std::string> sizes;  // the names of a shape's numbers
    std::vector<Variant> variants;
    std::vector<Shape> checked;  // small, since the executor runs them, and odd; the smallest first
    std::vector<Shape> timed;
    std::vector<llmc::DType> dtypes;
    // Whether a variant supports the dtype and shape; if empty, all do.
    std::function<bool(int variant, llmc::DType, const Shape&)> takes;
    std::function<std::unique_ptr<Problem>(llmc::DType, const Shape&, Draw&)> make;
    // The shapes checked under ThreadSanitizer, which is slow. They are small, but run every kernel in two or
    // more blocks, with two iterations of each loop that has barriers. If empty, the first of `checked` is
    // used.
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

// Whether the variant supports one of the checked shapes in this dtype.
bool has_variant(const Operation& operation, const Variant& variant, llmc::DType dtype);

// Checks one variant at all its block sizes, on the checked shapes.
Comparison check_variant(const Operation& operation, const Variant& variant, llmc::DType dtype,
                         const LaunchContext& on, std::uint64_t seed);

}  // namespace lab
