// Builds a list pass by pass: StepBuilder adds the parts of the model, UnitActions the work on parameters and
// gradients around them, and gathers_and_recomputes.h the gathers and recomputes.
#include "llmc/parallel/step/build_step.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/standard_library.h"
#include "llmc/parallel/step/chunk_buffers.h"
#include "llmc/parallel/step/gathers_and_recomputes.h"
#include "llmc/parallel/step/insert_updates.h"
#include "llmc/parallel/step/unit_actions.h"

namespace llmc {

namespace {

using enum BufferRole;

// Whether a pass computes the gradient of its chunk's input.
bool makes_input_gradient(PassKind kind) {
    return kind == PassKind::backward || kind == PassKind::backward_input;
}

// The purpose of a list decides what follows the forward pass of the last layer.
enum class Purpose { training, losses, logits };

class StepBuilder {
  public:
    explicit StepBuilder(const StepSpec& spec, Purpose purpose = Purpose::training)
        : spec_(spec),
          purpose_(purpose),
          sharding_(spec.sharding),
          part_(spec.part),
          outline_(*spec.part.outline),
          buffers_(spec.pipeline),
          units_(spec, step_) {
        step_.part = spec.part;
        step_.stage = spec.stage;
        step_.stages = stages();
        step_.sharding = spec.sharding;
        step_.tensor = spec.tensor;
        step_.recompute = spec.recompute;
        step_.micro_batches = micro_batches();
        for (const int part : spec.slots) buffers_.add_slot(kind_of_slot(part));
    }

    Step finish(bool gathers = true) {
        insert_recomputes(step_);
        if (gathers) insert_gathers(step_);
        return std::move(step_);
    }

    // Adds the passes of this stage in their order. Data from another stage is received one pass ahead, while
    // the pass before computes. Generation does not receive ahead, because its rows have only one buffer.
    void run(std::span<const Pass> passes) {
        rounds_ = GradientRounds(spec_, passes);
        const std::size_t ahead = generates() ? 0 : 1;
        for (std::size_t i = 0; i < std::min(ahead, passes.size()); ++i) receive(passes[i]);
        for (std::size_t i = 0; i < passes.size(); ++i) {
            if (i + ahead < passes.size()) receive(passes[i + ahead]);
            const bool same_follows = i + 1 < passes.size() && passes[i + 1].chunk == passes[i].chunk;
            following_ = same_follows ? std::optional(passes[i + 1].kind) : std::nullopt;
            pass_ = static_cast<int>(i);
            perform(passes[i]);
        }
    }

    UnitActions& units() { return units_; }

  private:
    int stages() const { return spec_.pipeline.stages; }
    int micro_batches() const { return spec_.pipeline.micro_batches; }
    bool generates() const { return purpose_ == Purpose::logits; }

    void add(Action action) { step_.actions.push_back(std::move(action)); }

    // Adds an action on a part of the model, in the current pass.
    void compute(ActionKind kind, int part, std::vector<BufferUse> reads, std::vector<BufferUse> writes) {
        if (spec_.reduces_amax && purpose_ == Purpose::training &&
            fp8_products(outline_.kind_of(part).part) > 0)
            writes.push_back({amax});
        add({.kind = kind,
             .part = part,
             .micro_batch = micro_batch_,
             .chunk = chunk_,
             .slot = place_.slot,
             .reads = std::move(reads),
             .writes = std::move(writes)});
    }

    // ---- the passes of chunks

    const Chunk& chunk_of(const Pass& pass) const { return chunk_at(local(pass)); }
    const Chunk& chunk_at(int chunk) const { return part_.chunks[static_cast<std::size_t>(chunk)]; }
    int local(const Pass& pass) const { return pass.chunk / stages(); }

    // On a single stage, a chunk writes where the next one reads, and nothing is sent.
    bool has_stages() const { return stages() > 1; }

