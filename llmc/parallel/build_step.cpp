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
          buffers_(spec.pipeline.stages > 1) {
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

    void norm_and_update() {
        accumulate_received();
        finish_tied();
        Action square{.kind = ActionKind::square, .reads = {}, .writes = {{squares}}};
        for_each_unit([&](int unit) {
            if (part_.counts_unit(unit)) square.reads.push_back(reduced(unit));
        });
        add(std::move(square));
        if (has_others())
            communicate({.kind = ActionKind::gather_squares, .reads = {{squares}}, .writes = {{squares}}});
        add({.kind = ActionKind::norm, .reads = {{squares}}, .writes = {{norm}}});
        for_each_unit([&](int unit) {
            const bool whole = sharding_.keeps_optimizer_whole();
            add({.kind = ActionKind::update,
                 .unit = unit,
                 .reads = {whole ? whole_gradients(unit) : reduced(unit), {norm}, {optimizer, unit, unit}},
                 .writes = {{optimizer, unit, unit}, own_parameters(unit)}});
            publish(unit);
        });
    }

    void publish_all() {
        for_each_unit([&](int unit) { publish(unit); });
    }

    void reduce_loss() {
        if (has_others())
            communicate({.kind = ActionKind::reduce_loss, .reads = {{loss}}, .writes = {{loss}}});
    }

  private:
    int layers() const { return part_.layers; }
    int ln_f() const { return ln_f_unit(layers()); }
    int stages() const { return spec_.pipeline.stages; }
    int micro_batches() const { return spec_.pipeline.micro_batches; }
    bool generates() const { return purpose_ == Purpose::logits; }
    bool has_others() const { return sharding_.ranks() > 1 || stages() > 1 || spec_.tensor.ranks > 1; }
    // wte's gradients are made in two stages.
    bool is_tied(int unit) const { return unit == wte_unit && stages() > 1; }

    template <class F>
    void for_each_unit(F&& f) const {
        for (int unit = 0; unit <= ln_f(); ++unit) {
            if (part_.has_unit(unit)) f(unit);
        }
    }

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

    void communicate(Action action) {
        action.stream = StreamKind::communication;
        add(std::move(action));
    }
    // Where there are data ranks to talk to.
    void communicate_data(Action action) {
        if (sharding_.ranks() > 1) communicate(std::move(action));
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
                accumulate_received();
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
                    {{tokens}, whole_parameters(wte_unit), whole_parameters(wpe_unit)}, {stream(0)});
            release(wpe_unit);
            if (!part_.has_head()) release(wte_unit);
        }
        for (int block = chunk.first_block; block < chunk.end_block; ++block) {
            const int unit = block_unit(block);
            compute(ActionKind::forward, {PartKind::block, block}, {stream(block), whole_parameters(unit)},
                    with(activations(block), {stream(block + 1)}));
            // The backward pass begins with the last block.
            const bool stays = turns_round && block + 1 == chunk.end_block;
            if (sharding_.reshards_after_forward && !stays) release(unit);
        }
        if (chunk.has_head && purpose_ == Purpose::losses) head(chunk);
    }

    // Of a few rows, in place. What a block writes beside them is its cache, which it reads when the list runs again.
    void forward_rows(const Chunk& chunk) {
        if (chunk.has_embedding) {
            load();
            compute(ActionKind::forward_rows, {PartKind::embedding},
                    {{tokens}, whole_parameters(wte_unit), whole_parameters(wpe_unit)}, {{rows}});
            release(wpe_unit);
            if (!part_.has_head()) release(wte_unit);
        }
        for (int block = chunk.first_block; block < chunk.end_block; ++block) {
            const int unit = block_unit(block);
            std::vector<BufferUse> cache = activations(block);
            if (spec_.recompute.of(block) == RecomputeKind::block) cache.push_back(stream(block));
            compute(ActionKind::forward_rows, {PartKind::block, block}, {{rows}, whole_parameters(unit)},
                    with(cache, {{rows}}));
            if (sharding_.reshards_after_forward) release(unit);
        }
        if (chunk.has_head) head(chunk);
    }

    void head(const Chunk& chunk) {
        const std::vector<BufferUse> reads = {output_of(chunk), whole_parameters(ln_f()),
                                              whole_parameters(wte_unit)};
        if (purpose_ == Purpose::losses) {
            if (!chunk.has_embedding) load();
            compute(ActionKind::forward, {PartKind::head}, {{tokens}, reads[0], reads[1], reads[2]},
                    {{loss}});
        } else {
            compute(ActionKind::logits, {PartKind::head}, reads, {{logits}});
        }
        release(wte_unit);
        release(ln_f());
    }

    // With the gradients of parameters; or, of blocks whose backward pass comes in two parts, those of their inputs alone.
    void backward(const Chunk& chunk, bool whole) {
        if (chunk.has_head) {
            if (!chunk.has_embedding) load();
            begin(wte_unit);
            begin(ln_f());
            compute(ActionKind::backward, {PartKind::head},
                    {{tokens}, stream(layers()), whole_parameters(ln_f()), whole_parameters(wte_unit)},
                    {gradient(), sums(ln_f()), sums(wte_unit), {loss}});
            release(wte_unit);
            release(ln_f());
            end(ln_f());
            if (!chunk.has_embedding) end(wte_unit);
        }
        for (int block = chunk.end_block - 1; block >= chunk.first_block; --block)
            backward_block(
                whole || !splits_backward(block) ? ActionKind::backward : ActionKind::backward_input, block);
        if (chunk.has_embedding) {
            if (!chunk.has_head) begin(wte_unit);
            begin(wpe_unit);
            compute(ActionKind::backward, {PartKind::embedding}, {{tokens}, gradient()},
                    {sums(wte_unit), sums(wpe_unit)});
            end(wpe_unit);
            end(wte_unit);
        }
        accumulate_received();
    }

    void backward_block(ActionKind kind, int block) {
        const int unit = block_unit(block);
        const Part part{PartKind::block, block};
        const BufferUse later = kept_for_weights(block);
        const std::vector<BufferUse> kept = with(activations(block), {stream(block)});
        if (kind == ActionKind::backward_input) {
            compute(kind, part, with(kept, {gradient(), whole_parameters(unit)}), {gradient(), later});
            release(unit);
            return;
        }
        begin(unit);
        if (kind == ActionKind::backward) {
            compute(kind, part, with(kept, {gradient(), whole_parameters(unit)}), {gradient(), sums(unit)});
            release(unit);
        } else {
            compute(kind, part, with(kept, {later}), {sums(unit)});
        }
        end(unit);
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

    // ---- where a unit's numbers are

    BufferUse whole_parameters(int unit) const {
        return {parameters, place_of_parameters(sharding_, unit, part_), unit};
    }
    // What the rank's update makes.
    BufferUse own_parameters(int unit) const {
        if (sharding_.keeps_parameters_whole()) return whole_parameters(unit);
        return {parameter_shard, unit, unit};
    }
    BufferUse whole_gradients(int unit) const {
        return {gradients, place_of_gradients(sharding_, micro_batches(), unit, part_), unit};
    }
    // The rank's shard of the sum over ranks and micro-batches.
    BufferUse reduced(int unit) const {
        if (!sharding_.keeps_gradient_shards(micro_batches())) return whole_gradients(unit);
        return {gradient_shard, unit, unit};
    }
    // What the backward pass adds a unit's gradients to: they themselves, or the sums of this micro-batch alone.
    BufferUse sums(int unit) const {
        if (!spec_.rounds_gradients) return whole_gradients(unit);
        return {gradient_sums, place_of_gradient_sums(unit, part_), unit};
    }

    // ---- what is done around a part of the model

    void release(int unit) {
        if (sharding_.keeps_parameters_whole()) return;
        add({.kind = ActionKind::release, .unit = unit, .reads = {}, .writes = {whole_parameters(unit)}});
    }

    bool is_first() const { return micro_batch_ == 0; }
    bool is_last() const { return micro_batch_ + 1 == micro_batches(); }

    // Whether the whole gradients are those of one micro-batch.
    bool starts_afresh() const { return is_first() || sharding_.accumulates_shards(micro_batches()); }

    // Before the first backward of a micro-batch that writes a unit's gradients.
    void begin(int unit) {
        if (!starts_afresh() && !spec_.rounds_gradients) return;
        if (!spec_.rounds_gradients) make_room(unit);
        add({.kind = ActionKind::zero, .unit = unit, .reads = {}, .writes = {sums(unit)}});
    }

    // After the last one.
    void end(int unit) {
        if (spec_.rounds_gradients && starts_afresh()) {
            make_room(unit);
            add({.kind = ActionKind::round,
                 .unit = unit,
                 .reads = {sums(unit)},
                 .writes = {whole_gradients(unit)}});
        } else if (spec_.rounds_gradients) {
            add({.kind = ActionKind::accumulate,
                 .unit = unit,
                 .reads = {sums(unit), whole_gradients(unit)},
                 .writes = {whole_gradients(unit)}});
        }
        accumulate_received();
        if (is_last() || sharding_.accumulates_shards(micro_batches())) {
            sum_replicated(unit);
            reduce(unit);
        }
    }

    // Layernorms see a rank's own tokens with sequence parallelism.
    void sum_replicated(int unit) {
        if (!spec_.tensor.sequence_parallel || unit == wte_unit || unit == wpe_unit) return;
        add({.kind = ActionKind::sum_replicated,
             .unit = unit,
             .reads = {whole_gradients(unit)},
             .writes = {whole_gradients(unit)}});
    }

    // All-reduce is reduce-scatter then all-gather (idea 3).
    void reduce(int unit) {
        const BufferUse whole = whole_gradients(unit), sum = reduced(unit);
        const bool adds = sharding_.accumulates_shards(micro_batches()) && !is_first();
        const BufferUse received = adds ? whole : sum;
        communicate_data(
            {.kind = ActionKind::reduce_scatter, .unit = unit, .reads = {whole}, .writes = {received}});
        if (sharding_.replicas > 1) {
            communicate(
                {.kind = ActionKind::all_reduce, .unit = unit, .reads = {received}, .writes = {received}});
        }
        if (adds) received_ = unit;
        if (!is_last() || is_tied(unit)) return;
        gather_gradients(unit);
    }

    // Where the whole gradients are updated from.
    void gather_gradients(int unit) {
        if (!sharding_.keeps_optimizer_whole()) return;
        accumulate_received();
        communicate_data({.kind = ActionKind::gather_gradients,
                          .unit = unit,
                          .reads = {reduced(unit)},
                          .writes = {whole_gradients(unit)}});
    }

    // The stages of the embedding and of the head have each made a part of wte's gradients. At the end of the list, where
    // neither has anything to do for the other any more.
    void finish_tied() {
        if (!is_tied(wte_unit) || !part_.has_unit(wte_unit)) return;
        communicate({.kind = ActionKind::sum_tied,
                     .unit = wte_unit,
                     .reads = {reduced(wte_unit)},
                     .writes = {reduced(wte_unit)}});
        gather_gradients(wte_unit);
    }

    // The shard that was received last. A part later than its reduction, which the backward pass need not wait for.
    void accumulate_received() {
        if (received_ < 0) return;
        const int unit = std::exchange(received_, -1);
        add({.kind = ActionKind::accumulate_shard,
             .unit = unit,
             .reads = {whole_gradients(unit), reduced(unit)},
             .writes = {reduced(unit)}});
    }

    // Before a unit's whole gradients are written anew: a shard may have been received in that very buffer, which blocks
    // take in turn, where those of a pass that make gradients are not neighbours.
    void make_room(int unit) {
        if (received_ >= 0 && whole_gradients(received_).index == whole_gradients(unit).index)
            accumulate_received();
    }

    // A unit's parameters, on ranks that keep them whole and have updated a shard.
    void publish(int unit) {
        if (sharding_.keeps_optimizer_whole() || !sharding_.keeps_parameters_whole()) return;
        communicate_data({.kind = ActionKind::gather_parameters,
                          .unit = unit,
                          .reads = {own_parameters(unit)},
                          .writes = {whole_parameters(unit)}});
    }

    const StepSpec& spec_;
    Purpose purpose_;
    const Sharding& sharding_;
    const StagePart& part_;
    Step step_;
    ChunkBuffers buffers_;
    // Of the pass that is under way.
    int chunk_ = 0, micro_batch_ = 0;
    ChunkPlace place_;
    int received_ = -1;  // the unit whose shard waits to be added to the sum, if there is one
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
    build.reduce_loss();
    build.norm_and_update();
    return build.finish();
}

Step build_evaluation_step(const StepSpec& spec) {
    StepBuilder build(spec, Purpose::losses);
    build.run(forward_passes(spec, spec.pipeline.micro_batches));
    build.reduce_loss();
    return build.finish();
}

Step build_generation_step(const StepSpec& spec) {
    StepBuilder build(spec, Purpose::logits);
    build.run(forward_passes(spec, 1));
    return build.finish();
}

Step build_publication(const StepSpec& spec) {
    StepBuilder build(spec);
    build.publish_all();
    return build.finish();
}

}  // namespace llmc
