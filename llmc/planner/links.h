// Which link carries what the ranks of a mesh send: the link inside a machine, or the network between machines.
#pragma once

#include <string>
#include <string_view>

#include "llmc/parallel/mesh.h"

namespace llmc {

enum class LinkLevel { none /* the group has one rank */, node, network };
std::string_view name_of(LinkLevel link);

// Ranks lie on machines in their order, `ranks_of_node` on each.
struct Links {
    Links(const Mesh& mesh, int ranks_of_node);

    LinkLevel tensor, inside /* a sharding group */, across /* sharding groups */, stages;
};

// "tensor parallel on the machine's own link, pipeline stages over the network"; empty for one rank.
std::string links_text(const Mesh& mesh, int ranks_of_node);

}  // namespace llmc
