#include "llmc/parallel/executor.h"

#include <algorithm>
#include <functional>

#include "llmc/model/block.h"
#include "llmc/model/head.h"

namespace llmc {

namespace {

using Flat = Tensor UnitBuffers::*;
constexpr Flat parameters = &UnitBuffers::parameters;
constexpr Flat gradient_sums = &UnitBuffers::gradient_sums;

// The first `sequences` of a buffer that begins with the batch.
auto first(std::int64_t sequences) {
    return [sequences](const Tensor& tensor) { return tensor.slice(0, sequences); };
}

// The head's buffers for fewer sequences; the logits are rows and are not cut.
HeadActivations<Tensor> head_of(const HeadActivations<Tensor>& head, std::int64_t sequences) {
    const auto cut = first(sequences);
    return {.ln_f = cut(head.ln_f),
            .ln_f_mean = cut(head.ln_f_mean),
            .ln_f_rstd = cut(head.ln_f_rstd),
            .dln_f = cut(head.dln_f),
            .logits = head.logits,
            .losses = cut(head.losses)};
}

}  // namespace

Executor::Executor(const GPTConfig& config, Device& device, const DataGroups& data,
                   const ParameterStore& store, const ActivationBuffers<Tensor>& activations,
                   int micro_batches, bool overlap)
    : config_(config),
      device_(device),
      ops_(device.ops()),
      data_(data),
      store_(store),
      activations_(activations),
      feed_(device, activations.tokens, micro_batches),
      tokens_(activations.slots.size()),
      streams_(make_step_streams(device, overlap)) {}

void Executor::run(const Step& step, const StepInput& input) {
    ops_.fill(loss_sum(), 0.0F);
    const auto perform_action = [&](const Action& action) { perform(step, action, input); };
    // By reference: a std::function of the lambda itself would allocate.
    streams_->run(step, std::ref(perform_action));
}

void Executor::rehearse(const Step& step, std::int64_t sequences) {
    const auto zeros = [](int, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        std::ranges::fill(inputs, 0);
        std::ranges::fill(targets, 0);
    };
    const StepInput input{.load = zeros, .sequences = sequences};
    for (const Action& action : step.actions) {
        if (action.stream == StreamKind::compute && action.kind != ActionKind::square &&
            action.kind != ActionKind::norm && action.kind != ActionKind::update)
            perform(step, action, input);
    }
    device_.synchronize();
}

StepResults Executor::results() const {
    StepResults results{};
    static_assert(sizeof results == 2 * sizeof(double));
    device_.download(&results, activations_.results);
    return results;
}

void Executor::perform(const Step& step, const Action& action, const StepInput& input) {
    switch (action.kind) {
        case ActionKind::load:
            return load(step, action, input);
        case ActionKind::zero:
            return ops_.fill(store_.buffers(action.unit).gradient_sums, 0.0F);
        case ActionKind::gather_parameters:
            return gather_parameters(action.unit);
        case ActionKind::release:
            return;  // orders what comes after
        case ActionKind::forward:
            return forward(action, input.sequences);
        case ActionKind::recompute:
            return recompute(action, step.recompute, input.sequences);
        case ActionKind::backward:
            return backward(action, input);
        case ActionKind::logits: {
            const auto& slot = activations_.slots[static_cast<std::size_t>(action.slot)];
            logits_ = head_logits(ops_, slot.residual.back(), input.position, head_tensors(parameters),
                                  activations_.head);
            return;
        }
        case ActionKind::round:
            return ops_.cast(store_.buffers(action.unit).gradients,
                             store_.buffers(action.unit).gradient_sums);
        case ActionKind::accumulate:
            return ops_.accumulate(store_.buffers(action.unit).gradients,
                                   store_.buffers(action.unit).gradient_sums);
        case ActionKind::reduce_scatter:
            return reduce_scatter(action);
        case ActionKind::all_reduce:
            return data_.replicas().all_reduce(received_shard(action.writes.front()));
        case ActionKind::accumulate_shard: {
            const UnitBuffers& b = store_.buffers(action.unit);
            return ops_.add(b.gradient_shard, b.gradient_shard, store_.own_shard(b.gradients));
        }
        case ActionKind::gather_gradients:
            return gather_gradients(action.unit);
        case ActionKind::reduce_loss:
            return data_.all().all_reduce(loss_sum());
        case ActionKind::square:
            return square();
        case ActionKind::gather_squares:
            return gather_squares();
        case ActionKind::norm:
            return norm();
        case ActionKind::update:
            return update(action.unit, input);
    }
}

void Executor::load(const Step& step, const Action& action, const StepInput& input) {
    const auto fill = [&](int micro_batch) {
        return [&input, micro_batch](std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
            input.load(micro_batch, inputs, targets);
        };
    };
    std::optional<BatchPlace> place;
    if (input.step) place = {*input.step, action.micro_batch};
    const auto these = fill(action.micro_batch), next = fill(action.micro_batch + 1);
    tokens_[static_cast<std::size_t>(action.slot)] = feed_.load(place, input.sequences, std::ref(these));
    if (!place) return;
    BatchPlace following{*input.step, action.micro_batch + 1};
    if (following.micro_batch == step.micro_batches) following = {*input.step + 1, 0};
    feed_.bring_ahead(following, input.sequences, std::ref(next));
}

void Executor::forward(const Action& action, std::int64_t sequences) {
    const auto cut = first(sequences);
    const auto& slot = activations_.slots[static_cast<std::size_t>(action.slot)];
    switch (action.part.kind) {
        case PartKind::embedding:
            return ops_.encoder_forward(cut(slot.residual[0]), tokens_of(action).inputs,
                                        tensor_of(wte_unit, parameters, "weight"),
                                        tensor_of(wpe_unit, parameters, "weight"));
        case PartKind::block: {
            const auto block = static_cast<std::size_t>(action.part.block);
            return block_forward(ops_, cut(slot.residual[block + 1]), cut(slot.residual[block]),
                                 block_tensors(action.part.block, parameters),
                                 slot.blocks[block].transform(cut), activations_.scratch.transform(cut));
        }
        case PartKind::head: {
            const HeadActivations<Tensor> head = head_of(activations_.head, sequences);
            head_forward(ops_, config_, cut(slot.residual.back()), tokens_of(action).targets,
                         head_tensors(parameters), head);
            return ops_.sum(loss_sum(), head.losses);
        }
    }
}

void Executor::recompute(const Action& action, const Recompute& what, std::int64_t sequences) {
    const auto cut = first(sequences);
    const auto& slot = activations_.slots[static_cast<std::size_t>(action.slot)];
    const auto block = static_cast<std::size_t>(action.part.block);
    block_recompute(ops_, what.of(action.part.block), cut(slot.residual[block]),
                    block_tensors(action.part.block, parameters), slot.blocks[block].transform(cut),
                    activations_.scratch.transform(cut));
}

void Executor::backward(const Action& action, const StepInput& input) {
    const auto cut = first(input.sequences);
    const auto& slot = activations_.slots[static_cast<std::size_t>(action.slot)];
    const Tensor dx = cut(activations_.residual_gradient);
    switch (action.part.kind) {
        case PartKind::embedding:
            return ops_.encoder_backward(tensor_of(wte_unit, gradient_sums, "weight"),
                                         tensor_of(wpe_unit, gradient_sums, "weight"), dx,
                                         tokens_of(action).inputs);
        case PartKind::block: {
            const auto block = static_cast<std::size_t>(action.part.block);
            return block_backward(ops_, dx, cut(slot.residual[block]),
                                  block_tensors(action.part.block, parameters),
                                  block_tensors(action.part.block, gradient_sums),
                                  slot.blocks[block].transform(cut), activations_.scratch.transform(cut));
        }
        case PartKind::head: {
            const HeadActivations<Tensor> head = head_of(activations_.head, input.sequences);
            head_forward_backward(ops_, config_, dx, cut(slot.residual.back()), tokens_of(action).targets,
                                  input.loss_scale, head_tensors(parameters), head_tensors(gradient_sums),
                                  head);
            return ops_.sum(loss_sum(), head.losses);
        }
    }
}

void Executor::gather_parameters(int unit) {
    const UnitBuffers& b = store_.buffers(unit);
    data_.shards().all_gather(b.parameters, b.parameter_shard);
}

// Where a micro-batch's shard of gradients is: apart, or the rank's own part of the whole ones.
Tensor Executor::received_shard(const BufferUse& use) const {
    const UnitBuffers& b = store_.buffers(use.unit);
    return use.role == BufferRole::gradient_shard ? b.gradient_shard : store_.own_shard(b.gradients);
}

void Executor::reduce_scatter(const Action& action) {
    data_.shards().reduce_scatter(received_shard(action.writes.front()),
                                  store_.buffers(action.unit).gradients);
}

void Executor::gather_gradients(int unit) {
    const UnitBuffers& b = store_.buffers(unit);
    data_.shards().all_gather(b.gradients, b.gradient_shard);
}

// Each rank squares its own shards; the sums are gathered and added in unit and block order, so that the norm
// has the same bits on every rank.
void Executor::square() {
    for (int unit = 0; unit < store_.units(); ++unit) {
        ops_.global_norm_squared(store_.own_shard(squares_of(unit)), store_.buffers(unit).gradient_shard);
    }
}

void Executor::gather_squares() {
    for (int unit = 0; unit < store_.units(); ++unit) {
        const Tensor squares = squares_of(unit);
        data_.shards().all_gather(squares, store_.own_shard(squares));
    }
}

void Executor::norm() {
    ops_.fill(norm_squared(), 0.0F);
    ops_.sum(norm_squared(), activations_.norm_partials);
}

// The sums of squares of a unit's blocks; units lie one after the other.
Tensor Executor::squares_of(int unit) const {
    const auto blocks = [&](int u) { return store_.elements(u) / norm_block_elements; };
    std::int64_t first_block = 0;
    for (int before = 0; before < unit; ++before) first_block += blocks(before);
    return activations_.norm_partials.flat(first_block, blocks(unit));
}

void Executor::update(int unit, const StepInput& input) {
    const UnitBuffers& b = store_.buffers(unit);
    std::optional<StochasticRounding> rounding;
    if (input.rounding_seed)
        rounding = {.seed = *input.rounding_seed, .first_element = store_.first_element(unit)};
    ops_.adamw(b.updated_parameters, b.master, b.m, b.v, b.updated_gradients, norm_squared(),
               store_.segments(unit), input.adamw, rounding);
}

Tensor Executor::tensor_of(int unit, Flat flat, std::string_view param) const {
    return store_.layout(unit).view(store_.buffers(unit).*flat, param);
}

BlockTensors Executor::block_tensors(int block, Flat flat) const {
    const int unit = block_unit(block);
    return {store_.layout(unit), store_.buffers(unit).*flat};
}

HeadTensors Executor::head_tensors(Flat flat) const {
    const int ln_f = ln_f_unit(static_cast<int>(config_.layers));
    return {.ln_f_weight = tensor_of(ln_f, flat, "weight"),
            .ln_f_bias = tensor_of(ln_f, flat, "bias"),
            .wte = tensor_of(wte_unit, flat, "weight")};
}

}  // namespace llmc
