// Describes a pipeline stage's part of the model: its chunks, each a sequence of consecutive parts of the
// model. The first chunk begins with the part that takes tokens, and the last one ends with the part that
// makes losses. Without a pipeline, one chunk is the whole model.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/model/model.h"
#include "llmc/model/part_lists.h"
#include "llmc/parallel/pipeline/pipeline_partition.h"

namespace llmc {

struct Chunk {
    int number = 0;                      // its number among the model's chunks
    int first_part = 0, end_part = 0;    // its parts, by their numbers in the model
    int first_layer = 0, end_layer = 0;  // its layers, by their numbers in the model
    bool takes_tokens = true, makes_losses = true;

    int layers() const { return end_layer - first_layer; }
    // The first part that has an input. The part that takes tokens has none.
    int first_with_input() const { return first_part + (takes_tokens ? 1 : 0); }
    bool operator==(const Chunk&) const = default;
};

// A unit as seen from one stage.
struct StageUnit {
    bool counts = false;  // Whether this stage adds its gradients to the norm. Exactly one stage does.
    int stages = 0;       // How many stages have it and train it.
    // How many passes of one micro-batch compute its gradients here: one per chunk, and two if a chunk splits
    // the backward passes of only some of the unit's parts.
    int rounds = 0;  // 0: it is frozen
    int turn = 0;    // Its position among the units of its class here.
};

struct StagePart {
    std::shared_ptr<const Outline> outline;
    std::vector<Chunk> chunks;         // this stage's chunks, in the model's order
    std::map<int, StageUnit> units{};  // the units here, by their numbers in the model
    // The units here that may share rotating buffers, by their class.
    std::map<int, std::vector<int>> alike{};

    bool takes_tokens() const { return !chunks.empty() && chunks.front().takes_tokens; }
    bool makes_losses() const { return !chunks.empty() && chunks.back().makes_losses; }
    // A unit as this stage sees it; one without passes if it is not here.
    const StageUnit& unit(int number) const {
        static const StageUnit absent;
        const auto found = units.find(number);
        return found == units.end() ? absent : found->second;
    }
    bool has_unit(int number) const { return units.contains(number); }
    bool trains(int number) const { return unit(number).rounds > 0; }
    bool counts_unit(int number) const { return unit(number).counts; }
    // Whether several stages compute its gradients.
    bool is_tied(int number) const { return unit(number).stages > 1; }

    // The number of parts with an input and an output in the chunk that has most of them.
    int most_places_of_a_chunk() const;
    bool recomputes_any(const Recompute& recompute) const;
};

// How a part is recomputed. Numbers beyond the last part with an output are treated as further layers.
RecomputeKind recompute_of(const Outline& outline, const Recompute& recompute, int part);
// Whether a part's backward pass is split in two if the schedule splits passes. A part that recomputes is not
// split: it would recompute twice, with parameters gathered twice.
bool splits_backward(const Outline& outline, int part, const Recompute& recompute);
// Whether the backward pass of one of these parts reads a unit's parameters.
bool is_read_backward(const Outline& outline, int unit, int first_part, int end_part);
// Whether a unit's parameters are read again after a part's forward pass: by a later part of the chunk, or by
// a backward pass.
bool is_read_again(const Outline& outline, const Chunk& chunk, int part, int unit);

// The whole model on one stage.
StagePart whole_model(const std::shared_ptr<const Outline>& outline);

// The parts of the stages of a pipeline whose chunks have these layers. Chunk c is on stage c % stages. With
// `splits`, the schedule splits the backward passes of parts that do not recompute.
std::vector<StagePart> parts_of_stages(const std::shared_ptr<const Outline>& outline,
                                       const std::vector<BlockRange>& chunks, int stages, bool splits,
                                       const Recompute& recompute);

}  // namespace llmc
