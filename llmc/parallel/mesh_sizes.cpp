#include "llmc/parallel/mesh_sizes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {

namespace {

using Size = std::int64_t MeshSizes::*;

// Larger ones are slips of the keyboard.
constexpr std::int64_t largest_size = 1 << 10;

bool fits_model(const MeshSizes& sizes, const GPTConfig& config) {
    const std::int64_t chunks = sizes.pipeline * (sizes.pipeline > 1 ? sizes.virtual_stages : 1);
    return chunks <= config.layers && config.heads % sizes.tensor == 0 &&
           (!sizes.sequence_parallel || config.sequence_length % sizes.tensor == 0);
}

// Those of one size with which the rest of the mesh fits.
std::vector<std::int64_t> that_fit(MeshSizes sizes, Size size, const GPTConfig& config) {
    const std::int64_t most =
        std::min(sizes.processes.value_or(std::max(config.layers, config.heads)), largest_size);
    std::vector<std::int64_t> found;
    for (std::int64_t candidate = 1; candidate <= most; ++candidate) {
        sizes.*size = candidate;
        if (fits(sizes, config)) found.push_back(candidate);
    }
    return found;
}

// "1, 2, 4 would"; where none does with the other size as it is, with that at 1.
std::string what_would(MeshSizes sizes, Size size, const GPTConfig& config) {
    const bool is_pipeline = size == &MeshSizes::pipeline;
    const Size other = is_pipeline ? &MeshSizes::tensor : &MeshSizes::pipeline;
    if (const auto found = that_fit(sizes, size, config); !found.empty())
        return fmt::format("{} would", fmt::join(found, ", "));
    sizes.*other = 1;
    return fmt::format("{} would, with --{} 1", fmt::join(that_fit(sizes, size, config), ", "),
                       is_pipeline ? "tensor-parallel" : "pipeline-parallel");
}

// The largest mesh of those processes whose sizes are no larger than those, as options.
std::string what_they_would_do(const MeshSizes& sizes, const GPTConfig& config) {
    MeshSizes best = sizes, tried = sizes;
    best.pipeline = best.tensor = 1;
    for (tried.pipeline = 1; tried.pipeline <= sizes.pipeline; ++tried.pipeline) {
        for (tried.tensor = 1; tried.tensor <= sizes.tensor; ++tried.tensor) {
            if (tried.pipeline * tried.tensor > best.pipeline * best.tensor && fits(tried, config))
                best = tried;
        }
    }
    std::string text;
    if (sizes.pipeline > 1) text += fmt::format(" --pipeline-parallel {}", best.pipeline);
    if (sizes.tensor > 1) text += fmt::format(" --tensor-parallel {}", best.tensor);
    return text;
}

[[noreturn]] void refuse_few(const MeshSizes& sizes, const GPTConfig& config) {
    const std::int64_t there = *sizes.processes, needed = sizes.pipeline * sizes.tensor;
    const std::string what =
        sizes.tensor == 1
            ? fmt::format("--pipeline-parallel {} takes a process for each stage", sizes.pipeline)
        : sizes.pipeline == 1 ? fmt::format("--tensor-parallel {} takes as many processes", sizes.tensor)
                              : fmt::format("--pipeline-parallel {} x --tensor-parallel {} take {} processes",
                                            sizes.pipeline, sizes.tensor, needed);
    user_error("{}, and there {}; start {}, as with mpirun -np {}, or try{}", what,
               there == 1 ? "is 1" : fmt::format("are {}", there), needed, needed,
               what_they_would_do(sizes, config));
}

std::string counted_processes(std::int64_t n) { return fmt::format("{} process{}", n, n == 1 ? "" : "es"); }

}  // namespace

bool fits(const MeshSizes& sizes, const GPTConfig& config) {
    if (sizes.processes && *sizes.processes % (sizes.pipeline * sizes.tensor) != 0) return false;
    return fits_model(sizes, config);
}

void check_mesh_sizes(const MeshSizes& sizes, const GPTConfig& config) {
    const std::int64_t P = sizes.pipeline, R = sizes.tensor;
    const auto would = [&](Size size) { return what_would(sizes, size, config); };
    if (P > config.layers) {
        user_error("--pipeline-parallel {} needs a layer for each stage, and --layers is {}; {}", P,
                   config.layers,
                   sizes.processes ? would(&MeshSizes::pipeline)
                                   : fmt::format("give {} stages at most", config.layers));
    }
    if (config.heads % R != 0) {
        user_error("--tensor-parallel {} does not divide the {} heads (--heads); {}", R, config.heads,
                   would(&MeshSizes::tensor));
    }
    if (sizes.sequence_parallel && config.sequence_length % R != 0) {
        const std::int64_t below = config.sequence_length / R * R;
        user_error("--sequence-parallel: --tensor-parallel {} does not divide --seq-len {}; try {}{}", R,
                   config.sequence_length, below > 0 ? fmt::format("{} or ", below) : "", below + R);
    }
    if (!sizes.processes) return;
    if (*sizes.processes < P * R) refuse_few(sizes, config);
    if (*sizes.processes % P != 0) {
        user_error("--pipeline-parallel {} does not divide the {}; {}", P,
                   counted_processes(*sizes.processes), would(&MeshSizes::pipeline));
    }
    if (*sizes.processes / P % R != 0) {
        user_error("--tensor-parallel {} does not divide the {}{}; {}", R,
                   counted_processes(*sizes.processes / P), P > 1 ? " of each stage" : "",
                   would(&MeshSizes::tensor));
    }
}

}  // namespace llmc
