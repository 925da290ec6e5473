// Performs the actions of a list: passes of the model's parts, and transfers. executor_units.cpp performs those on the
// state of units.
#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "llmc/parallel/step/executor.h"

namespace llmc {

bool Executor::is_left_out(const Action& action) const { return action.is_of_update && !input_->update; }

TransferTest Executor::start(const Action& action) {
    if (is_left_out(action)) return {};
    if (is_on_disk(action)) return transfer_from_or_to_disk(action);
    if (is_between_stages(action.kind)) return transfer(action);
    perform(action);
    return {};
}

void Executor::perform(const Action& action) {
    switch (action.kind) {
        case ActionKind::load:
            return load(action);
        case ActionKind::zero:
            return ops_.run(Fill{store_.buffers(action.unit).gradient_sums, 0.0F});
        case ActionKind::gather_parameters:
            return gather_parameters(action.unit);
        case ActionKind::release:
            return;  // only orders other actions
        case ActionKind::forward:
            return run_part(action, lists_of(action).forward);
        case ActionKind::forward_rows:
        case ActionKind::logits:
            return forward_rows(action);
        case ActionKind::recompute:
            return run_part(action, lists_of(action).recompute_of(step_->recompute.kind));
        case ActionKind::backward:
            return run_part(action, lists_of(action).backward);
        case ActionKind::backward_input:
            return run_part(action, lists_of(action).backward_input);
        case ActionKind::backward_weight:
            return run_part(action, lists_of(action).backward_weight);
        case ActionKind::round:
            return ops_.run(
                Cast{store_.buffers(action.unit).gradients, store_.buffers(action.unit).gradient_sums});
        case ActionKind::accumulate:
            return accumulate(action);
        case ActionKind::reduce_scatter:
            return reduce_scatter(action);
        case ActionKind::all_reduce:
            return groups_.replicas().all_reduce(received_shard(action.writes.front()));
        case ActionKind::accumulate_shard:
            return accumulate_shard(action);
        case ActionKind::sum_replicated: {
            const UnitLayout& layout = store_.layout(action.unit);
            const Tensor& gradients = store_.buffers(action.unit).gradients;
            const std::int64_t begin = layout.replicated_begin();
            return ranks_.group().all_reduce(gradients.flat(begin, layout.elements() - begin));
        }
        case ActionKind::sum_tied:
            return groups_.tied(action.unit).all_reduce(store_.buffers(action.unit).gradient_shard);
        case ActionKind::gather_gradients:
            return gather_gradients(action.unit);
        case ActionKind::reduce_loss:
            return reduce_loss();
        case ActionKind::reduce_amax:
            return reduce_amax();
        case ActionKind::square:
            return square(action);
        case ActionKind::gather_squares:
            return gather_squares();
        case ActionKind::norm:
            return norm();
        case ActionKind::momentum:
            return momentum(action.unit);
        case ActionKind::upload_directions:
        case ActionKind::download_directions:
            return copy_directions(action);
        case ActionKind::gather_directions:
            return gather_directions(action.unit);
        case ActionKind::orthogonalise:
            return orthogonalise(action.unit);
        case ActionKind::update:
            return action.piece < 0 ? update(action.unit) : update_piece(action);
        case ActionKind::upload_parameters:
        case ActionKind::download_parameters:
        case ActionKind::upload_gradients:
        case ActionKind::download_gradients:
            return copy_between_host_and_device(action);
        case ActionKind::receive_activation:
        case ActionKind::send_activation:
        case ActionKind::receive_gradient:
        case ActionKind::send_gradient:
        case ActionKind::read_state:
        case ActionKind::write_state:
        case ActionKind::read_parameters:
        case ActionKind::write_parameters:
            break;  // start() begins them
    }
}

// The buffer in which an action on a piece of optimizer state has it.
int Executor::buffer_of(const Action& action) {
    const auto& uses = action.kind == ActionKind::read_state ? action.writes : action.reads;
    return std::ranges::find(uses, BufferRole::state_piece, &BufferUse::role)->index;
}

TransferTest Executor::transfer_from_or_to_disk(const Action& action) {
    const int unit = action.unit, piece = action.piece;
    const int number =
        action.kind == ActionKind::read_state        ? store_.begin_read(unit, piece, buffer_of(action))
        : action.kind == ActionKind::write_state     ? store_.begin_write(unit, piece, buffer_of(action))
        : action.kind == ActionKind::read_parameters ? store_.begin_read_parameters(unit)
                                                     : store_.begin_write_parameters(unit);
    return [&file = store_.file(), number] { return file.is_done(number); };
}

// Where parameters or gradients of a unit are on the device.
Tensor Executor::on_device(const BufferUse& use) const {
    const UnitBuffers& b = store_.buffers(use.unit);
    switch (use.role) {
        case BufferRole::parameters:
            return b.parameters;
        case BufferRole::parameter_shard:
            return b.parameter_shard;
        case BufferRole::gradient_shard:
            return b.gradient_shard;
        default:
            return b.gradients;
    }
}

void Executor::copy_between_host_and_device(const Action& action) {
    const bool is_upload = action.reads.front().tier == Tier::host;
    const UnitBuffers& b = store_.buffers(action.unit);
    const bool of_parameters = moves_parameters(action.kind);
    const Tensor& host = of_parameters ? b.host_parameters : b.host_gradients;
    Tensor device = on_device((is_upload ? action.writes : action.reads).front());
    // A rank's share lies in the whole.
    if (device.elements() != host.elements()) device = store_.own_shard(device);
    is_upload ? device_.upload(device, host.data) : device_.begin_download(host.data, device);
}

TransferTest Executor::transfer(const Action& action) {
    const auto& [pair, peer] = groups_.link(action.kind);
    const int number =
        action.kind == ActionKind::receive_activation ? pair->start_recv(stream(action, action.writes), peer)
        : action.kind == ActionKind::send_activation  ? pair->start_send(stream(action, action.reads), peer)
        : action.kind == ActionKind::receive_gradient ? pair->start_recv(gradient(action.writes), peer)
                                                      : pair->start_send(gradient(action.reads), peer);
    return [&ranks = *pair, number] { return ranks.is_done(number); };
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
    tokens_[static_cast<std::size_t>(action.micro_batch)] =
        feed_.load(place, input_->sequences, std::ref(these));
    if (!place) return;
    BatchPlace following{*input_->step, action.micro_batch + 1};
    if (following.micro_batch == step_->micro_batches) following = {*input_->step + 1, 0};
    feed_.bring_ahead(following, input_->sequences, std::ref(next));
}

Tensor Executor::stream(const Action& action, std::span<const BufferUse> uses) const {
    for (const BufferUse& use : uses) {
        const auto index = static_cast<std::size_t>(use.index);
        if (use.role == BufferRole::rows) return rows(use.index);
        if (use.role == BufferRole::chunk_input)
            return activations_.chunk_inputs[index].slice(0, input_->sequences);
        if (use.role == BufferRole::residual)
            return activations_.slots[static_cast<std::size_t>(action.slot)].residual[index - 1].slice(
                0, input_->sequences);
    }
    return {};
}

Tensor Executor::gradient(std::span<const BufferUse> uses) const {
    for (const BufferUse& use : uses) {
        if (use.role == BufferRole::residual_gradient)
            return activations_.residual_gradients[static_cast<std::size_t>(use.index)].slice(
                0, input_->sequences);
    }
    return {};
}

Tensor Executor::rows(int width) const {
    const Tensor& buffer = activations_.residual_gradients[static_cast<std::size_t>(width)];
    const std::int64_t n = input_->rows.count, C = buffer.shape.last();
    return buffer.flat(0, n * C).view({1, n, C});
}

PartMemory Executor::memory_of(const Action& action) const {
    const auto slot = static_cast<std::size_t>(action.slot);
    const ParameterPlaces& parameters = parameters_[static_cast<std::size_t>(action.part)];
    PartMemory memory;
    memory[Space::input] = stream(action, action.reads).data;
    memory[Space::output] = stream(action, action.writes).data;
    memory[Space::input_gradient] = gradient(action.writes).data;
    memory[Space::output_gradient] = gradient(action.reads).data;
    const TokenBuffers<Tensor>& tokens = tokens_[static_cast<std::size_t>(action.micro_batch)];
    memory[Space::tokens] = tokens.inputs.data;
    memory[Space::targets] = tokens.targets.data;
    memory.all(Space::scratch) = scratch_;
    memory.all(Space::angles) = angles_;
    memory.all(Space::parameter) = parameters.parameters;
    memory.all(Space::parameter_gradient) = parameters.gradients;
    memory.all(Space::amax) = parameters.amax;
    const int place = action.part - step_->chunk_of(action).first_with_input() + 1;
    memory.all(Space::kept) =
        part_of(action).makes_losses() ? losses_ : kept_[slot][static_cast<std::size_t>(place)];
    for (const auto* uses : {&action.reads, &action.writes}) {
        for (const BufferUse& use : *uses) {
            if (use.role == BufferRole::output_gradients)
                memory.all(Space::kept_gradient) = output_gradients_[static_cast<std::size_t>(use.index)];
        }
    }
    return memory;
}

Running Executor::running(const RowRange& rows) const {
    return {.ops = ops_,
            .ranks = ranks_,
            .node = nullptr,
            .loss_scale = input_->loss_scale,
            .rows = rows,
            .records_amax = input_->records_amax};
}

void Executor::run_part(const Action& action, const List& list) {
    run_list(list, memory_of(action), input_->sequences, running({}));
    if (part_of(action).makes_losses()) sum_losses(action);
}

void Executor::sum_losses(const Action& action) {
    const Tensor losses =
        activations_.losses[static_cast<std::size_t>(lists_of(action).losses)].slice(0, input_->sequences);
    if (action.kind == ActionKind::forward && input_->see_losses)
        input_->see_losses(action.micro_batch, losses);
    ops_.run(Sum{loss_sum(), losses});
}

// Runs a part for a few rows. The head computes the logits of the last row only.
void Executor::forward_rows(const Action& action) {
    const PartLists& lists = lists_of(action);
    RowRange range = input_->rows;
    PartMemory memory = memory_of(action);
    if (action.kind == ActionKind::logits) {
        memory[Space::input] =
            stream(action, action.reads)
                .view({range.count, outline().widths[static_cast<std::size_t>(part_of(action).input_width)]})
                .slice(range.count - 1, 1)
                .data;
        range = {range.position + range.count - 1, 1};
    }
    const bool keeps_input = step_->recompute.kind == RecomputeKind::block && part_of(action).is_layer() &&
                             step_->recompute.recomputes(part_of(action).layer) && !lists.rows_of_all.empty();
    if (keeps_input) {
        std::vector<BufferUse> kept = action.writes;
        std::erase_if(kept, [](const BufferUse& use) { return use.role == BufferRole::rows; });
        memory[Space::kept_input] = stream(action, kept).data;
    }
    if (!action.writes.empty() && action.kind != ActionKind::logits)
        memory[Space::output] = rows(part_of(action).output_width).data;
    run_list(keeps_input ? lists.rows_of_all : lists.rows, memory, 1, running(range));
    if (action.kind != ActionKind::logits) return;
    const Tensor& made = activations_.losses[static_cast<std::size_t>(lists.logits)];
    logits_ = ranks_.is_shared() ? made.view({1, made.elements()}) : made.slice(0, 1);
}

}  // namespace llmc
