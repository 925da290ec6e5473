#include "llmc/parallel/executor.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/model/block.h"
#include "llmc/model/embedding.h"
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

}  // namespace

Executor::Executor(const GPTConfig& config, Device& device, const MeshGroups& groups,
                   const ParameterStore& store, const ActivationBuffers<Tensor>& activations,
                   int micro_batches, bool overlap)
    : config_(config),
      device_(device),
      ops_(device.ops()),
      groups_(groups),
      ranks_(groups.tensor_parallel()),
      store_(store),
      activations_(activations),
      feed_(device, activations.tokens, micro_batches),
      tokens_(activations.slots.size()),
      // What tensor-parallel ranks say to each other is said by whoever computes, and a host has one voice.
      streams_(make_step_streams(device, overlap && (device.queues() || !ranks_.is_shared()))) {}

void Executor::run(const Step& step, const StepInput& input) {
    step_ = &step;
    input_ = &input;
    updates_ = false;
    transfers_.resize(std::max(transfers_.size(), step.actions.size()));
    ops_.fill(loss_sum(), 0.0F);
    streams_->run(step, *this);
}

void Executor::rehearse(const Step& step, std::int64_t sequences, const RowRange& rows) {
    const auto zeros = [](int, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        std::ranges::fill(inputs, 0);
        std::ranges::fill(targets, 0);
    };
    const StepInput input{.load = zeros, .sequences = sequences, .rows = rows};
    step_ = &step;
    input_ = &input;
    ranks_ = ranks_.silent();
    for (const Action& action : step.actions) {
        if (action.stream == StreamKind::compute && action.kind != ActionKind::square &&
            action.kind != ActionKind::norm && action.kind != ActionKind::update &&
            action.kind != ActionKind::sum_replicated)
            perform(action);
    }
    ranks_ = groups_.tensor_parallel();
    device_.synchronize();
}

StepResults Executor::results() const {
    StepResults results{};
    static_assert(sizeof results == 2 * sizeof(double));
    device_.download(&results, activations_.results);
    return results;
}

void Executor::perform(const Action& action) {
    switch (action.kind) {
        case ActionKind::load:
            return load(action);
        case ActionKind::zero:
            return ops_.fill(store_.buffers(action.unit).gradient_sums, 0.0F);
        case ActionKind::gather_parameters:
            return gather_parameters(action.unit);
        case ActionKind::release:
            return;  // orders what comes after
        case ActionKind::forward:
            return forward(action);
        case ActionKind::forward_rows:
            return forward_rows(action);
        case ActionKind::recompute:
            return recompute(action);
        case ActionKind::backward:
        case ActionKind::backward_input:
        case ActionKind::backward_weight:
            return backward(action);
        case ActionKind::receive_activation:
        case ActionKind::send_activation:
        case ActionKind::receive_gradient:
        case ActionKind::send_gradient:
            return transfer(action);
        case ActionKind::logits:
            logits_ = head_logits(
                ops_, ranks_,
                rows().view({input_->rows.count, 1, config_.channels}).slice(input_->rows.count - 1, 1),
                head_tensors(parameters), *activations_.head);
            return;
        case ActionKind::round:
            return ops_.cast(store_.buffers(action.unit).gradients,
                             store_.buffers(action.unit).gradient_sums);
        case ActionKind::accumulate:
            return ops_.accumulate(store_.buffers(action.unit).gradients,
                                   store_.buffers(action.unit).gradient_sums);
        case ActionKind::reduce_scatter:
            return reduce_scatter(action);
        case ActionKind::all_reduce:
            return groups_.replicas().all_reduce(received_shard(action.writes.front()));
        case ActionKind::accumulate_shard: {
            const UnitBuffers& b = store_.buffers(action.unit);
            return ops_.add(b.gradient_shard, b.gradient_shard, store_.own_shard(b.gradients));
        }
        case ActionKind::sum_replicated: {
            const UnitLayout& layout = store_.layout(action.unit);
            const Tensor& gradients = store_.buffers(action.unit).gradients;
            const std::int64_t begin = layout.replicated_begin();
            return ranks_.group().all_reduce(gradients.flat(begin, layout.elements() - begin));
        }
        case ActionKind::sum_tied:
            return groups_.tied().all_reduce(store_.buffers(action.unit).gradient_shard);
        case ActionKind::gather_gradients:
            return gather_gradients(action.unit);
        case ActionKind::reduce_loss:
            return reduce_loss();
        case ActionKind::square:
            return square();
        case ActionKind::gather_squares:
            return gather_squares();
        case ActionKind::norm:
            return norm();
        case ActionKind::update:
            if (!std::exchange(updates_, true) && input_->before_update) input_->before_update();
            return update(action.unit);
    }
}

