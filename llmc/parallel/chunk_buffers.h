// Gives the passes of a list their buffers: a slot for what a chunk keeps of a micro-batch until its backward pass is
// through, one of a few buffers for its input, and one for the gradient that flows back; where that pass comes in two
// parts, room for what the second takes from the first. The lowest that is free, so that
// there are as many as are ever in use at once. Slots come in kinds, where chunks do not keep the same.
#pragma once

#include <map>
#include <vector>

namespace llmc {

// A chunk of the stage, and a micro-batch.
struct ChunkPass {
    int chunk, micro_batch;
    auto operator<=>(const ChunkPass&) const = default;
};

struct ChunkPlace {
    int slot = 0, input = 0, gradient = 0;
    int outputs = -1;  // of the gradients of the chunk's outputs; -1: none
};

class ChunkBuffers {
  public:
    // In a pipeline a gradient is received, and another sent, beside the one that is computed with.
    explicit ChunkBuffers(bool has_stages) : gradients_(has_stages ? 3 : 1) {}

    int take_input(ChunkPass pass) { return places_[pass].input = take(inputs_); }
    int take_slot(ChunkPass pass, int kind);
    void add_slot(int kind) { slots_.push_back({kind, false}); }
    int take_outputs(ChunkPass pass) { return places_[pass].outputs = take(outputs_); }
    // In turn. It is not given back: what uses it next waits.
    int take_gradient(ChunkPass pass) { return places_[pass].gradient = next_gradient_++ % gradients_; }
    // All but the gradient.
    void free(ChunkPass pass);

    const ChunkPlace& at(ChunkPass pass) const { return places_.at(pass); }

  private:
    static int take(std::vector<bool>& used);

    std::map<ChunkPass, ChunkPlace> places_;
    struct Slot {
        int kind;
        bool is_used;
    };
    std::vector<Slot> slots_;
    std::vector<bool> inputs_, outputs_;  // whether they are in use
    int gradients_, next_gradient_ = 0;
};

}  // namespace llmc
