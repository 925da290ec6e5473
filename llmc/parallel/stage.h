// Which part of the model a pipeline stage has: chunks, each a run of blocks, the model's first chunk with the embedding
// and its last with the head. Without a pipeline one chunk is the whole model.
#pragma once

#include <vector>

#include "llmc/model/recompute.h"
#include "llmc/parallel/pipeline_partition.h"

namespace llmc {

struct Chunk {
    int number = 0;  // of the model's chunks, from the embedding to the head
    int first_block = 0, end_block = 0;
    bool has_embedding = true, has_head = true;

    int blocks() const { return end_block - first_block; }
    bool operator==(const Chunk&) const = default;
};

struct StagePart {
    int layers = 0;             // of the whole model
    std::vector<Chunk> chunks;  // of this stage, in the model's order

    bool has_embedding() const { return !chunks.empty() && chunks.front().has_embedding; }
    bool has_head() const { return !chunks.empty() && chunks.back().has_head; }
    // The embedding's and the head's stage each have the unit wte.
    bool has_unit(int unit) const;
    // Where the squares of a unit's gradients count: each once in the pipeline.
    bool counts_unit(int unit) const;

    int blocks() const;
    // Of this stage's blocks in the model's order: the place of one; which stands at a place.
    int place_of_block(int block) const;
    int block_at(int place) const;
    int most_blocks_of_a_chunk() const;
    bool recomputes_any(const Recompute& recompute) const;
};

StagePart whole_model(int layers);

// Of a pipeline whose chunks have these blocks; chunk c is stage c % stages'.
StagePart part_of_stage(const std::vector<BlockRange>& chunks, int stages, int stage);

}  // namespace llmc