    void receive(const Pass& pass) {
        if (!has_stages()) return;
        const ChunkPass key{local(pass), pass.micro_batch};
        if (pass.kind == PassKind::forward && !chunk_of(pass).takes_tokens) {
            transfer(ActionKind::receive_activation, StreamKind::activations_in, pass, {},
                     {generates() ? rows_of(first_width(chunk_of(pass)))
                                  : input_of(chunk_of(pass), buffers_.take_input(key))});
        } else if (makes_input_gradient(pass.kind) && !chunk_of(pass).makes_losses) {
            transfer(ActionKind::receive_gradient, StreamKind::gradients_in, pass, {},
                     {gradient_in(buffers_.take_gradient(key),
                                  outline_.part(chunk_of(pass).end_part - 1).output_width)});
        }
    }

    void transfer(ActionKind kind, StreamKind stream, const Pass& pass, std::vector<BufferUse> reads,
                  std::vector<BufferUse> writes) {
        if (!has_stages()) return;
        add({.kind = kind,
             .stream = stream,
             .micro_batch = pass.micro_batch,
             .chunk = local(pass),
             .slot = place_.slot,
             .reads = std::move(reads),
             .writes = std::move(writes)});
    }

    void perform(const Pass& pass) {
        micro_batch_ = pass.micro_batch;
        chunk_ = local(pass);
        pass_kind_ = pass.kind;
        const ChunkPass key{chunk_, micro_batch_};
        const Chunk& chunk = chunk_of(pass);
        const bool is_split = has_weight_half(outline_, chunk, spec_.recompute);
        if (pass.kind == PassKind::backward_weight && !is_split) return;
        // Takes the slot, and the buffers that receive() has not taken.
        if (pass.kind == PassKind::forward) {
            if (chunk.takes_tokens || (generates() && has_stages())) buffers_.take_input(key);
            if (!has_stages() && !chunk.makes_losses) buffers_.take_input({chunk_ + 1, micro_batch_});
            buffers_.take_slot(key, kind_of_slot(chunk.first_with_input()));
        } else if (makes_input_gradient(pass.kind) && (chunk.makes_losses || !has_stages())) {
            buffers_.take_gradient(key);
        }
        if (pass.kind == PassKind::backward_input && is_split) buffers_.take_outputs(key);
        place_ = buffers_.at(key);
        switch (pass.kind) {
            case PassKind::forward:
                forward(chunk);
                if (!chunk.makes_losses)
                    transfer(ActionKind::send_activation, StreamKind::activations_out, pass,
                             {stream(chunk.end_part)}, {});
                break;
            case PassKind::backward:
            case PassKind::backward_input:
                for (int part = chunk.end_part - 1; part >= chunk.first_part; --part) {
                    const bool is_whole = pass.kind == PassKind::backward || !splits_backward(part);
                    backward(is_whole ? ActionKind::backward : ActionKind::backward_input, part);
                }
                units_.accumulate_received();
                if (!chunk.takes_tokens)
                    transfer(ActionKind::send_gradient, StreamKind::gradients_out, pass,
                             {gradient_in(place_.gradient, first_width(chunk))}, {});
                break;
            case PassKind::backward_weight:
                for (int part = chunk.end_part - 1; part >= chunk.first_part; --part) {
                    if (splits_backward(part)) backward(ActionKind::backward_weight, part);
                }
                units_.accumulate_received();
                break;
        }
        const bool ends = pass.kind == PassKind::backward || pass.kind == PassKind::backward_weight ||
                          (pass.kind == PassKind::backward_input && !is_split);
        // Outside training, a single micro-batch keeps its buffers, so that diagnosis.h can examine them.
        const bool is_over = purpose_ != Purpose::training && micro_batches() > 1;
        if (ends || is_over) buffers_.free(key);
    }

