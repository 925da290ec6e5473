#include "llmc/parallel/build_step.h"

#include <utility>

#include "llmc/model/units.h"

namespace llmc {

namespace {

using enum BufferRole;

class StepBuilder {
  public:
    explicit StepBuilder(const StepSpec& spec)
        : layers_(spec.layers), rounds_gradients_(spec.rounds_gradients) {
        step_.layers = spec.layers;
        step_.data_ranks = spec.data_ranks;
        step_.micro_batches = spec.micro_batches;
    }

    Step finish() {
        order_streams(step_);
        return std::move(step_);
    }

    void load(int micro_batch) {
        add({.kind = ActionKind::load, .micro_batch = micro_batch, .reads = {}, .writes = {{tokens}}});
    }

    void forward_to_head(int micro_batch) {
        compute(ActionKind::forward, {PartKind::embedding}, micro_batch,
                {{tokens}, {parameters, wte_unit}, {parameters, wpe_unit}}, {{residual, 0}});
        for (int block = 0; block < layers_; ++block) {
            compute(ActionKind::forward, {PartKind::block, block}, micro_batch,
                    {{residual, block}, {parameters, block_unit(block)}},
                    {{saved, block}, {residual, block + 1}});
        }
    }

    void head_losses(int micro_batch) {
        compute(ActionKind::forward, {PartKind::head}, micro_batch,
                {{tokens}, {residual, layers_}, {parameters, ln_f()}, {parameters, wte_unit}}, {{loss}});
    }

    // `first` zeroes each unit's gradients before they are first written; `last` reduces them once they are
    // complete.
    void backward(int micro_batch, bool first, bool last) {
        begin(wte_unit, first);
        begin(ln_f(), first);
        compute(ActionKind::backward, {PartKind::head}, micro_batch,
                {{tokens}, {residual, layers_}, {parameters, ln_f()}, {parameters, wte_unit}},
                {{residual_gradient}, sums(ln_f()), sums(wte_unit), {loss}});
        end(ln_f(), first, last);
        for (int block = layers_ - 1; block >= 0; --block) {
            const int unit = block_unit(block);
            begin(unit, first);
            compute(ActionKind::backward, {PartKind::block, block}, micro_batch,
                    {{residual_gradient}, {residual, block}, {saved, block}, {parameters, unit}},
                    {{residual_gradient}, sums(unit)});
            end(unit, first, last);
        }
        begin(wpe_unit, first);
        compute(ActionKind::backward, {PartKind::embedding}, micro_batch, {{tokens}, {residual_gradient}},
                {sums(wte_unit), sums(wpe_unit)});
        end(wpe_unit, first, last);
        end(wte_unit, first, last);
    }

    void norm_and_update() {
        Action square{.kind = ActionKind::square, .reads = {}, .writes = {{squares}}};
        for (int unit = 0; unit <= ln_f(); ++unit) square.reads.push_back({gradients, unit});
        add(std::move(square));
        communicate({.kind = ActionKind::gather_squares, .reads = {{squares}}, .writes = {{squares}}});
        add({.kind = ActionKind::norm, .reads = {{squares}}, .writes = {{norm}}});
        for (int unit = 0; unit <= ln_f(); ++unit) {
            add({.kind = ActionKind::update,
                 .unit = unit,
                 .reads = {{gradients, unit}, {norm}, {optimizer, unit}},
                 .writes = {{optimizer, unit}, {parameters, unit}}});
        }
    }

    void reduce_loss() {
        communicate({.kind = ActionKind::reduce_loss, .reads = {{loss}}, .writes = {{loss}}});
    }

  private:
    int ln_f() const { return ln_f_unit(layers_); }

    void add(Action action) { step_.actions.push_back(std::move(action)); }

    void compute(ActionKind kind, Part part, int micro_batch, std::vector<BufferUse> reads,
                 std::vector<BufferUse> writes) {
        add({.kind = kind,
             .part = part,
             .micro_batch = micro_batch,
             .reads = std::move(reads),
             .writes = std::move(writes)});
    }

    // What the backward pass adds a unit's gradients to: they themselves, or the sums of this micro-batch alone.
    BufferUse sums(int unit) const {
        if (!rounds_gradients_) return {gradients, unit};
        return {gradient_sums, gradient_sums_of(unit, layers_)};
    }

    // Before the first backward of a micro-batch that writes a unit's gradients.
    void begin(int unit, bool first) {
        if (!first && !rounds_gradients_) return;
        add({.kind = ActionKind::zero, .unit = unit, .reads = {}, .writes = {sums(unit)}});
    }

    // After the last one.
    void end(int unit, bool first, bool last) {
        if (rounds_gradients_ && first) {
            add({.kind = ActionKind::round,
                 .unit = unit,
                 .reads = {sums(unit)},
                 .writes = {{gradients, unit}}});
        } else if (rounds_gradients_) {
            add({.kind = ActionKind::accumulate,
                 .unit = unit,
                 .reads = {sums(unit), {gradients, unit}},
                 .writes = {{gradients, unit}}});
        }
        if (last) reduce(unit);
    }

    // Where there is somebody to talk to.
    void communicate(Action action) {
        if (step_.data_ranks == 1) return;
        action.stream = StreamKind::communication;
        add(std::move(action));
    }

    // All-reduce is reduce-scatter then all-gather (idea 3).
    void reduce(int unit) {
        for (const ActionKind kind : {ActionKind::reduce_scatter, ActionKind::all_gather}) {
            communicate(
                {.kind = kind, .unit = unit, .reads = {{gradients, unit}}, .writes = {{gradients, unit}}});
        }
    }

    int layers_;
    bool rounds_gradients_;
    Step step_;
};

}  // namespace

Step build_training_step(const StepSpec& spec) {
    StepBuilder build(spec);
    for (int micro_batch = 0; micro_batch < spec.micro_batches; ++micro_batch) {
        build.load(micro_batch);
        build.forward_to_head(micro_batch);
        build.backward(micro_batch, micro_batch == 0, micro_batch == spec.micro_batches - 1);
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
    return build.finish();
}

}  // namespace llmc
