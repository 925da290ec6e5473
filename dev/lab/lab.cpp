// Implements lab.h: the registry and the check.
#include "dev/lab/lab.h"

#include <algorithm>

#include "dev/lab/gpu.h"

namespace lab {

std::vector<Operation>& operations() {
    static std::vector<Operation> all;
    return all;
}

namespace {

bool takes(const Operation& operation, const Variant& variant, llmc::DType dtype, const Shape& shape) {
    return !operation.takes || operation.takes(variant.number, dtype, shape);
}

std::vector<Shape> checked_shapes(const Operation& operation) {
#ifdef SIMT_THREAD
    const auto& few = operation.checked_for_races;
    return few.empty() ? std::vector<Shape>{operation.checked.front()} : few;
#else
    return operation.checked;
#endif
}

}  // namespace

bool has_variant(const Operation& operation, const Variant& variant, llmc::DType dtype) {
    return std::any_of(operation.checked.begin(), operation.checked.end(),
                       [&](const Shape& shape) { return takes(operation, variant, dtype, shape); });
}

Comparison check_variant(const Operation& operation, const Variant& variant, llmc::DType dtype,
                         const LaunchContext& on, std::uint64_t seed) {
    Comparison comparison;
    Draw draw(seed);
    for (const Shape& shape : checked_shapes(operation)) {
        if (!takes(operation, variant, dtype, shape)) continue;
        const auto problem = operation.make(dtype, shape, draw);
        for (const int block_size : variant.block_sizes) {
            problem->reset();
            problem->run(variant.number, block_size, on);
            synchronize();
            problem->compare(comparison);
        }
    }
    return comparison;
}

}  // namespace lab
