#include "llmc/parallel/build_step.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/model/units.h"
#include "llmc/parallel/chunk_buffers.h"
#include "llmc/parallel/insert_recomputes.h"
#include "llmc/parallel/prefetch.h"
#include "llmc/parallel/unit_actions.h"

namespace llmc {

namespace {

using enum BufferRole;

// Whether a pass makes the gradient of its chunk's input.
bool makes_input_gradient(PassKind kind) {
    return kind == PassKind::backward || kind == PassKind::backward_input;
}

// What follows the forward pass of the last block.
enum class Purpose { training, losses, logits };

class StepBuilder {
  public:
    explicit StepBuilder(const StepSpec& spec, Purpose purpose = Purpose::training)
        : spec_(spec),
          purpose_(purpose),
          sharding_(spec.sharding),
          part_(spec.part),
          buffers_(spec.pipeline.stages > 1),
          units_(spec, step_) {
        step_.part = spec.part;
        step_.stage = spec.stage;
        step_.stages = stages();
        step_.sharding = spec.sharding;
        step_.tensor = spec.tensor;
        step_.recompute = spec.recompute;
        step_.micro_batches = micro_batches();
    }

    Step finish() {
        insert_recomputes(step_);
        insert_gathers(step_);
        order_streams(step_);
        return std::move(step_);
    }

    // The passes of this stage in their order. What comes from another stage is received one pass ahead, while the
    // pass before computes; but for a few rows, which have one place.
    void run(std::span<const Pass> passes) {
        const std::size_t ahead = generates() ? 0 : 1;
        for (std::size_t i = 0; i < std::min(ahead, passes.size()); ++i) receive(passes[i]);
        for (std::size_t i = 0; i < passes.size(); ++i) {
            if (i + ahead < passes.size()) receive(passes[i + ahead]);
            const bool turns_round = i + 1 < passes.size() && makes_input_gradient(passes[i + 1].kind) &&
                                     passes[i + 1].chunk == passes[i].chunk &&
                                     passes[i + 1].micro_batch == passes[i].micro_batch;
            perform(passes[i], turns_round);
        }
    }

    UnitActions& units() { return units_; }

  private:
    int layers() const { return part_.layers; }
    int ln_f() const { return ln_f_unit(layers()); }
    int stages() const { return spec_.pipeline.stages; }
    int micro_batches() const { return spec_.pipeline.micro_batches; }
    bool generates() const { return purpose_ == Purpose::logits; }

    void add(Action action) { step_.actions.push_back(std::move(action)); }

