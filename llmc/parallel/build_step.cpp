#include "llmc/parallel/build_step.h"

#include <utility>

#include "llmc/model/units.h"
#include "llmc/parallel/insert_recomputes.h"
#include "llmc/parallel/prefetch.h"

namespace llmc {

namespace {

using enum BufferRole;

class StepBuilder {
  public:
    explicit StepBuilder(const StepSpec& spec) : spec_(spec), sharding_(spec.sharding) {
        step_.layers = spec.layers;
        step_.sharding = spec.sharding;
        step_.recompute = spec.recompute;
        step_.micro_batches = spec.micro_batches;
    }

    Step finish() {
        insert_recomputes(step_);
        insert_gathers(step_);
        order_streams(step_);
        return std::move(step_);
    }

    void load(int micro_batch) {
        add({.kind = ActionKind::load, .micro_batch = micro_batch, .reads = {}, .writes = {{tokens}}});
    }

    void forward_to_head(int micro_batch) {
        compute(ActionKind::forward, {PartKind::embedding}, micro_batch,
                {{tokens}, whole_parameters(wte_unit), whole_parameters(wpe_unit)}, {{residual, 0}});
        release(wpe_unit);
        for (int block = 0; block < spec_.layers; ++block) {
            const int unit = block_unit(block);
            std::vector<BufferUse> writes = activations(block);
            writes.push_back({residual, block + 1});
            compute(ActionKind::forward, {PartKind::block, block}, micro_batch,
                    {{residual, block}, whole_parameters(unit)}, std::move(writes));
            // The backward pass begins with the last block.
            if (sharding_.reshards_after_forward && block + 1 < spec_.layers) release(unit);
        }
    }

    void head_losses(int micro_batch) {
        compute(ActionKind::forward, {PartKind::head}, micro_batch,
                {{tokens}, {residual, spec_.layers}, whole_parameters(ln_f()), whole_parameters(wte_unit)},
                {{loss}});
    }

    void head_logits(int micro_batch) {
        compute(ActionKind::logits, {PartKind::head}, micro_batch,
                {{residual, spec_.layers}, whole_parameters(ln_f()), whole_parameters(wte_unit)}, {{logits}});
    }

    void backward(int micro_batch) {
        const bool first = micro_batch == 0, last = micro_batch + 1 == spec_.micro_batches;
        begin(wte_unit, first);
        begin(ln_f(), first);
        compute(ActionKind::backward, {PartKind::head}, micro_batch,
                {{tokens}, {residual, spec_.layers}, whole_parameters(ln_f()), whole_parameters(wte_unit)},
                {{residual_gradient}, sums(ln_f()), sums(wte_unit), {loss}});
        release(wte_unit);
        release(ln_f());
        end(ln_f(), first, last);
        for (int block = spec_.layers - 1; block >= 0; --block) {
            const int unit = block_unit(block);
            begin(unit, first);
            std::vector<BufferUse> reads = activations(block);
            reads.insert(reads.begin(), {{residual_gradient}, {residual, block}});
            reads.push_back(whole_parameters(unit));
            compute(ActionKind::backward, {PartKind::block, block}, micro_batch, std::move(reads),
                    {{residual_gradient}, sums(unit)});
            release(unit);
            end(unit, first, last);
        }
        begin(wpe_unit, first);
        compute(ActionKind::backward, {PartKind::embedding}, micro_batch, {{tokens}, {residual_gradient}},
                {sums(wte_unit), sums(wpe_unit)});
        end(wpe_unit, first, last);
        end(wte_unit, first, last);
        accumulate_received();
    }

    void norm_and_update() {
        Action square{.kind = ActionKind::square, .reads = {}, .writes = {{squares}}};
        for (int unit = 0; unit <= ln_f(); ++unit) square.reads.push_back(reduced(unit));
        add(std::move(square));
        communicate({.kind = ActionKind::gather_squares, .reads = {{squares}}, .writes = {{squares}}});
        add({.kind = ActionKind::norm, .reads = {{squares}}, .writes = {{norm}}});
        for (int unit = 0; unit <= ln_f(); ++unit) {
            const bool whole = sharding_.keeps_optimizer_whole();
            add({.kind = ActionKind::update,
                 .unit = unit,
                 .reads = {whole ? whole_gradients(unit) : reduced(unit), {norm}, {optimizer, unit, unit}},
                 .writes = {{optimizer, unit, unit}, own_parameters(unit)}});
            publish(unit);
        }
    }

    // A unit's parameters, on ranks that keep them whole and have updated a shard.
    void publish(int unit) {
        if (sharding_.keeps_optimizer_whole() || !sharding_.keeps_parameters_whole()) return;
        communicate({.kind = ActionKind::gather_parameters,
                     .unit = unit,
                     .reads = {own_parameters(unit)},
                     .writes = {whole_parameters(unit)}});
    }

    void reduce_loss() {
        communicate({.kind = ActionKind::reduce_loss, .reads = {{loss}}, .writes = {{loss}}});
    }

  private:
    int ln_f() const { return ln_f_unit(spec_.layers); }

    void add(Action action) { step_.actions.push_back(std::move(action)); }

    void compute(ActionKind kind, Part part, int micro_batch, std::vector<BufferUse> reads,
                 std::vector<BufferUse> writes) {
        add({.kind = kind,
             .part = part,
             .micro_batch = micro_batch,
             .reads = std::move(reads),
             .writes = std::move(writes)});
    }