    void forward(const Chunk& chunk) {
        for (int number = chunk.first_part; number < chunk.end_part; ++number) {
            const Outline::OutlinedPart& part = outline_.part(number);
            // In training, the backward pass computes the losses together with their gradients.
            if (part.makes_losses() && purpose_ == Purpose::training) continue;
            if (part.takes_tokens() || (part.makes_losses() && !generates() && !part_.takes_tokens())) load();
            std::vector<BufferUse> reads, writes;
            if (part.takes_tokens() || (part.makes_losses() && !generates())) reads.push_back({tokens});
            if (!part.takes_tokens()) reads.push_back(stream(number));
            for (const int unit : part.units) reads.push_back(units_.whole_parameters(unit));
            ActionKind kind = generates() ? ActionKind::forward_rows : ActionKind::forward;
            if (part.makes_losses()) {
                if (generates()) kind = ActionKind::logits;
                writes = {{generates() ? logits : loss}};
            } else {
                writes = activations(number);
                // A part that does not keep its keys and values keeps its input.
                if (generates() && recompute_of(number) == RecomputeKind::block)
                    writes.push_back(kept_stream(number));
                writes.push_back(stream(number + 1));
            }
            compute(kind, number, reads, writes);
            release_after_forward(chunk, number);
        }
    }

    // Releases a part's units after its forward pass. The backward pass may gather them again. A unit that
    // several parts of the chunk share is released after the last of them.
    void release_after_forward(const Chunk& chunk, int number) {
        const Outline::OutlinedPart& part = outline_.part(number);
        // The last layer's parameters stay if its backward pass comes next.
        const bool stays = following_ && makes_input_gradient(*following_) &&
                           number + 1 == chunk.end_part - (chunk.makes_losses ? 1 : 0);
        for (const int unit : Reversed(part.units)) {
            if (next_pass_reads(chunk, unit)) continue;
            const bool comes_back = purpose_ == Purpose::training
                                        ? is_read_again(outline_, chunk, number, unit)
                                        : outline_.uses(unit, number + 1, chunk.end_part);
            const bool is_shared = outline_.uses(unit, chunk.first_part, number) ||
                                   outline_.uses(unit, number + 1, chunk.end_part);
            const bool reads_again =
                !is_shared && part.is_layer() && outline_.kind_of(part).backward_reads_parameters;
            if (is_shared ? !comes_back : !reads_again || (sharding_.reshards_after_forward && !stays))
                units_.release(unit);
        }
    }
    // Adds a part's whole backward pass, or its first or second half.
    void backward(ActionKind kind, int number) {
        const Chunk& chunk = chunk_at(chunk_);
        const Outline::OutlinedPart& part = outline_.part(number);
        if (!has_backward(outline_.kind_of(part).part)) return;
        std::vector<BufferUse> reads, writes;
        if (part.makes_losses() && !part_.takes_tokens()) load();
        if (part.makes_losses() || part.takes_tokens()) reads.push_back({tokens});
        for (const BufferUse& use : activations(number)) reads.push_back(use);
        if (!part.takes_tokens()) reads.push_back(stream(number));
        const bool reads_parameters =
            kind != ActionKind::backward_weight && outline_.kind_of(part).backward_reads_parameters;
        if (kind == ActionKind::backward_weight) {
            reads.push_back(kept_for_weights(number));
        } else {
            if (!part.makes_losses()) reads.push_back(gradient_in(place_.gradient, part.output_width));
            if (!part.takes_tokens()) writes.push_back(gradient_in(place_.gradient, part.input_width));
        }
        if (reads_parameters) {
            for (const int unit : part.units) reads.push_back(units_.whole_parameters(unit));
        }
        if (kind == ActionKind::backward_input) {
            writes.push_back(kept_for_weights(number));
        } else {
            for (const auto& [unit, round] : rounds_.begun_by({pass_, pass_kind_, chunk_}, number))
                units_.begin(unit, round);
            for (const int unit : part.units)
                if (part_.trains(unit)) writes.push_back(units_.sums(unit));
        }
        if (part.makes_losses()) writes.push_back({loss});
        compute(kind, number, reads, writes);
        if (reads_parameters) release_after_backward(chunk, number);
        if (kind == ActionKind::backward_input) return;
        for (const auto& [unit, round] : rounds_.ended_by({pass_, pass_kind_, chunk_}, number))
            units_.end(unit, round);
    }
    void release_after_backward(const Chunk& chunk, int number) {
        for (const int unit : Reversed(outline_.part(number).units)) {
            if (!is_read_backward(outline_, unit, chunk.first_part, number) && !next_pass_reads(chunk, unit))
                units_.release(unit);
        }
    }
    // Whether a unit's parameters stay for the next pass, which is of the same chunk. They do if the chunk is a single
    // layer, because then no other layer needs the buffer before.
    bool next_pass_reads(const Chunk& chunk, int unit) const {
        if (!following_ || chunk.layers() > 1) return false;
        if (*following_ == PassKind::forward)
            return outline_.uses(
                unit, chunk.first_part,
                chunk.end_part - (chunk.makes_losses && purpose_ == Purpose::training ? 1 : 0));
        return makes_input_gradient(*following_) &&
               is_read_backward(outline_, unit, chunk.first_part, chunk.end_part);
    }