    // A part of the model, of the pass that is under way.
    void compute(ActionKind kind, Part part, std::vector<BufferUse> reads, std::vector<BufferUse> writes) {
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

    void receive(const Pass& pass) {
        const ChunkPass key{local(pass), pass.micro_batch};
        if (pass.kind == PassKind::forward && !chunk_of(pass).has_embedding) {
            transfer(ActionKind::receive_activation, StreamKind::activations_in, pass, {},
                     {generates() ? BufferUse{rows} : BufferUse{chunk_input, buffers_.take_input(key)}});
        } else if (makes_input_gradient(pass.kind) && !chunk_of(pass).has_head) {
            transfer(ActionKind::receive_gradient, StreamKind::gradients_in, pass, {},
                     {{residual_gradient, buffers_.take_gradient(key)}});
        }
    }

    void transfer(ActionKind kind, StreamKind stream, const Pass& pass, std::vector<BufferUse> reads,
                  std::vector<BufferUse> writes) {
        add({.kind = kind,
             .stream = stream,
             .micro_batch = pass.micro_batch,
             .chunk = local(pass),
             .slot = place_.slot,
             .reads = std::move(reads),
             .writes = std::move(writes)});
    }

    void perform(const Pass& pass, bool turns_round) {
        micro_batch_ = pass.micro_batch;
        chunk_ = local(pass);
        const ChunkPass key{chunk_, micro_batch_};
        const Chunk& chunk = chunk_of(pass);
        const bool is_split = has_weight_part(chunk, spec_.recompute);
        if (pass.kind == PassKind::backward_weight && !is_split) return;
        // What is not received is made here.
        if (pass.kind == PassKind::forward) {
            if (chunk.has_embedding || generates()) buffers_.take_input(key);
            buffers_.take_slot(key, blocks_before_recompute(chunk));
        } else if (makes_input_gradient(pass.kind) && chunk.has_head) {
            buffers_.take_gradient(key);
        }
        if (pass.kind == PassKind::backward_input && is_split) buffers_.take_outputs(key);
        place_ = buffers_.at(key);
        switch (pass.kind) {
            case PassKind::forward:
                if (generates()) {
                    forward_rows(chunk);
                } else {
                    forward(chunk, turns_round);
                }
                if (!chunk.has_head)
                    transfer(ActionKind::send_activation, StreamKind::activations_out, pass,
                             {output_of(chunk)}, {});
                break;
            case PassKind::backward:
            case PassKind::backward_input:
                backward(chunk, pass.kind == PassKind::backward);
                if (!chunk.has_embedding)
                    transfer(ActionKind::send_gradient, StreamKind::gradients_out, pass, {gradient()}, {});
                break;
            case PassKind::backward_weight:
                for (int block = chunk.end_block - 1; block >= chunk.first_block; --block) {
                    if (splits_backward(block)) backward_block(ActionKind::backward_weight, block);
                }
                units_.accumulate_received();
                break;
        }
        const bool ends = pass.kind == PassKind::backward || pass.kind == PassKind::backward_weight ||
                          (pass.kind == PassKind::backward_input && !is_split);
        // One micro-batch alone leaves what it computed, for who looks for what went wrong.
        const bool is_over = purpose_ != Purpose::training && micro_batches() > 1;
        if (ends || is_over) buffers_.free(key);
    }

    void forward(const Chunk& chunk, bool turns_round) {
        if (chunk.has_embedding) {
            load();
            compute(ActionKind::forward, {PartKind::embedding},
                    {{tokens}, units_.whole_parameters(wte_unit), units_.whole_parameters(wpe_unit)},
                    {stream(0)});
            units_.release(wpe_unit);
            if (!part_.has_head()) units_.release(wte_unit);
        }
        for (int block = chunk.first_block; block < chunk.end_block; ++block) {
            const int unit = block_unit(block);
            compute(ActionKind::forward, {PartKind::block, block},
                    {stream(block), units_.whole_parameters(unit)},
                    with(activations(block), {stream(block + 1)}));
            // The backward pass begins with the last block.
            const bool stays = turns_round && block + 1 == chunk.end_block;
            if (sharding_.reshards_after_forward && !stays) units_.release(unit);
        }
        if (chunk.has_head && purpose_ == Purpose::losses) head(chunk);
    }

    // Of a few rows, in place. What a block writes beside them is its cache, which it reads when the list runs again.
    void forward_rows(const Chunk& chunk) {
        if (chunk.has_embedding) {
            load();
            compute(ActionKind::forward_rows, {PartKind::embedding},
                    {{tokens}, units_.whole_parameters(wte_unit), units_.whole_parameters(wpe_unit)},
                    {{rows}});
            units_.release(wpe_unit);
            if (!part_.has_head()) units_.release(wte_unit);
        }
        for (int block = chunk.first_block; block < chunk.end_block; ++block) {
            const int unit = block_unit(block);
            std::vector<BufferUse> cache = activations(block);
            if (spec_.recompute.of(block) == RecomputeKind::block) cache.push_back(stream(block));
            compute(ActionKind::forward_rows, {PartKind::block, block},
                    {{rows}, units_.whole_parameters(unit)}, with(cache, {{rows}}));
            if (sharding_.reshards_after_forward) units_.release(unit);
        }
        if (chunk.has_head) head(chunk);
    }

    void head(const Chunk& chunk) {
        const std::vector<BufferUse> reads = {output_of(chunk), units_.whole_parameters(ln_f()),
                                              units_.whole_parameters(wte_unit)};
        if (purpose_ == Purpose::losses) {
            if (!chunk.has_embedding) load();
            compute(ActionKind::forward, {PartKind::head}, {{tokens}, reads[0], reads[1], reads[2]},
                    {{loss}});
        } else {
            compute(ActionKind::logits, {PartKind::head}, reads, {{logits}});
        }
        units_.release(wte_unit);
        units_.release(ln_f());
    }

    // With the gradients of parameters; or, of blocks whose backward pass comes in two parts, those of their inputs alone.
    void backward(const Chunk& chunk, bool whole) {
        if (chunk.has_head) {
            if (!chunk.has_embedding) load();
            units_.begin(wte_unit, micro_batch_);
            units_.begin(ln_f(), micro_batch_);
            compute(ActionKind::backward, {PartKind::head},
                    {{tokens},
                     stream(layers()),
                     units_.whole_parameters(ln_f()),
                     units_.whole_parameters(wte_unit)},
                    {gradient(), units_.sums(ln_f()), units_.sums(wte_unit), {loss}});
            units_.release(wte_unit);
            units_.release(ln_f());
            units_.end(ln_f(), micro_batch_);
            if (!chunk.has_embedding) units_.end(wte_unit, micro_batch_);
        }
        for (int block = chunk.end_block - 1; block >= chunk.first_block; --block)
            backward_block(
                whole || !splits_backward(block) ? ActionKind::backward : ActionKind::backward_input, block);
        if (chunk.has_embedding) {
            if (!chunk.has_head) units_.begin(wte_unit, micro_batch_);
            units_.begin(wpe_unit, micro_batch_);
            compute(ActionKind::backward, {PartKind::embedding}, {{tokens}, gradient()},
                    {units_.sums(wte_unit), units_.sums(wpe_unit)});
            units_.end(wpe_unit, micro_batch_);
            units_.end(wte_unit, micro_batch_);
        }
        units_.accumulate_received();
    }

    void backward_block(ActionKind kind, int block) {
        const int unit = block_unit(block);
        const Part part{PartKind::block, block};
        const BufferUse later = kept_for_weights(block);
        const std::vector<BufferUse> kept = with(activations(block), {stream(block)});
        if (kind == ActionKind::backward_input) {
            compute(kind, part, with(kept, {gradient(), units_.whole_parameters(unit)}), {gradient(), later});
            units_.release(unit);
            return;
        }
        units_.begin(unit, micro_batch_);
        if (kind == ActionKind::backward) {
            compute(kind, part, with(kept, {gradient(), units_.whole_parameters(unit)}),
                    {gradient(), units_.sums(unit)});
            units_.release(unit);
        } else {
            compute(kind, part, with(kept, {later}), {units_.sums(unit)});
        }
        units_.end(unit, micro_batch_);
    }

    // Of a schedule that splits backward passes. What is made again would be made twice, from parameters gathered twice.
    bool splits_backward(int block) const { return !spec_.recompute.recomputes(block); }

    void load() {
        add({.kind = ActionKind::load,
             .micro_batch = micro_batch_,
             .chunk = chunk_,
             .slot = place_.slot,
             .reads = {},
             .writes = {{tokens}}});
    }

    // ---- where a micro-batch's numbers are

    // The residual stream before a block of the chunk, or behind its last one.
    BufferUse stream(int block) const {
        if (in_chunk(block) == 0) return {chunk_input, place_.input};
        return {residual, in_chunk(block)};
    }
    BufferUse output_of(const Chunk& chunk) const {
        return generates() ? BufferUse{rows} : stream(chunk.end_block);
    }
    int in_chunk(int block) const { return block - chunk_at(chunk_).first_block; }
    // What slots of a chunk are made for: chunks that keep the same of their blocks use the same ones.
    int blocks_before_recompute(const Chunk& chunk) const {
        const int most = part_.most_blocks_of_a_chunk();
        for (int place = 0; place < most; ++place) {
            if (spec_.recompute.recomputes(chunk.first_block + place)) return place;
        }
        return most;
    }
    // The gradients of a block's outputs.
    BufferUse kept_for_weights(int block) const {
        const auto split_from = [&](int first, int end) {
            int blocks = 0;
            for (int number = first; number < end; ++number) blocks += splits_backward(number) ? 1 : 0;
            return blocks;
        };
        const Chunk& chunk = chunk_at(chunk_);
        return {output_gradients, place_.outputs * split_from(chunk.first_block, chunk.end_block) +
                                      split_from(chunk.first_block, block)};
    }
    BufferUse gradient() const { return {residual_gradient, place_.gradient}; }

    // What a block's backward needs of its forward.
    std::vector<BufferUse> activations(int block) const {
        const RecomputeKind kind = spec_.recompute.of(block);
        std::vector<BufferUse> uses;
        if (kind != RecomputeKind::block) uses.push_back({saved, in_chunk(block)});
        if (kind != RecomputeKind::none) uses.push_back({recomputed, 0, block_unit(block)});
        return uses;
    }
    static std::vector<BufferUse> with(std::vector<BufferUse> uses, std::initializer_list<BufferUse> more) {
        uses.insert(uses.end(), more);
        return uses;
    }

    const StepSpec& spec_;
    Purpose purpose_;
    const Sharding& sharding_;
    const StagePart& part_;
    Step step_;
    ChunkBuffers buffers_;
    UnitActions units_;
    // Of the pass that is under way.
    int chunk_ = 0, micro_batch_ = 0;
    ChunkPlace place_;
};

// The forward passes of this stage: as many micro-batches as there are stages go through one chunk after the other, so that
// none waits long for what the last stage sends to the first.
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

bool has_weight_part(const Chunk& chunk, const Recompute& recompute) {
    for (int block = chunk.first_block; block < chunk.end_block; ++block) {
        if (!recompute.recomputes(block)) return true;
    }
    return false;
}

Step build_training_step(const StepSpec& spec) {
    StepBuilder build(spec);
    build.run(pipeline_passes(spec.pipeline)[static_cast<std::size_t>(spec.stage)]);
    build.units().reduce_loss();
    build.units().norm_and_update();
    return build.finish();
}

Step build_evaluation_step(const StepSpec& spec) {
    StepBuilder build(spec, Purpose::losses);
    build.run(forward_passes(spec, spec.pipeline.micro_batches));
    build.units().reduce_loss();
    return build.finish();
}

Step build_generation_step(const StepSpec& spec) {
    StepBuilder build(spec, Purpose::logits);
    build.run(forward_passes(spec, 1));
    return build.finish();
}

Step build_publication(const StepSpec& spec) {
    StepBuilder build(spec);
    build.units().publish_all();
    return build.finish();
}

}  // namespace llmc
