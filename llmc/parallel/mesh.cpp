// Describes a mesh, and a rank's coordinates in it, in words.
#include "llmc/parallel/mesh.h"

#include <fmt/format.h>

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

}  // namespace llmc
