// Assigns buffers to the passes of a list: a slot for the activations of a chunk and micro-batch, a chunk
// input, a gradient, and room for what backward_weight needs. It takes the lowest free buffer, so there are
// no more than are in use at once. Chunks that keep different activations have different kinds of slots.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "llmc/parallel/pipeline/pipeline_schedule.h"

namespace llmc {

// A chunk of the stage, and a micro-batch.
struct ChunkPass {
    int chunk, micro_batch;
    auto operator<=>(const ChunkPass&) const = default;
};

struct ChunkPlace {
    int slot = 0, input = 0, gradient = 0;
    int outputs = -1;  // for backward_weight; -1: none
};

class ChunkBuffers {
  public:
    // In a pipeline there are three gradient buffers: one is received and one sent while one is used; and more if the
    // stage that receives them has all micro-batches of another chunk to compute first. On a single stage there is one
    // for each micro-batch that is between two chunks.
    explicit ChunkBuffers(const PipelineSpec& pipeline)
        : has_stages_(pipeline.stages > 1), gradients_(gradients_of(pipeline)) {}

    int take_input(ChunkPass pass) { return places_[pass].input = take(inputs_); }
    int take_slot(ChunkPass pass, int kind) {
        auto slot = std::ranges::find_if(
            slots_, [kind](const Slot& other) { return other.kind == kind && !other.is_used; });
        if (slot == slots_.end()) slot = slots_.insert(slot, {kind, false});
        slot->is_used = true;
        return places_[pass].slot = static_cast<int>(slot - slots_.begin());
    }
    void add_slot(int kind) { slots_.push_back({kind, false}); }
    int take_outputs(ChunkPass pass) { return places_[pass].outputs = take(outputs_); }
    // Takes the gradient buffers in turn. They are never freed: an action that reuses one waits for the
    // action that used it (Action::after).
    int take_gradient(ChunkPass pass) {
        return places_[pass].gradient = (has_stages_ ? next_gradient_++ : pass.micro_batch) % gradients_;
    }
    // Frees all but the gradient.
    void free(ChunkPass pass) {
        const auto found = places_.find(pass);
        slots_[static_cast<std::size_t>(found->second.slot)].is_used = false;
        inputs_[static_cast<std::size_t>(found->second.input)] = false;
        if (found->second.outputs >= 0) outputs_[static_cast<std::size_t>(found->second.outputs)] = false;
        places_.erase(found);
    }

    const ChunkPlace& at(ChunkPass pass) const { return places_.at(pass); }

  private:
    static int gradients_of(const PipelineSpec& pipeline) {
        const bool has_chunks = pipeline.virtual_stages > 1;
        if (pipeline.stages == 1) return has_chunks ? pipeline.group() : 1;
        const bool is_breadth_first = pipeline.schedule == PipelineSchedule::breadth_first;
        return has_chunks && is_breadth_first ? pipeline.micro_batches + 2 : 3;
    }
    static int take(std::vector<bool>& used) {
        const auto free = std::ranges::find(used, false);
        const auto index = static_cast<int>(free - used.begin());
        if (free == used.end()) used.push_back(true);
        used[static_cast<std::size_t>(index)] = true;
        return index;
    }

    std::map<ChunkPass, ChunkPlace> places_;
    struct Slot {
        int kind;
        bool is_used;
    };
    std::vector<Slot> slots_;
    std::vector<bool> inputs_, outputs_;  // whether each is in use
    bool has_stages_;
    int gradients_, next_gradient_ = 0;
};

}  // namespace llmc
