// Describes a mesh and a rank's coordinates in words; checks a mesh, and searches for the sizes that an error
// message suggests.
#include "llmc/parallel/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {

std::string Mesh::description() const {
    if (world() == 1) return "1 process";
    std::string text = fmt::format("{} processes", world());
    if (pipeline > 1 || tensor > 1) {
        std::string_view separator = ": ";
        const auto add = [&](int size, std::string_view what) {
            if (size == 1) return;
            text += fmt::format("{}{} {}", separator, size, what);
            separator = " x ";
        };
        add(pipeline, "pipeline stages");
        add(data_ranks(), "data parallel");
        add(tensor, sequence_parallel ? "tensor parallel with sequence parallelism" : "tensor parallel");
    } else {
        text += ", data parallel";
    }
    const std::string shards = sharding.description();
    return shards.empty() ? text : text + "; " + shards;
}

std::string Mesh::place() const {
    return fmt::format("stage {}, data {}, tensor {}", stage(), data_rank(), tensor_rank());
}

namespace {

// The counts that a mesh must divide: the model's layers, tokens and heads.
struct Limits {
    explicit Limits(const Model& model)
        : layers(model.layers()), sequence_length(model.sequence_length), shared(shared_by_ranks(model)) {}

    std::int64_t layers, sequence_length;
    std::vector<Piece> shared;
};

using Size = std::int64_t MeshSizes::*;

// The largest size that a suggestion may have. Larger values are typing errors.
constexpr std::int64_t largest_size = 1 << 10;

bool fits_model(const MeshSizes& sizes, const Limits& model) {
    const std::int64_t chunks = sizes.pipeline * sizes.virtual_stages;
    return chunks <= model.layers + sizes.chunks_without_layers &&
           std::ranges::all_of(model.shared, [&](const Piece& of) { return of.suits(sizes.tensor); }) &&
           (!sizes.sequence_parallel || model.sequence_length % sizes.tensor == 0);
}

bool fits(const MeshSizes& sizes, const Limits& model) {
    if (sizes.processes && *sizes.processes % (sizes.pipeline * sizes.tensor) != 0) return false;
    return fits_model(sizes, model);
}

// Whether a mesh fits and also divides the batch, so that it may be suggested.
bool suits(const MeshSizes& sizes, const Limits& model) {
    if (!fits(sizes, model)) return false;
    return !sizes.processes || !sizes.batch_sequences ||
           *sizes.batch_sequences % (*sizes.processes / (sizes.pipeline * sizes.tensor)) == 0;
}

// The largest useful number of tensor-parallel ranks: the smallest count that they must divide.
std::int64_t most_shared(const Limits& model) {
    std::int64_t most = largest_size;
    for (const Piece& of : model.shared) {
        if (!of.can_be_shared) most = std::min(most, of.count);
    }
    return most;
}

// The largest size of one mesh dimension to try.
std::int64_t largest_of(const MeshSizes& sizes, const Limits& model) {
    return std::min(sizes.processes.value_or(std::max(model.layers, most_shared(model))), largest_size);
}

// The values of one size that suit with the other sizes unchanged.
std::vector<std::int64_t> that_suit(MeshSizes sizes, Size size, const Limits& model) {
    std::vector<std::int64_t> found;
    const std::int64_t most = largest_of(sizes, model);
    for (std::int64_t candidate = 1; candidate <= most; ++candidate) {
        sizes.*size = candidate;
        if (suits(sizes, model)) found.push_back(candidate);
    }
    return found;
}

// The mesh of all processes that suits and is nearest to `sizes`. The distance is the sum of the logarithms
// of the ratios of the sizes. If no mesh divides the batch, the batch is ignored.
MeshSizes nearest_that_suits(const MeshSizes& sizes, const Limits& model) {
    const auto distance = [&](const MeshSizes& mesh, Size size) {
        return std::abs(std::log(static_cast<double>(mesh.*size) / static_cast<double>(sizes.*size)));
    };
    MeshSizes nearest = sizes, tried = sizes;
    double least = std::numeric_limits<double>::infinity();
    const std::int64_t most = largest_of(sizes, model);
    for (tried.pipeline = 1; tried.pipeline <= most; ++tried.pipeline) {
        for (tried.tensor = 1; tried.tensor <= most; ++tried.tensor) {
            const double far = distance(tried, &MeshSizes::pipeline) + distance(tried, &MeshSizes::tensor);
            if (far >= least || !suits(tried, model)) continue;
            least = far;
            nearest = tried;
        }
    }
    if (std::isinf(least) && sizes.batch_sequences) {
        tried = sizes;
        tried.batch_sequences.reset();
        return nearest_that_suits(tried, model);
    }
    return nearest;
}

// The nearest mesh as options; only those that were given or that differ from 1: " --pipeline-parallel 3
// --tensor-parallel 2".
std::string nearest_text(const MeshSizes& sizes, const Limits& model) {
    const MeshSizes nearest = nearest_that_suits(sizes, model);
    std::string text;
    if (sizes.pipeline > 1 || nearest.pipeline > 1)
        text += fmt::format(" --pipeline-parallel {}", nearest.pipeline);
    if (sizes.tensor > 1 || nearest.tensor > 1) text += fmt::format(" --tensor-parallel {}", nearest.tensor);
    return text;
}

// The sizes that suit: "try 1, 2, 4". Adds the nearest mesh if that changes the other size. If no size
// suits, gives only the nearest mesh.
std::string advice_on(const MeshSizes& sizes, Size size, const Limits& model) {
    const Size other = size == &MeshSizes::pipeline ? &MeshSizes::tensor : &MeshSizes::pipeline;
    const std::vector<std::int64_t> found = that_suit(sizes, size, model);
    if (found.empty()) return "try" + nearest_text(sizes, model);
    std::string text = fmt::format("try {}", fmt::join(found, ", "));
    if (nearest_that_suits(sizes, model).*other != sizes.*other) text += ", or" + nearest_text(sizes, model);
    return text;
}

// The nearest mesh, without the leading space.
std::string nearest_options(const MeshSizes& sizes, const Limits& model) {
    const std::string text = nearest_text(sizes, model);
    return text.substr(text.empty() ? 0 : 1);
}

[[noreturn]] void refuse_few(const MeshSizes& sizes, const Limits& model) {
    const std::int64_t there = *sizes.processes, needed = sizes.pipeline * sizes.tensor;
    const std::string what =
        sizes.tensor == 1
            ? fmt::format("--pipeline-parallel {0} needs at least {0} processes", sizes.pipeline)
        : sizes.pipeline == 1
            ? fmt::format("--tensor-parallel {0} needs at least {0} processes", sizes.tensor)
            : fmt::format("--pipeline-parallel {} x --tensor-parallel {} needs at least {} processes",
                          sizes.pipeline, sizes.tensor, needed);
    refuse({"a process for each tensor-parallel rank of each stage", there, needed,
            fmt::format("--processes {}", needed)},
           "{}; {} running; start {} (--processes {}), or try{}", what,
           there == 1 ? "1 is" : fmt::format("{} are", there), needed, needed, nearest_text(sizes, model));
}

std::string counted_processes(std::int64_t n) { return fmt::format("{} process{}", n, n == 1 ? "" : "es"); }

}  // namespace