    // Where there is somebody to talk to.
    void communicate(Action action) {
        if (sharding_.ranks() == 1) return;
        action.stream = StreamKind::communication;
        add(std::move(action));
    }

    // What a block's backward needs of its forward.
    std::vector<BufferUse> activations(int block) const {
        const RecomputeKind kind = spec_.recompute.of(block);
        std::vector<BufferUse> uses;
        if (kind != RecomputeKind::block) uses.push_back({saved, block});
        if (kind != RecomputeKind::none) uses.push_back({recomputed, 0, block_unit(block)});
        return uses;
    }

    // ---- where a unit's numbers are

    BufferUse whole_parameters(int unit) const {
        return {parameters, place_of_parameters(sharding_, unit, spec_.layers), unit};
    }
    // What the rank's update makes.
    BufferUse own_parameters(int unit) const {
        if (sharding_.keeps_parameters_whole()) return whole_parameters(unit);
        return {parameter_shard, unit, unit};
    }
    BufferUse whole_gradients(int unit) const {
        return {gradients, place_of_gradients(sharding_, spec_.micro_batches, unit, spec_.layers), unit};
    }
    // The rank's shard of the sum over ranks and micro-batches.
    BufferUse reduced(int unit) const {
        if (!sharding_.keeps_gradient_shards(spec_.micro_batches)) return whole_gradients(unit);
        return {gradient_shard, unit, unit};
    }
    // What the backward pass adds a unit's gradients to: they themselves, or the sums of this micro-batch alone.
    BufferUse sums(int unit) const {
        if (!spec_.rounds_gradients) return whole_gradients(unit);
        return {gradient_sums, place_of_gradient_sums(unit, spec_.layers), unit};
    }

    // ---- what is done around a part of the model

    void release(int unit) {
        if (sharding_.keeps_parameters_whole()) return;
        add({.kind = ActionKind::release, .unit = unit, .reads = {}, .writes = {whole_parameters(unit)}});
    }

    // Whether the whole gradients are those of one micro-batch.
    bool starts_afresh(bool first_micro_batch) const {
        return first_micro_batch || sharding_.accumulates_shards(spec_.micro_batches);
    }

    // Before the first backward of a micro-batch that writes a unit's gradients.
    void begin(int unit, bool first) {
        if (!starts_afresh(first) && !spec_.rounds_gradients) return;
        add({.kind = ActionKind::zero, .unit = unit, .reads = {}, .writes = {sums(unit)}});
    }

    // After the last one.
    void end(int unit, bool first, bool last) {
        if (spec_.rounds_gradients && starts_afresh(first)) {
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
        if (last || sharding_.accumulates_shards(spec_.micro_batches)) reduce(unit, first, last);
    }

    // All-reduce is reduce-scatter then all-gather (idea 3).
    void reduce(int unit, bool first, bool last) {
        const BufferUse whole = whole_gradients(unit), sum = reduced(unit);
        const bool adds = sharding_.accumulates_shards(spec_.micro_batches) && !first;
        const BufferUse received = adds ? whole : sum;
        communicate(
            {.kind = ActionKind::reduce_scatter, .unit = unit, .reads = {whole}, .writes = {received}});
        if (sharding_.replicas > 1) {
            communicate(
                {.kind = ActionKind::all_reduce, .unit = unit, .reads = {received}, .writes = {received}});
        }
        if (adds) received_ = unit;
        if (!last || !sharding_.keeps_optimizer_whole()) return;
        accumulate_received();
        communicate({.kind = ActionKind::gather_gradients, .unit = unit, .reads = {sum}, .writes = {whole}});
    }

    // The shard that was received last. A part later than its reduction, which the backward pass need not wait for.
    void accumulate_received() {
        if (received_ < 0) return;
        add({.kind = ActionKind::accumulate_shard,
             .unit = received_,
             .reads = {whole_gradients(received_), reduced(received_)},
             .writes = {reduced(received_)}});
        received_ = -1;
    }

    StepSpec spec_;
    const Sharding& sharding_ = spec_.sharding;
    Step step_;
    int received_ = -1;  // the unit whose shard is to be added
};

}  // namespace

Step build_training_step(const StepSpec& spec) {
    StepBuilder build(spec);
    for (int micro_batch = 0; micro_batch < spec.micro_batches; ++micro_batch) {
        build.load(micro_batch);
        build.forward_to_head(micro_batch);
        build.backward(micro_batch);
    }
    build.reduce_loss();
    build.norm_and_update();
    return build.finish();
}

Step build_evaluation_step(const StepSpec& spec) {
    StepBuilder build(spec);
    build.load(0);
    build.forward_to_head(0);
    build.head_losses(0);
    build.reduce_loss();
    return build.finish();
}

Step build_generation_step(const StepSpec& spec) {
    StepBuilder build(spec);
    build.load(0);
    build.forward_to_head(0);
    build.head_logits(0);
    return build.finish();
}

Step build_publication(const StepSpec& spec) {
    StepBuilder build(spec);
    for (int unit = 0; unit <= ln_f_unit(spec.layers); ++unit) build.publish(unit);
    return build.finish();
}

}  // namespace llmc
