// Lays out the tensors of a unit, finds a rank's elements of a divided tensor, and computes initial weights.
#include "llmc/model/units.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "llmc/core/random.h"
#include "llmc/device/nf4.h"
#include "llmc/device/ops.h"

namespace llmc {

ElementRange intersection(const ElementRange& a, const ElementRange& b) {
    const std::int64_t begin = std::max(a.begin, b.begin);
    return {begin, std::max(begin, std::min(a.end, b.end))};
}

namespace {

constexpr std::int64_t tensor_alignment = 128;  // elements

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
    return saturated_product(saturated_sum(n, multiple - 1) / multiple, multiple);
}

}  // namespace

UnitLayout::UnitLayout(UnitSpec spec, TensorRank ranks) : spec_(std::move(spec)), ranks_(ranks) {
    const auto add_all = [&](bool divided) {
        const ParamSpec* before = nullptr;
        for (const ParamSpec& param : spec_.params) {
            const bool is_here = ranks.size == 1 || param.divided_dim(ranks.size).has_value() == divided;
            if (is_here) add(param, param.joins_previous && before);
            before = is_here ? &param : nullptr;
        }
    };
    add_all(true);
    replicated_begin_ = elements_;
    if (ranks.size == 1) return;
    elements_ = replicated_begin_ = round_up(elements_, norm_block_elements);
    add_all(false);
}

Shape stored_shape(const ParamSpec& spec, int ranks) {
    Shape shape = spec.shape;
    if (const auto dim = spec.divided_dim(ranks)) shape.resize(*dim, shape[*dim] / ranks);
    if (spec.row_multiple > 1) shape.resize(0, round_up(spec.shape[0], spec.row_multiple * ranks) / ranks);
    return shape;
}

void UnitLayout::add(const ParamSpec& param, bool joins) {
    const std::int64_t offset = joins ? elements_ : round_up(elements_, tensor_alignment);
    const Shape stored = stored_shape(param, ranks_.size);
    Shape shape = stored;
    // The last ranks may have fewer rows, or none.
    if (param.row_multiple > 1)
        shape.resize(0, std::clamp<std::int64_t>(param.shape[0] - ranks_.rank * stored[0], 0, stored[0]));
    elements_ = saturated_sum(offset, stored.elements());
    entries_.push_back({param, offset, shape, stored});
}

std::int64_t UnitLayout::padded_elements(int ranks) const {
    return round_up(elements_, norm_block_elements * ranks);
}

const UnitLayout::Entry& UnitLayout::entry(std::string_view param) const {
    for (const Entry& entry : entries_) {
        if (entry.spec.name == param) return entry;
    }
    programming_error(name() + " has no tensor " + std::string(param));
}

Tensor UnitLayout::view(const Tensor& flat, std::string_view param) const {
    const Entry& found = entry(param);
    return flat.flat(found.offset, found.stored.elements()).view(found.stored);
}

StoredParameters stored_parameters(const UnitSpec& unit, std::int64_t elements, DType compute) {
    return unit.is_nf4() ? StoredParameters{DType::uint8, nf4_bytes(elements)}
                         : StoredParameters{compute, elements};
}
std::uint64_t StoredParameters::bytes() const {
    return static_cast<std::uint64_t>(saturated_product(elements, static_cast<std::int64_t>(size_of(dtype))));
}

std::vector<TensorRun> runs_of(const UnitLayout::Entry& entry, TensorRank ranks) {
    const std::optional<int> divided = entry.spec.divided_dim(ranks.size);
    if (!divided) return {{0, 0, entry.shape.elements()}};
    const int dim = *divided;
    std::int64_t outer = 1, inner = 1;
    for (int i = 0; i < dim; ++i) outer *= entry.shape[i];
    for (int i = dim + 1; i < entry.shape.dimensions(); ++i) inner *= entry.shape[i];
    const std::int64_t size = entry.shape[dim] * inner, whole = entry.spec.shape[dim] * inner;
    const std::int64_t first = ranks.rank * entry.stored[dim] * inner;
    std::vector<TensorRun> runs;
    for (std::int64_t i = 0; i < outer; ++i) runs.push_back({i * size, i * whole + first, size});
    return runs;
}

void initialize_unit(std::span<float> values, std::int64_t begin, const UnitLayout& unit,
                     std::uint64_t seed) {
    const std::int64_t end = begin + std::ssize(values);
    std::fill(values.begin(), values.end(), 0.0F);
    for (const UnitLayout::Entry& entry : unit.entries()) {
        const RandomStream random(seed, unit.full_name(entry.spec));
        const Init init = entry.spec.init;
        for (const TensorRun& run : runs_of(entry, unit.ranks())) {
            // The elements of the run that lie in `values`.
            const std::int64_t place = entry.offset + run.own - begin;
            const std::int64_t first = std::max<std::int64_t>(0, -place);
            const std::int64_t last = std::min(run.size, end - begin - place);
#pragma omp parallel for
            for (std::int64_t i = first; i < last; ++i) {
                const auto index = static_cast<std::uint64_t>(run.whole + i);
                const double noise = init.stddev > 0  ? init.stddev * random.normal(index)
                                     : init.bound > 0 ? init.bound * (2 * random.uniform(index) - 1)
                                                      : 0.0;
                values[static_cast<std::size_t>(place + i)] = static_cast<float>(init.mean + noise);
            }
        }
    }
}

}  // namespace llmc
