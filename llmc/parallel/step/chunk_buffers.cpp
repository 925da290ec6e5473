// Searches for free buffers, and adds one if there is none.
#include "llmc/parallel/step/chunk_buffers.h"

#include <algorithm>

namespace llmc {

int ChunkBuffers::take(std::vector<bool>& used) {
    const auto free = std::ranges::find(used, false);
    const auto index = static_cast<int>(free - used.begin());
    if (free == used.end()) used.push_back(true);
    used[static_cast<std::size_t>(index)] = true;
    return index;
}

int ChunkBuffers::take_slot(ChunkPass pass, int kind) {
    auto slot = std::ranges::find_if(
        slots_, [kind](const Slot& other) { return other.kind == kind && !other.is_used; });
    if (slot == slots_.end()) slot = slots_.insert(slot, {kind, false});
    slot->is_used = true;
    return places_[pass].slot = static_cast<int>(slot - slots_.begin());
}

void ChunkBuffers::free(ChunkPass pass) {
    const auto found = places_.find(pass);
    slots_[static_cast<std::size_t>(found->second.slot)].is_used = false;
    inputs_[static_cast<std::size_t>(found->second.input)] = false;
    if (found->second.outputs >= 0) outputs_[static_cast<std::size_t>(found->second.outputs)] = false;
    places_.erase(found);
}

}  // namespace llmc
