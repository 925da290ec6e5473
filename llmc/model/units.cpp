#include "llmc/model/units.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "llmc/device/ops.h"

namespace llmc {

namespace {

constexpr std::int64_t tensor_alignment = 128;  // elements

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace

std::vector<UnitSpec> gpt_units(const GPTConfig& config) {
    const std::int64_t C = config.channels, NH = config.heads, HS = config.head_size(), V = config.vocabulary;
    const Init zeros{}, ones{.mean = 1}, normal{.stddev = 0.02};
    // GPT-2 scales what is added to the residual stream by the number of additions, two a block.
    const Init projection{.stddev = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers))};

    const auto matrix = [](const char* name, const Shape& shape, const Init& init, int tensor_dim) {
        return ParamSpec{.name = name,
                         .shape = shape,
                         .init = init,
                         .tensor_dim = tensor_dim,
                         .transposed_in_files = true};
    };
    const auto vector = [](const char* name, const Shape& shape, const Init& init,
                           std::optional<int> tensor_dim = {}) {
        return ParamSpec{
            .name = name, .shape = shape, .init = init, .tensor_dim = tensor_dim, .is_bias = true};
    };

    std::vector<UnitSpec> units;
    units.push_back({"wte",
                     {{.name = "weight",
                       .shape = {V, C},
                       .init = normal,
                       .tensor_dim = 0,
                       .row_multiple = vocabulary_multiple}}});
    units.push_back({"wpe", {{.name = "weight", .shape = {config.sequence_length, C}, .init = normal}}});
    // Tensor-parallel ranks share q, k, v and the first product of the MLP by their outputs, whole heads of each, and
    // the products that follow by their inputs.
    for (std::int64_t block = 0; block < config.layers; ++block) {
        units.push_back(
            {"h." + std::to_string(block),
             {vector("ln_1.weight", {C}, ones), vector("ln_1.bias", {C}, zeros),
              matrix("attn.c_attn.weight", {3, NH, HS, C}, normal, 1),
              vector("attn.c_attn.bias", {3, NH, HS}, zeros, 1),
              matrix("attn.c_proj.weight", {C, C}, projection, 1), vector("attn.c_proj.bias", {C}, zeros),
              vector("ln_2.weight", {C}, ones), vector("ln_2.bias", {C}, zeros),
              matrix("mlp.c_fc.weight", {4 * C, C}, normal, 0), vector("mlp.c_fc.bias", {4 * C}, zeros, 0),
              matrix("mlp.c_proj.weight", {C, 4 * C}, projection, 1),
              vector("mlp.c_proj.bias", {C}, zeros)}});
    }
    units.push_back({"ln_f", {vector("weight", {C}, ones), vector("bias", {C}, zeros)}});
    return units;
}

UnitLayout::UnitLayout(UnitSpec spec, TensorRank ranks) : spec_(std::move(spec)), ranks_(ranks) {
    for (const ParamSpec& param : spec_.params) {
        if (param.tensor_dim || ranks.size == 1) add(param);
    }
    replicated_begin_ = elements_;
    if (ranks.size == 1) return;
    elements_ = replicated_begin_ = round_up(elements_, norm_block_elements);
    for (const ParamSpec& param : spec_.params) {
        if (!param.tensor_dim) add(param);
    }
}

void UnitLayout::add(const ParamSpec& param) {
    const std::int64_t offset = round_up(elements_, tensor_alignment);
    Shape shape = param.shape;
    if (param.tensor_dim) shape.resize(*param.tensor_dim, shape[*param.tensor_dim] / ranks_.size);
    Shape stored = shape;
    if (param.row_multiple > 1) {
        // The last ranks may have fewer rows, or none.
        const std::int64_t rows = round_up(param.shape[0], param.row_multiple * ranks_.size) / ranks_.size;
        stored.resize(0, rows);
        shape.resize(0, std::clamp<std::int64_t>(param.shape[0] - ranks_.rank * rows, 0, rows));
    }
    elements_ = offset + stored.elements();
    entries_.push_back({param, offset, shape, stored});
}

std::int64_t UnitLayout::padded_elements(int ranks) const {
    return round_up(elements_, norm_block_elements * ranks);
}

Tensor UnitLayout::view(const Tensor& flat, std::string_view param) const {
    for (const Entry& entry : entries_) {
        if (entry.spec.name == param)
            return flat.flat(entry.offset, entry.stored.elements()).view(entry.stored);
    }
    programming_error(name() + " has no tensor " + std::string(param));
}

std::vector<TensorRun> runs_of(const UnitLayout::Entry& entry, TensorRank ranks) {
    if (!entry.spec.tensor_dim) return {{0, 0, entry.shape.elements()}};
    const int dim = *entry.spec.tensor_dim;
    std::int64_t outer = 1, inner = 1;
    for (int i = 0; i < dim; ++i) outer *= entry.shape[i];
    for (int i = dim + 1; i < entry.shape.dimensions(); ++i) inner *= entry.shape[i];
    const std::int64_t size = entry.shape[dim] * inner, whole = entry.spec.shape[dim] * inner;
    const std::int64_t first = ranks.rank * entry.stored[dim] * inner;
    std::vector<TensorRun> runs;
    for (std::int64_t i = 0; i < outer; ++i) runs.push_back({i * size, i * whole + first, size});
    return runs;
}

}  // namespace llmc
