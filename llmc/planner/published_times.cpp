#include "llmc/planner/published_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "llmc/core/text.h"

namespace llmc {

namespace {

enum class Generation { ampere, hopper, blackwell, unpublished };

Generation generation_of(const GpuModel& gpu) {
    switch (gpu.chip.architecture) {
        case 80:
            return Generation::ampere;
        case 90:
            return Generation::hopper;
        case 100:
        case 103:
            return Generation::blackwell;
        default:
            return Generation::unpublished;
    }
}

struct Software {
    Generation generation;
    bool is_fp8;
    double products, attention, other, tensor_exchange, update;
};
// Exchanges of tensor-parallel ranks take less than their links allow where software hides them behind products. The
// cards that nobody has published a step of reach 0.8 to 0.9 of their peak in products; the rest is Ampere's.
constexpr std::array software = {
    Software{Generation::ampere, false, 1.349, 1.592, 2.059, 1.820, 1.197},
    Software{Generation::hopper, false, 1.375, 2.067, 2.373, 0.365, 1.444},
    Software{Generation::hopper, true, 0.900, 2.176, 2.005, 0.319, 1.492},
    Software{Generation::blackwell, false, 1.874, 1.235, 1.696, 1.288, 1.453},
    Software{Generation::blackwell, true, 0.957, 1.208, 1.475, 0.991, 1.469},
};

// The published steps of a generation in one format (8 bits or not) and on one kind of mesh (data-parallel
// alone or not): a tenth was faster than `low`, and a tenth slower than `high`.
struct Steps {
    Generation generation;
    std::optional<bool> is_fp8, is_data_parallel;
    int count;
    double low, high;
};
constexpr std::array published = {
    Steps{Generation::ampere, false, true, 79, 0.90, 1.13},
    Steps{Generation::ampere, false, false, 21, 0.86, 1.24},
    Steps{Generation::ampere, false, {}, 100, 0.90, 1.15},
    Steps{Generation::ampere, {}, {}, 100, 0.90, 1.15},
    Steps{Generation::hopper, false, true, 40, 0.89, 1.16},
    Steps{Generation::hopper, false, false, 16, 0.87, 1.25},
    Steps{Generation::hopper, false, {}, 56, 0.88, 1.18},
    Steps{Generation::hopper, true, true, 7, 0.76, 1.12},
    Steps{Generation::hopper, true, {}, 10, 0.75, 1.11},
    Steps{Generation::hopper, {}, {}, 66, 0.85, 1.16},
    Steps{Generation::blackwell, false, false, 8, 0.94, 1.09},
    Steps{Generation::blackwell, false, {}, 8, 0.94, 1.09},
    Steps{Generation::blackwell, {}, {}, 10, 0.91, 1.09},
};

std::string_view name_of(Generation generation) {
    return name_among(generation, "Ampere", "Hopper", "Blackwell", "");
}

}  // namespace

TimeParts published_times(const GpuModel& gpu, bool is_fp8) {
    const auto* const found = std::ranges::find_if(software, [&](const Software& of) {
        return of.generation == generation_of(gpu) && of.is_fp8 == is_fp8;
    });
    // A100s have no products in 8 bits.
    const Software& of = found == software.end() ? software.front() : *found;
    TimeParts times{{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}};
    if (generation_of(gpu) != Generation::unpublished) times[TimePart::products] = of.products;
    times[TimePart::attention] = of.attention;
    times[TimePart::other] = of.other;
    times[TimePart::tensor_exchange] = of.tensor_exchange;
    times[TimePart::update] = of.update;
    return times;
}

std::optional<PublishedRange> published_range(const GpuModel& gpu, DType dtype, bool is_fp8,
                                              const Mesh& mesh) {
    const Generation generation = generation_of(gpu);
    const bool is_data_parallel = mesh.tensor == 1 && mesh.pipeline == 1, is_16_bits = dtype != DType::fp32;
    // From the narrowest class to the widest.
    for (const Steps& of : published) {
        const bool fits = of.generation == generation &&
                          (!of.is_fp8 || (of.is_fp8 == is_fp8 && is_16_bits)) &&
                          (!of.is_data_parallel || of.is_data_parallel == is_data_parallel);
        if (!fits) continue;
        std::string name = fmt::format("{} published steps on {}", of.count, name_of(generation));
        if (of.is_fp8) name += *of.is_fp8 ? " in fp8" : " in 16 bits";
        if (of.is_data_parallel) name += *of.is_data_parallel ? ", data-parallel alone" : ", on other meshes";
        return PublishedRange{of.low, of.high, of.count, std::move(name)};
    }
    return std::nullopt;
}

}  // namespace llmc
