// Computes initial weights from counter-based random numbers.
#include "llmc/model/init.h"

#include <algorithm>
#include <iterator>

#include "llmc/core/random.h"

namespace llmc {

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
                const double noise = init.stddev > 0 ? init.stddev * random.normal(index) : 0.0;
                values[static_cast<std::size_t>(place + i)] = static_cast<float>(init.mean + noise);
            }
        }
    }
}

}  // namespace llmc