    bool splits_backward(int part) const { return llmc::splits_backward(outline_, part, spec_.recompute); }

    void load() {
        add({.kind = ActionKind::load,
             .micro_batch = micro_batch_,
             .chunk = chunk_,
             .slot = place_.slot,
             .reads = {},
             .writes = {{tokens}}});
    }

    // ---- the buffers of a micro-batch

    // The residual stream before a part of the chunk, or after its last part.
    BufferUse stream(int part) const {
        if (generates()) return rows_of(width_before(part));
        return kept_stream(part);
    }
    BufferUse kept_stream(int part) const {
        if (place_of(part) == 0) return input_of(chunk_at(chunk_), place_.input);
        if (!has_stages() && part == chunk_at(chunk_).end_part)
            return input_of(chunk_at(chunk_ + 1), buffers_.at({chunk_ + 1, micro_batch_}).input);
        return {residual, place_of(part)};
    }
    // The width of the stream before a part. The model's last part makes losses, and no stream.
    int width_before(int part) const { return outline_.part(part - 1).output_width; }
    int first_width(const Chunk& chunk) const { return width_before(chunk.first_with_input()); }
    BufferUse input_of(const Chunk& chunk, int place) const {
        return {chunk_input, place * widths() + first_width(chunk)};
    }
    BufferUse gradient_in(int place, int width) const {
        return {residual_gradient, place * widths() + width};
    }
    static BufferUse rows_of(int width) { return {rows, width}; }
    int widths() const { return static_cast<int>(outline_.widths.size()); }
    // A part's position among the chunk's parts with an input; -1 for the part before these.
    int place_of(int part) const { return part - chunk_at(chunk_).first_with_input(); }
    RecomputeKind recompute_of(int part) const { return llmc::recompute_of(outline_, spec_.recompute, part); }

    // The kind of slot for a chunk. Chunks whose parts keep the same activations share a kind.
    int kind_of_slot(int first_part) {
        std::vector<int> kept;
        for (int place = 0; place < part_.most_places_of_a_chunk(); ++place) {
            const int part = first_part + place;
            const bool recomputes =
                llmc::recompute_of(outline_, spec_.recompute, part) != RecomputeKind::none;
            kept.push_back(2 * outline_.part_with_output(part).kind + (recomputes ? 1 : 0));
        }
        return slot_kinds_.try_emplace(kept, static_cast<int>(slot_kinds_.size())).first->second;
    }
    // The buffer in which backward_input keeps what a part's backward_weight needs.
    BufferUse kept_for_weights(int part) const {
        const auto split_from = [&](int first, int end) {
            int parts = 0;
            for (int number = first; number < end; ++number) parts += splits_backward(number) ? 1 : 0;
            return parts;
        };
        const Chunk& chunk = chunk_at(chunk_);
        const int place = place_.outputs * split_from(chunk.first_part, chunk.end_part) +
                          split_from(chunk.first_part, part);
        return {output_gradients, place * outline_.split_kinds + outline_.kind_of(part).split_number};
    }

