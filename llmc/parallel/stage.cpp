#include "llmc/parallel/stage.h"

#include <algorithm>

#include "llmc/core/error.h"
#include "llmc/model/units.h"

namespace llmc {

bool StagePart::has_unit(int unit) const {
    if (unit == wte_unit) return has_embedding() || has_head();
    if (unit == wpe_unit) return has_embedding();
    if (unit == ln_f_unit(layers)) return has_head();
    const int block = unit - block_unit(0);
    return std::ranges::any_of(
        chunks, [&](const Chunk& chunk) { return chunk.first_block <= block && block < chunk.end_block; });
}

bool StagePart::counts_unit(int unit) const { return unit == wte_unit ? has_embedding() : has_unit(unit); }

int StagePart::blocks() const {
    int blocks = 0;
    for (const Chunk& chunk : chunks) blocks += chunk.blocks();
    return blocks;
}

int StagePart::place_of_block(int block) const {
    int before = 0;
    for (const Chunk& chunk : chunks) {
        if (chunk.first_block <= block && block < chunk.end_block) return before + block - chunk.first_block;
        before += chunk.blocks();
    }
    programming_error("a block of another stage");
}

int StagePart::block_at(int place) const {
    for (const Chunk& chunk : chunks) {
        if (place < chunk.blocks()) return chunk.first_block + place;
        place -= chunk.blocks();
    }
    programming_error("a stage has not so many blocks");
}

int StagePart::most_blocks_of_a_chunk() const {
    int most = 0;
    for (const Chunk& chunk : chunks) most = std::max(most, chunk.blocks());
    return most;
}

bool StagePart::recomputes_any(const Recompute& recompute) const {
    for (int place = 0; place < blocks(); ++place) {
        if (recompute.recomputes(block_at(place))) return true;
    }
    return false;
}

StagePart whole_model(int layers) { return {.layers = layers, .chunks = {{.end_block = layers}}}; }

StagePart part_of_stage(const std::vector<BlockRange>& chunks, int stages, int stage) {
    const int count = static_cast<int>(chunks.size());
    StagePart part{.layers = chunks.back().end, .chunks = {}};
    for (int number = stage; number < count; number += stages) {
        const BlockRange& blocks = chunks[static_cast<std::size_t>(number)];
        part.chunks.push_back({.number = number,
                               .first_block = blocks.first,
                               .end_block = blocks.end,
                               .has_embedding = number == 0,
                               .has_head = number + 1 == count});
    }
    return part;
}

}  // namespace llmc
