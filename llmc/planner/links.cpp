#include "llmc/planner/links.h"

#include <fmt/format.h>

#include "llmc/core/text.h"

namespace llmc {

namespace {

// The link of groups of `size` ranks, each `distance` after the one before, that begin at multiples of
// size * distance.
LinkLevel link_of(int size, int distance, int ranks_of_node) {
    if (size == 1) return LinkLevel::none;
    const int extent = size * distance;
    return extent <= ranks_of_node && ranks_of_node % extent == 0 ? LinkLevel::node : LinkLevel::network;
}

}  // namespace

std::string_view name_of(LinkLevel link) { return name_among(link, "none", "node", "network"); }

// The tensor-parallel rank varies fastest, then the data-parallel rank, then the stage (mesh.h).
Links::Links(const Mesh& mesh, int ranks_of_node)
    : tensor(link_of(mesh.tensor, 1, ranks_of_node)),
      inside(link_of(mesh.sharding.shards, mesh.tensor, ranks_of_node)),
      across(link_of(mesh.sharding.replicas, mesh.tensor * mesh.sharding.shards, ranks_of_node)),
      stages(link_of(mesh.pipeline, mesh.tensor * mesh.data_ranks(), ranks_of_node)) {}

std::string links_text(const Mesh& mesh, int ranks_of_node) {
    const Links links(mesh, ranks_of_node);
    std::string text;
    const auto add = [&](LinkLevel link, std::string_view what) {
        if (link == LinkLevel::none) return;
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", what,
                            link == LinkLevel::node ? "inside a machine" : "over the network");
    };
    add(links.tensor, "tensor-parallel groups");
    add(links.inside, "sharding groups");
    add(links.across, "between sharding groups");
    add(links.stages, "pipeline stages");
    return text;
}

}  // namespace llmc