    // The activations that a part's backward pass needs from its forward pass.
    std::vector<BufferUse> activations(int part) const {
        const RecomputeKind kind = recompute_of(part);
        const Outline::OutlinedPart& of = outline_.part(part);
        std::vector<BufferUse> uses;
        if (!outline_.kind_of(of).keeps) return uses;
        if (kind != RecomputeKind::block) uses.push_back({saved, place_of(part)});
        if (kind != RecomputeKind::none) uses.push_back({recomputed, of.kind, part});
        return uses;
    }

    const StepSpec& spec_;
    Purpose purpose_;
    const Sharding& sharding_;
    const StagePart& part_;
    const Outline& outline_;
    Step step_;
    ChunkBuffers buffers_;
    UnitActions units_;
    GradientRounds rounds_;
    std::map<std::vector<int>, int> slot_kinds_;
    // The current pass.
    int pass_ = 0, chunk_ = 0, micro_batch_ = 0;
    PassKind pass_kind_ = PassKind::forward;
    std::optional<PassKind> following_;  // the kind of the next pass, if it is of the same chunk
    ChunkPlace place_;
};

// The forward passes of this stage. A group of micro-batches, one for each stage, goes through one chunk
// after another. So no micro-batch waits long for what the last stage sends to the first.
std::vector<Pass> forward_passes(const StepSpec& spec, int micro_batches) {
    const int group = spec.pipeline.stages;
    std::vector<Pass> passes;
    for (int first = 0; first < micro_batches; first += group) {
        for (const Chunk& chunk : spec.part.chunks) {
            for (int micro_batch = first; micro_batch < std::min(first + group, micro_batches); ++micro_batch)
                passes.push_back({PassKind::forward, chunk.number, micro_batch});
        }
    }
    return passes;
}

}  // namespace

namespace {

Step ordered(Step step) {
    order_streams(step);
    return step;
}

// The updates that finish a step: as a list of their own, or to be inserted into one that gathers and releases
// parameters.
Step updates(const StepSpec& spec, std::span<const int> units, bool are_alone) {
    StepBuilder build(spec);
    build.units().update(units, are_alone);
    Step step = build.finish(are_alone);
    for (Action& action : step.actions) action.is_of_update = true;
    return step;
}

}  // namespace

bool has_weight_half(const Outline& outline, const Chunk& chunk, const Recompute& recompute) {
    for (int part = chunk.first_part; part < chunk.end_part; ++part) {
        if (splits_backward(outline, part, recompute)) return true;
    }
    return false;
}

Step build_training_step(const StepSpec& spec) {
    StepBuilder build(spec);
    build.run(passes_of_stage(spec.pipeline, spec.stage));
    build.units().reduce_loss();
    build.units().norm();
    Step step = build.finish();
    insert_updates(step, updates(spec, units_by_first_use(step), spec.pipeline.stages > 1));
    return ordered(std::move(step));
}

Step build_update_step(const StepSpec& spec) {
    std::vector<int> units;
    for (const auto& [unit, own] : spec.part.units)
        if (own.rounds > 0) units.push_back(unit);
    return ordered(updates(spec, units, true));
}

Step build_evaluation_step(const StepSpec& spec) {
    StepBuilder build(spec, Purpose::losses);
    build.run(forward_passes(spec, spec.pipeline.micro_batches));
    build.units().reduce_loss();
    return ordered(build.finish());
}

Step build_generation_step(const StepSpec& spec) {
    StepBuilder build(spec, Purpose::logits);
    build.run(forward_passes(spec, 1));
    return ordered(build.finish());
}

Step build_parameter_gathers(const StepSpec& spec) {
    StepBuilder build(spec);
    build.units().gather_all_updated();
    return ordered(build.finish());
}

}  // namespace llmc