bool Executor::is_done(const Action& action) {
    const int transfer = transfers_[static_cast<std::size_t>(&action - step_->actions.data())];
    return groups_.link(action.kind).pair->is_done(transfer);
}

void Executor::transfer(const Action& action) {
    const StageLink& link = groups_.link(action.kind);
    int& number = transfers_[static_cast<std::size_t>(&action - step_->actions.data())];
    switch (action.kind) {
        case ActionKind::receive_activation:
            number = link.pair->start_recv(activation(action, action.writes), link.peer);
            return;
        case ActionKind::send_activation:
            number = link.pair->start_send(activation(action, action.reads), link.peer);
            return;
        case ActionKind::receive_gradient:
            number = link.pair->start_recv(gradient(action.writes), link.peer);
            return;
        default:
            number = link.pair->start_send(gradient(action.reads), link.peer);
            return;
    }
}

void Executor::load(const Action& action) {
    const auto fill = [&](int micro_batch) {
        return [this, micro_batch](std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
            input_->load(micro_batch, inputs, targets);
        };
    };
    std::optional<BatchPlace> place;
    if (input_->step) place = {*input_->step, action.micro_batch};
    const auto these = fill(action.micro_batch), next = fill(action.micro_batch + 1);
    tokens_[static_cast<std::size_t>(action.slot)] = feed_.load(place, input_->sequences, std::ref(these));
    if (!place) return;
    BatchPlace following{*input_->step, action.micro_batch + 1};
    if (following.micro_batch == step_->micro_batches) following = {*input_->step + 1, 0};
    feed_.bring_ahead(following, input_->sequences, std::ref(next));
}

Tensor Executor::stream(const Action& action, std::span<const BufferUse> uses) const {
    for (const BufferUse& use : uses) {
        if (use.role == BufferRole::chunk_input)
            return activations_.chunk_inputs[static_cast<std::size_t>(use.index)].slice(0, input_->sequences);
        if (use.role == BufferRole::residual)
            return slot_of(action).residual[static_cast<std::size_t>(use.index - 1)].slice(0,
                                                                                           input_->sequences);
    }
    programming_error("an action without the residual stream");
}

Tensor Executor::gradient(std::span<const BufferUse> uses) const {
    for (const BufferUse& use : uses) {
        if (use.role == BufferRole::residual_gradient)
            return activations_.residual_gradients[static_cast<std::size_t>(use.index)].slice(
                0, input_->sequences);
    }
    programming_error("an action without the residual stream's gradient");
}

Tensor Executor::rows() const {
    const std::int64_t n = input_->rows.count, C = config_.channels;
    return activations_.residual_gradients.front().flat(0, n * C).view({1, n, C});
}

Tensor Executor::activation(const Action& action, std::span<const BufferUse> uses) const {
    return uses.front().role == BufferRole::rows ? rows() : stream(action, uses);
}

BlockOutputGradients<Tensor> Executor::output_gradients(std::span<const BufferUse> uses) const {
    const auto found = std::ranges::find(uses, BufferRole::output_gradients, &BufferUse::role);
    check(found != uses.end(), "an action without the gradients of a block's outputs");
    return activations_.output_gradients[static_cast<std::size_t>(found->index)].transform(
        first(input_->sequences));
}

