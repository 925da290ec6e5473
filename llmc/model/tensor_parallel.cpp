#include "llmc/model/tensor_parallel.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "llmc/core/error.h"

namespace llmc {

void check_tensor_split(const TensorSplit& split, const GPTConfig& config) {
    if (config.heads % split.ranks != 0) {
        std::vector<std::int64_t> divisors;
        for (std::int64_t d = 1; d <= config.heads; ++d) {
            if (config.heads % d == 0) divisors.push_back(d);
        }
        user_error("--tensor-parallel {} does not divide the {} heads (--heads); {} would", split.ranks,
                   config.heads, fmt::join(divisors, ", "));
    }
    if (split.sequence_parallel && config.sequence_length % split.ranks != 0) {
        const std::int64_t below = config.sequence_length / split.ranks * split.ranks;
        user_error("--sequence-parallel: --tensor-parallel {} does not divide --seq-len {}; try {}{}",
                   split.ranks, config.sequence_length, below > 0 ? fmt::format("{} or ", below) : "",
                   below + split.ranks);
    }
}

Tensor TensorParallel::enter(const Tensor& own, const std::optional<Tensor>& gathered) const {
    if (!divides_tokens()) return own;
    Shape shape = own.shape;
    shape.resize(1, shape[1] * size());
    const Tensor all = gathered->flat(0, shape.elements()).view(shape);
    group_->all_gather(all, own);
    return all;
}

Tensor TensorParallel::leave(const Tensor& addend) const {
    if (!is_shared()) return addend;
    if (!divides_tokens()) {
        group_->all_reduce(addend);
        return addend;
    }
    Shape shape = addend.shape;
    shape.resize(1, shape[1] / size());
    const Tensor own = addend.flat(rank() * shape.elements(), shape.elements()).view(shape);
    group_->reduce_scatter(own, addend);
    return own;
}

}  // namespace llmc
