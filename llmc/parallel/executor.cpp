#include "llmc/parallel/executor.h"

#include <functional>

#include "llmc/model/block.h"
#include "llmc/model/head.h"

namespace llmc {

namespace {

using Flat = Tensor UnitBuffers<Tensor>::*;
constexpr Flat parameters = &UnitBuffers<Tensor>::parameters;
constexpr Flat gradient_sums = &UnitBuffers<Tensor>::gradient_sums;

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

Executor::Executor(const GPTConfig& config, Device& device, Communicator& data, const ParameterStore& store,
                   const ActivationBuffers<Tensor>& activations, bool overlap)
    : config_(config),
      device_(device),
      ops_(device.ops()),
      data_(data),
      store_(store),
      activations_(activations),
      host_inputs_(static_cast<std::size_t>(activations.slots[0].inputs.elements())),
      host_targets_(host_inputs_.size()),
      streams_(overlap) {}

PhaseTimes Executor::run(const Step& step, const StepInput& input) {
    ops_.fill(activations_.loss_sum, 0.0F);
    const auto perform_action = [&](const Action& action) { perform(action, input); };
    // By reference: a std::function of the lambda itself would allocate.
    return streams_.run(step, std::ref(perform_action));
}

void Executor::perform(const Action& action, const StepInput& input) {
    switch (action.kind) {
        case ActionKind::load:
            return load(action, input);
        case ActionKind::zero:
            return ops_.fill(store_.buffers(action.unit).gradient_sums, 0.0F);
        case ActionKind::forward:
            return forward(action, input.sequences);
        case ActionKind::backward:
            return backward(action, input);
        case ActionKind::round:
            return ops_.cast(store_.buffers(action.unit).gradients,
                             store_.buffers(action.unit).gradient_sums);
        case ActionKind::accumulate:
            return ops_.accumulate(store_.buffers(action.unit).gradients,
                                   store_.buffers(action.unit).gradient_sums);
        case ActionKind::reduce_scatter:
            return reduce_scatter(action.unit);
        case ActionKind::all_gather:
            return all_gather(action.unit);
        case ActionKind::reduce_loss:
            return data_.all_reduce(activations_.loss_sum);
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

void Executor::load(const Action& action, const StepInput& input) {
    const auto cut = first(input.sequences);
    const auto& slot = activations_.slots[static_cast<std::size_t>(action.slot)];
    const Tensor inputs = cut(slot.inputs), targets = cut(slot.targets);
    const auto count = static_cast<std::size_t>(inputs.elements());
    input.load(action.micro_batch, std::span(host_inputs_).first(count),
               std::span(host_targets_).first(count));
    device_.upload(inputs, host_inputs_.data());
    device_.upload(targets, host_targets_.data());
}

void Executor::forward(const Action& action, std::int64_t sequences) {
    const auto cut = first(sequences);
    const auto& slot = activations_.slots[static_cast<std::size_t>(action.slot)];
    switch (action.part.kind) {
        case PartKind::embedding:
            return ops_.encoder_forward(cut(slot.residual[0]), cut(slot.inputs),
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
            head_forward(ops_, config_, cut(slot.residual.back()), cut(slot.targets),
                         head_tensors(parameters), head);
            return ops_.sum(activations_.loss_sum, head.losses);
        }
    }
}

void Executor::backward(const Action& action, const StepInput& input) {
    const auto cut = first(input.sequences);
    const auto& slot = activations_.slots[static_cast<std::size_t>(action.slot)];
    const Tensor dx = cut(activations_.residual_gradient);
    switch (action.part.kind) {
        case PartKind::embedding:
            return ops_.encoder_backward(tensor_of(wte_unit, gradient_sums, "weight"),
                                         tensor_of(wpe_unit, gradient_sums, "weight"), dx, cut(slot.inputs));
        case PartKind::block: {
            const auto block = static_cast<std::size_t>(action.part.block);
            return block_backward(ops_, dx, cut(slot.residual[block]),
                                  block_tensors(action.part.block, parameters),
                                  block_tensors(action.part.block, gradient_sums),
                                  slot.blocks[block].transform(cut), activations_.scratch.transform(cut));
        }
        case PartKind::head: {
            const HeadActivations<Tensor> head = head_of(activations_.head, input.sequences);
            head_forward_backward(ops_, config_, dx, cut(slot.residual.back()), cut(slot.targets),
                                  input.loss_scale, head_tensors(parameters), head_tensors(gradient_sums),
                                  head);
            return ops_.sum(activations_.loss_sum, head.losses);
        }
    }
}

void Executor::reduce_scatter(int unit) {
    const Tensor& whole = store_.buffers(unit).gradients;
    data_.reduce_scatter(store_.shard(whole, data_.rank()), whole);
}

void Executor::all_gather(int unit) {
    const Tensor& whole = store_.buffers(unit).gradients;
    data_.all_gather(whole, store_.shard(whole, data_.rank()));
}

// Each rank squares its own shards; the sums are gathered and added in unit and block order, so that the norm
// has the same bits on every rank.
void Executor::square() {
    for (int unit = 0; unit < store_.units(); ++unit) {
        ops_.global_norm_squared(store_.shard(squares_of(unit), data_.rank()),
                                 store_.shard(store_.buffers(unit).gradients, data_.rank()));
    }
}

void Executor::gather_squares() {
    for (int unit = 0; unit < store_.units(); ++unit) {
        const Tensor squares = squares_of(unit);
        data_.all_gather(squares, store_.shard(squares, data_.rank()));
    }
}

void Executor::norm() {
    ops_.fill(activations_.norm_squared, 0.0F);
    ops_.sum(activations_.norm_squared, activations_.norm_partials);
}

// The sums of squares of a unit's blocks; units lie one after the other.
Tensor Executor::squares_of(int unit) const {
    const auto blocks = [&](int u) { return store_.buffers(u).gradients.elements() / norm_block_elements; };
    std::int64_t first_block = 0;
    for (int before = 0; before < unit; ++before) first_block += blocks(before);
    return activations_.norm_partials.flat(first_block, blocks(unit));
}

void Executor::update(int unit, const StepInput& input) {
    const UnitBuffers<Tensor>& b = store_.buffers(unit);
    std::optional<StochasticRounding> rounding;
    if (input.rounding_seed)
        rounding = {.seed = *input.rounding_seed, .first_element = store_.first_element(unit)};
    ops_.adamw(b.parameters, b.master, b.m, b.v, b.gradients, activations_.norm_squared,
               store_.segments(unit), input.adamw, rounding);
}

Tensor Executor::logits(std::int64_t position) {
    return head_logits(ops_, activations_.slots[0].residual.back(), position, head_tensors(parameters),
                       activations_.head);
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

double Executor::read_scalar(const Tensor& scalar) const {
    double value = 0;
    device_.download(&value, scalar);
    return value;
}

}  // namespace llmc
