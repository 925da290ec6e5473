// The kernel lab. A file dev/X.cu shows how the kernel of one operation becomes fast: numbered variants from
// naive to best. They are checked against a plain CPU reference and, on a GPU, timed. The file registers an
// Operation; all else is here and the same for all operations: `./dev/X 5`.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
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
    std::vector<llmc::DType> dtypes = {llmc::DType::bf16, llmc::DType::fp32, llmc::DType::fp16};
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

template <class X>
inline constexpr llmc::DType dtype_of = std::is_same_v<X, float>  ? llmc::DType::fp32
                                        : std::is_same_v<X, bf16> ? llmc::DType::bf16
                                                                  : llmc::DType::fp16;

// Makes a Problem<X> with the X, of those given, that is the dtype; by default of bf16, fp32 and fp16.
template <template <class> class ProblemOf, class... X>
std::unique_ptr<Problem> make_problem(llmc::DType dtype, const Shape& shape, Draw& draw) {
    if constexpr (sizeof...(X) == 0) {
        return make_problem<ProblemOf, bf16, float, fp16>(dtype, shape, draw);
    } else {
        std::unique_ptr<Problem> made;
        const auto make = [&]<class Of>(std::type_identity<Of>) {
            if (dtype == dtype_of<Of>) made = std::make_unique<ProblemOf<Of>>(shape, draw);
        };
        (make(std::type_identity<X>()), ...);
        llmc::check(made != nullptr, "an operation of the lab is made in one of its dtypes");
        return made;
    }
}

// Whether the variant supports one of the checked shapes in this dtype.
bool has_variant(const Operation& operation, const Variant& variant, llmc::DType dtype);

// Checks one variant at all its block sizes, on the checked shapes.
Comparison check_variant(const Operation& operation, const Variant& variant, llmc::DType dtype,
                         const LaunchContext& on, std::uint64_t seed);

}  // namespace lab