// Its buffers for the sequences of this run; what has rows of its own is not cut.
HeadActivations<Tensor> Executor::head() const {
    HeadActivations<Tensor> head = activations_.head.value();
    const auto cut = first(input_->sequences);
    for (Tensor* tensor : {&head.ln_f, &head.ln_f_mean, &head.ln_f_rstd, &head.dln_f, &head.losses})
        *tensor = cut(*tensor);
    return head;
}

std::size_t Executor::place_in_chunk(const Action& action) const {
    return static_cast<std::size_t>(action.part.block - step_->chunk_of(action).first_block);
}

void Executor::forward(const Action& action) {
    const auto cut = first(input_->sequences);
    switch (action.part.kind) {
        case PartKind::embedding:
            return embedding_forward(ops_, ranks_, stream(action, action.writes), tokens_of(action).inputs,
                                     tensor_of(wte_unit, parameters, "weight"),
                                     tensor_of(wpe_unit, parameters, "weight"),
                                     cut(activations_.scratch.channels));
        case PartKind::block:
            return block_forward(ops_, ranks_, stream(action, action.writes), stream(action, action.reads),
                                 block_tensors(action.part.block, parameters),
                                 slot_of(action).blocks[place_in_chunk(action)].transform(cut),
                                 activations_.scratch.transform(cut));
        case PartKind::head: {
            const HeadActivations<Tensor> buffers = head();
            head_forward(ops_, ranks_, config_, stream(action, action.reads), tokens_of(action).targets,
                         head_tensors(parameters), buffers);
            if (input_->see_losses) input_->see_losses(action.micro_batch, buffers.losses);
            return ops_.sum(loss_sum(), buffers.losses);
        }
    }
}

void Executor::forward_rows(const Action& action) {
    const RowRange& range = input_->rows;
    if (action.part.kind == PartKind::embedding) {
        const Tensor tokens = tokens_of(action).inputs.flat(0, range.count).view({1, range.count});
        return embedding_cached_forward(ops_, ranks_, rows(), range, tokens,
                                        tensor_of(wte_unit, parameters, "weight"),
                                        tensor_of(wpe_unit, parameters, "weight"), activations_.scratch);
    }
    const std::size_t place = place_in_chunk(action);
    std::optional<Tensor> inputs;
    if (step_->recompute.of(action.part.block) == RecomputeKind::block)
        inputs = stream(action, action.writes);
    block_cached_forward(ops_, ranks_, rows(), range, block_tensors(action.part.block, parameters), inputs,
                         slot_of(action).blocks[place], activations_.scratch);
}

void Executor::recompute(const Action& action) {
    const auto cut = first(input_->sequences);
    const std::size_t place = place_in_chunk(action);
    block_recompute(ops_, ranks_, step_->recompute.of(action.part.block), stream(action, action.reads),
                    block_tensors(action.part.block, parameters),
                    slot_of(action).blocks[place].transform(cut), activations_.scratch.transform(cut));
}

void Executor::backward(const Action& action) {
    const auto cut = first(input_->sequences);
    switch (action.part.kind) {
        case PartKind::embedding:
            return embedding_backward(ops_, ranks_, tensor_of(wte_unit, gradient_sums, "weight"),
                                      tensor_of(wpe_unit, gradient_sums, "weight"), gradient(action.reads),
                                      tokens_of(action).inputs, activations_.scratch.transform(cut).gathered);
        case PartKind::block:
            return backward_block(action);
        case PartKind::head: {
            const HeadActivations<Tensor> buffers = head();
            head_forward_backward(ops_, ranks_, config_, gradient(action.writes),
                                  stream(action, action.reads), tokens_of(action).targets, input_->loss_scale,
                                  head_tensors(parameters), head_tensors(gradient_sums), buffers);
            return ops_.sum(loss_sum(), buffers.losses);
        }
    }
}

