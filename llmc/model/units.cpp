#include "llmc/model/units.h"

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

Shape ParamSpec::stored_shape() const {
    Shape stored = shape;
    stored.resize_first(shape[0] + padding_rows);
    return stored;
}

std::vector<UnitSpec> gpt_units(const GPTConfig& config) {
    const std::int64_t C = config.channels, NH = config.heads, HS = config.head_size(), V = config.vocabulary;
    const Init zeros{}, ones{.mean = 1}, normal{.stddev = 0.02};
    // GPT-2 scales what is added to the residual stream by the number of additions, two a block.
    const Init projection{.stddev = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers))};

    std::vector<UnitSpec> units;
    units.push_back({"wte", {{"weight", {V, C}, normal, config.padded_vocabulary() - V}}});
    units.push_back({"wpe", {{"weight", {config.sequence_length, C}, normal}}});
    for (std::int64_t block = 0; block < config.layers; ++block) {
        units.push_back({"h." + std::to_string(block),
                         {{"ln_1.weight", {C}, ones},
                          {"ln_1.bias", {C}, zeros},
                          {"attn.c_attn.weight", {3, NH, HS, C}, normal, 0, true},
                          {"attn.c_attn.bias", {3 * C}, zeros},
                          {"attn.c_proj.weight", {C, C}, projection, 0, true},
                          {"attn.c_proj.bias", {C}, zeros},
                          {"ln_2.weight", {C}, ones},
                          {"ln_2.bias", {C}, zeros},
                          {"mlp.c_fc.weight", {4 * C, C}, normal, 0, true},
                          {"mlp.c_fc.bias", {4 * C}, zeros},
                          {"mlp.c_proj.weight", {C, 4 * C}, projection, 0, true},
                          {"mlp.c_proj.bias", {C}, zeros}}});
    }
    units.push_back({"ln_f", {{"weight", {C}, ones}, {"bias", {C}, zeros}}});
    return units;
}

UnitLayout::UnitLayout(UnitSpec spec) : name_(std::move(spec.name)) {
    for (ParamSpec& param : spec.params) {
        const std::int64_t offset = round_up(elements_, tensor_alignment);
        elements_ = offset + param.stored_shape().elements();
        entries_.push_back({std::move(param), offset});
    }
}

std::int64_t UnitLayout::padded_elements(int ranks) const {
    return round_up(elements_, norm_block_elements * ranks);
}

Tensor UnitLayout::view(const Tensor& flat, std::string_view param) const {
    for (const Entry& entry : entries_) {
        if (entry.spec.name == param) {
            const Shape stored = entry.spec.stored_shape();
            return flat.flat(entry.offset, stored.elements()).view(stored);
        }
    }
    programming_error(name_ + " has no tensor " + std::string(param));
}

}  // namespace llmc
