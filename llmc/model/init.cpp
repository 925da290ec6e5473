#include "llmc/model/init.h"

#include <algorithm>

#include "llmc/core/random.h"

namespace llmc {

void initialize_unit(std::span<float> values, const UnitLayout& unit, std::uint64_t seed) {
    std::fill(values.begin(), values.end(), 0.0F);
    for (const UnitLayout::Entry& entry : unit.entries()) {
        const RandomStream random(seed, unit.full_name(entry.spec));
        const Init init = entry.spec.init;
        const std::int64_t elements = entry.spec.shape.elements();
        float* tensor = values.data() + entry.offset;
#pragma omp parallel for
        for (std::int64_t i = 0; i < elements; ++i) {
            const double noise =
                init.stddev > 0 ? init.stddev * random.normal(static_cast<std::uint64_t>(i)) : 0.0;
            tensor[i] = static_cast<float>(init.mean + noise);
        }
    }
}

}  // namespace llmc
