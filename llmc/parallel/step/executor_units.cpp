// Performs the actions on the state of units: gathers and reductions, sums of gradients, their norm, and updates.
#include <optional>
#include <span>

#include "llmc/core/error.h"
#include "llmc/parallel/step/executor.h"
#include "llmc/parallel/step/orthogonal.h"

namespace llmc {

void Executor::gather_parameters(int unit) {
    const UnitBuffers& b = store_.buffers(unit);
    groups_.shards().all_gather(b.parameters, b.parameter_shard);
}

// A micro-batch's reduced shard of gradients: a buffer of its own, or the rank's part of the whole gradients.
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

// Sums in bf16 are rounded at random. An element's random bits do not depend on the shard that it is in. A rank's
// micro-batches are numbered behind those of the ranks before it.
void Executor::accumulate(const Action& action) {
    const UnitBuffers& b = store_.buffers(action.unit);
    const std::int64_t rounds = std::int64_t{step_->micro_batches} * store_.part().unit(action.unit).rounds;
    ops_.run(Accumulate{b.gradients,
                        b.gradient_sums,
                        {input_->gradient_seed, store_.element_number(action.unit, 0)},
                        round_count(groups_.data().rank() * rounds + action.round)});
}

void Executor::accumulate_shard(const Action& action) {
    const UnitBuffers& b = store_.buffers(action.unit);
    const Tensor received = store_.own_shard(b.gradients);
    if (received.dtype == DType::fp32) return ops_.run(Add{b.gradient_shard, b.gradient_shard, received});
    const std::int64_t first =
        store_.element_number(action.unit, store_.shard(action.unit, store_.shard()).begin);
    ops_.run(
        Accumulate{b.gradient_shard, received, {input_->gradient_seed, first}, round_count(action.round)});
}

std::int64_t Executor::round_count(std::int64_t round) const {
    return round << 32 | input_->step.value_or(0);
}

// Sums the loss over the data ranks of the head's stage, then over the stages. Other stages have added
// nothing.
void Executor::reduce_loss() {
    groups_.data().all_reduce(loss_sum());
    if (groups_.has_stages()) groups_.stages().all_reduce(loss_sum());
}

// The bits of numbers that are not negative are ordered as the numbers are, and those of NaN come last.
void Executor::reduce_amax() {
    if (groups_.data().size() == 1 && !groups_.shares_model()) return;
    Tensor bits = seen_amax();
    bits.dtype = DType::int32;
    groups_.data().maximum(bits);
    if (groups_.shares_model()) groups_.model().maximum(bits);
}

// Computes the sums of squares of this rank's own shards. They are gathered later and added in unit and block
// order, so that the norm has the same bits on every rank.
void Executor::square(const Action& action) {
    for (const BufferUse& use : action.reads) {
        const int unit = use.unit;
        const ElementRange own = store_.shard(unit, store_.shard());
        const ElementRange counted =
            ranks_.rank() == 0 ? own : intersection(own, {0, store_.layout(unit).replicated_begin()});
        if (counted.size() == 0) continue;
        const std::int64_t blocks = counted.size() / norm_block_elements;
        ops_.run(GlobalNormSquared{store_.own_shard(squares_of(unit)).flat(0, blocks),
                                   store_.buffers(unit).gradient_shard.flat(0, counted.size())});
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
    ops_.run(Fill{norm_squared(), 0.0F});
    ops_.run(Sum{norm_squared(), activations_.norm_partials});
}

// The sums of squares of a unit's norm blocks. They follow one another in the order of the units.
Tensor Executor::squares_of(int unit) const {
    const auto blocks = [&](int u) {
        return store_.is_frozen(u) ? 0 : store_.elements(u) / norm_block_elements;
    };
    std::int64_t first_block = 0;
    for (int before = 0; before < unit; ++before) first_block += blocks(before);
    return activations_.norm_partials.flat(first_block, blocks(unit));
}

Tensor Executor::updating_norm() {
    if (!updates_on_host_) return norm_squared();
    norm_on_host_ = input_->update->norm_squared;
    return {reinterpret_cast<std::byte*>(&norm_on_host_), DType::fp64, {1}};
}

void Executor::momentum(int unit) {
    const UnitBuffers of_unit = store_.operands(unit);
    for (const UpdateGroup& group : store_.groups(unit)) {
        if (!group.optimizer->others) continue;
        const UnitBuffers b = ParameterStore::operands(of_unit, group);
        const auto& seed = input_->update->state_seed;
        updating_ops().run(Momentum{
            of_unit.directions.flat(group.range.begin, group.range.size()), b.state.front().values,
            b.updated_gradients, updating_norm(), group.segments, input_->update->step,
            seed ? std::optional(StochasticRounding{*seed, store_.first_element(unit) + group.range.begin})
                 : std::nullopt});
    }
}

void Executor::gather_directions(int unit) {
    const Tensor of_rank = store_.directions_of_rank(unit);
    if (!store_.sharding().keeps_optimizer_whole())
        groups_.shards().all_gather(of_rank, store_.own_directions(unit));
    if (ranks_.is_shared())
        ranks_.group().all_gather(store_.directions().directions.flat(0, ranks_.size() * of_rank.elements()),
                                  of_rank);
}

void Executor::orthogonalise(int unit) {
    llmc::orthogonalise(
        ops_, store_.layout(unit), store_.elements(unit), store_.updated(unit),
        [&](const ParamSpec& spec) { return store_.optimizer_of(unit, spec).others != nullptr; },
        store_.directions());
}

void Executor::copy_directions(const Action& action) {
    const Tensor on_host = store_.own_directions_on_host(action.unit),
                 on_device = store_.own_directions(action.unit);
    action.kind == ActionKind::upload_directions ? device_.upload(on_device, on_host.data)
                                                 : device_.begin_download(on_host.data, on_device);
}

void Executor::update(int unit) {
    update(store_.operands(unit), store_.groups(unit), store_.first_element(unit));
}

void Executor::update_piece(const Action& action) {
    const StatePiece& piece = store_.pieces(action.unit)[static_cast<std::size_t>(action.piece)];
    update(store_.in_buffer(action.unit, action.piece, buffer_of(action)), store_.groups(action.unit, piece),
           store_.first_element(action.unit) + piece.begin);
}

void Executor::update(const UnitBuffers& of_unit, std::span<const UpdateGroup> groups,
                      std::int64_t first_element) {
    for (const UpdateGroup& group : groups) {
        UnitBuffers b = ParameterStore::operands(of_unit, group);
        const auto rounding = [&](const std::optional<std::uint64_t>& seed) {
            return seed ? std::optional(StochasticRounding{*seed, first_element + group.range.begin})
                        : std::nullopt;
        };
        UpdateStep step =
            group.optimizer == &store_.optimizer() ? input_->update->step : input_->update->others;
        auto state_seed = input_->update->state_seed;
        // A direction is neither clipped nor scaled, and momentum() has updated the state.
        if (group.optimizer->others) {
            b.updated_gradients = of_unit.directions.flat(group.range.begin, group.range.size());
            b.state = {};
            step.max_grad_norm = 0;
            step.loss_scale = 1;
            state_seed.reset();
        }
        updating_ops().run(OptimizerUpdate{
            group.optimizer->kind, b.updated_parameters, b.master, b.updated_gradients, updating_norm(),
            b.state, group.segments, step, rounding(input_->update->rounding_seed), rounding(state_seed)});
    }
}

}  // namespace llmc
