#include "llmc/parallel/chunk_buffers.h"

#include <algorithm>

namespace llmc {

int ChunkBuffers::take(std::vector<bool>& used) {
    const auto free = std::ranges::find(used, false);
    const auto index = static_cast<int>(free - used.begin());
    if (free == used.end()) used.push_back(true);
    used[static_cast<std::size_t>(index)] = true;
    return index;
}

void ChunkBuffers::free(ChunkPass pass) {
    const auto found = places_.find(pass);
    slots_[static_cast<std::size_t>(found->second.slot)] = false;
    inputs_[static_cast<std::size_t>(found->second.input)] = false;
    places_.erase(found);
}

}  // namespace llmc