bool fits(const MeshSizes& sizes, const Model& model) { return fits(sizes, Limits(model)); }

void check_mesh_sizes(const MeshSizes& sizes, const Model& whole_model) {
    const Limits model(whole_model);
    const std::int64_t P = sizes.pipeline, R = sizes.tensor;
    const auto advice = [&](Size size) { return advice_on(sizes, size, model); };
    if (P > 1 && P > model.layers + sizes.chunks_without_layers) {
        refuse({"a layer for each pipeline stage", P, model.layers, nearest_options(sizes, model)},
               "--pipeline-parallel {} needs a layer for each stage, but --layers is {}; {}", P, model.layers,
               sizes.processes ? advice(&MeshSizes::pipeline)
                               : fmt::format("give at most {} stages", model.layers));
    }
    for (const Piece& of : model.shared) {
        if (!of.suits(R))
            refuse({fmt::format("tensor-parallel ranks divide the {}", of.what), R, of.count,
                    nearest_options(sizes, model)},
                   "--tensor-parallel {} does not divide the {} {}{}; {}", R, of.count, of.what,
                   of.can_be_shared ? ", nor is it a multiple" : "", advice(&MeshSizes::tensor));
    }
    if (sizes.sequence_parallel && model.sequence_length % R != 0) {
        const std::int64_t below = model.sequence_length / R * R;
        refuse({"tensor-parallel ranks divide the tokens of a sequence", R, model.sequence_length,
                fmt::format("--seq-len {}", below > 0 ? below : R)},
               "--sequence-parallel: --tensor-parallel {} does not divide --seq-len {}; try {}{}", R,
               model.sequence_length, below > 0 ? fmt::format("{} or ", below) : "", below + R);
    }
    if (!sizes.processes) return;
    if (*sizes.processes < P * R) refuse_few(sizes, model);
    if (*sizes.processes % P != 0) {
        refuse({"pipeline stages divide the processes", P, *sizes.processes, nearest_options(sizes, model)},
               "--pipeline-parallel {} does not divide the {}; {}", P, counted_processes(*sizes.processes),
               advice(&MeshSizes::pipeline));
    }
    if (*sizes.processes / P % R != 0) {
        refuse({"tensor-parallel ranks divide the processes of a stage", R, *sizes.processes / P,
                nearest_options(sizes, model)},
               "--tensor-parallel {} does not divide the {}{}; {}", R,
               counted_processes(*sizes.processes / P), P > 1 ? " of each stage" : "",
               advice(&MeshSizes::tensor));
    }
}

}  // namespace llmc
