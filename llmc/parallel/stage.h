// Which part of the model a pipeline stage has: chunks, each a run of the model's parts, the first one with what takes tokens
// and the last with what makes losses. Without a pipeline one chunk is the whole model.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/model/model.h"
#include "llmc/model/recompute.h"
#include "llmc/parallel/pipeline_partition.h"

namespace llmc {

struct Chunk {
    int number = 0;                      // of the model's chunks
    int first_part = 0, end_part = 0;    // of the model
    int first_layer = 0, end_layer = 0;  // among these
    bool takes_tokens = true, makes_losses = true;

    int layers() const { return end_layer - first_layer; }
    // What comes before it has no input that is kept.
    int first_with_input() const { return first_part + (takes_tokens ? 1 : 0); }
    bool operator==(const Chunk&) const = default;
};

// How a stage has a unit.
struct StageUnit {
    bool is_here = false;
    bool counts = false;  // here the squares of its gradients count: once in the pipeline
    int stages = 0;       // that have it
    // Passes of a micro-batch that make its gradients here, one behind the other or not: of so many chunks, and of backward
    // passes that come in two parts both.
    int rounds = 0;
    int turn = 0;  // among those of its class here
};

struct StagePart {
    std::shared_ptr<const Outline> outline;
    std::vector<Chunk> chunks;     // of this stage, in the model's order
    std::vector<StageUnit> units;  // of the model
    std::map<int, std::vector<int>>
        alike{};  // the units here that may take turns with buffers, by their class

    bool takes_tokens() const { return !chunks.empty() && chunks.front().takes_tokens; }
    bool makes_losses() const { return !chunks.empty() && chunks.back().makes_losses; }
    const StageUnit& unit(int number) const { return units[static_cast<std::size_t>(number)]; }
    bool has_unit(int number) const { return unit(number).is_here; }
    bool counts_unit(int number) const { return unit(number).counts; }
    // Several stages make its gradients.
    bool is_tied(int number) const { return unit(number).is_here && unit(number).stages > 1; }

    // The largest number of streams inside a chunk.
    int most_places_of_a_chunk() const;
    bool recomputes_any(const Recompute& recompute) const;
};

// What a part recomputes; of a part beyond the last one with a stream behind it, as if there were more layers.
RecomputeKind recompute_of(const Outline& outline, const Recompute& recompute, int part);
// Whether the backward pass of a part comes in two, where the schedule splits it: what is made again would be made twice, from
// parameters gathered twice.
bool splits_backward(const Outline& outline, int part, const Recompute& recompute);
// Whether the backward pass of one of these parts reads a unit's parameters.
bool is_read_backward(const Outline& outline, int unit, int first_part, int end_part);
// Whether a unit's parameters are read behind the forward pass of a part of the chunk: by a later part, or by a backward pass.
bool is_read_behind(const Outline& outline, const Chunk& chunk, int part, int unit);

// All of it on one stage.
StagePart whole_model(const std::shared_ptr<const Outline>& outline);

// Of a pipeline whose chunks have these layers; chunk c is stage c % stages'. Where `splits`, its schedule splits the backward
// passes of parts that do not recompute.
std::vector<StagePart> parts_of_stages(const std::shared_ptr<const Outline>& outline,
                                       const std::vector<BlockRange>& chunks, int stages, bool splits,
                                       const Recompute& recompute);

}  // namespace llmc