void Executor::backward_block(const Action& action) {
    const auto cut = first(input_->sequences);
    const std::size_t place = place_in_chunk(action);
    const Tensor x = stream(action, action.reads);
    const BlockTensors p = block_tensors(action.part.block, parameters);
    const BlockActivations<Tensor> saved = slot_of(action).blocks[place].transform(cut);
    const BlockScratch<Tensor> scratch = activations_.scratch.transform(cut);
    const auto gradients = [&] { return block_tensors(action.part.block, gradient_sums); };
    switch (action.kind) {
        case ActionKind::backward:
            return block_backward(ops_, ranks_, gradient(action.writes), x, p, gradients(), saved, scratch);
        case ActionKind::backward_input:
            return block_backward_input(ops_, ranks_, gradient(action.writes), x, p,
                                        output_gradients(action.writes), saved, scratch);
        default:
            return block_backward_weight(ops_, ranks_, x, p, gradients(), output_gradients(action.reads),
                                         saved, scratch);
    }
}

void Executor::gather_parameters(int unit) {
    const UnitBuffers& b = store_.buffers(unit);
    groups_.shards().all_gather(b.parameters, b.parameter_shard);
}

// Where a micro-batch's shard of gradients is: apart, or the rank's own part of the whole ones.
Tensor Executor::received_shard(const BufferUse& use) const {
    const UnitBuffers& b = store_.buffers(use.unit);
    return use.role == BufferRole::gradient_shard ? b.gradient_shard : store_.own_shard(b.gradients);
}

void Executor::reduce_scatter(const Action& action) {
    groups_.shards().reduce_scatter(received_shard(action.writes.front()),
                                    store_.buffers(action.unit).gradients);
}

void Executor::gather_gradients(int unit) {
    const UnitBuffers& b = store_.buffers(unit);
    groups_.shards().all_gather(b.gradients, b.gradient_shard);
}

// Of the data ranks of the head's stage; others have added nothing.
void Executor::reduce_loss() {
    groups_.data().all_reduce(loss_sum());
    if (groups_.has_stages()) groups_.stages().all_reduce(loss_sum());
}

// Each rank squares its own shards; the sums are gathered and added in unit and block order, so that the norm
// has the same bits on every rank.
void Executor::square() {
    // Those of other stages, and what another tensor-parallel rank counts, are added to none.
    if (groups_.shares_model()) ops_.fill(activations_.norm_partials, 0.0F);
    for (int unit = 0; unit < store_.units(); ++unit) {
        if (!store_.part().counts_unit(unit)) continue;
        const ElementRange own = store_.shard(unit, store_.shard());
        const ElementRange counted =
            ranks_.rank() == 0 ? own : intersection(own, {0, store_.layout(unit).replicated_begin()});
        if (counted.size() == 0) continue;
        const std::int64_t blocks = counted.size() / norm_block_elements;
        ops_.global_norm_squared(store_.own_shard(squares_of(unit)).flat(0, blocks),
                                 store_.buffers(unit).gradient_shard.flat(0, counted.size()));
    }
}

void Executor::gather_squares() {
    for (int unit = 0; unit < store_.units(); ++unit) {
        if (!store_.part().counts_unit(unit)) continue;
        const Tensor squares = squares_of(unit);
        groups_.shards().all_gather(squares, store_.own_shard(squares));
    }
    if (groups_.shares_model()) groups_.model().all_reduce(activations_.norm_partials);
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

void Executor::update(int unit) {
    const UnitBuffers& b = store_.buffers(unit);
    std::optional<StochasticRounding> rounding;
    if (input_->rounding_seed)
        rounding = {.seed = *input_->rounding_seed, .first_element = store_.first_element(unit)};
    ops_.adamw(b.updated_parameters, b.master, b.m, b.v, b.updated_gradients, norm_squared(),
               store_.segments(unit), input_->adamw, rounding);
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
